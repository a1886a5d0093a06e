"""Who gets which batches: one session for each rank of each job, in order and each step once.

In: requests of clients, and the batch groups that `fetching` reads. Out: batches of successive
steps with their cursors. `session` is what one client talks to. Sessions that want the same batches
are consumers of one shared stream: `stream_state` decides what it fetches and for whom, and
`shared_stream` does it. `table` has all sessions, and `room` shrinks the largest when a new one
finds too little memory. `service` and `server` import this package.
"""
