"""Counters of the daemon and of its jobs, and how Prometheus scrapes them.

In: counts from every package, and how full each prefetch window is. Out: totals and recent rates,
for the status and for Prometheus. It imports only `runtime` and `errors`.
"""
