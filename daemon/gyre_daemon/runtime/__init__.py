"""What a service needs of its process: fair scheduling, addresses and locks, notifications, limits, the log, the loop's lag.

In and out: nothing of the data. Every wing may import it; it imports only `errors`.
"""
