"""Who gets which batches: one session for each rank of each job, in order and each step once.

In: requests of clients, and what `fetching` makes whole. Out: batches of successive steps with their cursors. Sessions that
want the same batches take them from one feed; memory is shared out among all. `service` imports it.
"""
