"""What is counted and how it is told: counters, a session's occupancy, and the Prometheus exposition.

In: counts from every wing. Out: a page of metrics. It imports no wing but `runtime`.
"""
