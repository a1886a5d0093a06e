"""Sessions: each sends one rank of one job its batches, in order and each step once.

In: requests of clients, and the batch groups that `fetching` reads. Out: batches of successive
steps with their cursors. A client talks to one `session`. Sessions that want the same batches share
a stream: `stream_state` decides which steps it fetches for which consumer, and `shared_stream`
fetches them. `table` has all sessions, and `session_request` their memory. `service` and `server`
import this package.
"""
