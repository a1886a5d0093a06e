"""The gRPC service: converts messages to the daemon's values and back, and errors to statuses.

In: a catalog of datasets, a table of sessions, and the side channels. Out: a service to register
with a server. `guard` stands before every call, `methods` has the calls and speaks the stream of
one session, `requests` reads messages and `replies` makes them. Only this package, `server` and
`cli` import gRPC; only this package imports the protocol. `server` imports this package.
"""
