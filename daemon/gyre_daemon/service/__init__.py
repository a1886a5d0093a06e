"""The gRPC service: converts messages to the daemon's values and back, and errors to statuses.

In: a catalog of datasets, a table of sessions, and the side channels. Out: a service to register
with a server. `guard` stands before every call, `loader` has the calls and speaks the stream of one
session, and `convert` makes messages. Only this package, `server` and
`cli` import gRPC; only this package imports the protocol. `server` imports this package.
"""

from gyre_daemon.service.guard import SERVER_OPTIONS, Authenticator, Guard, server_credentials
from gyre_daemon.service.loader import SERVICE_NAME, LoaderService, register

__all__ = [
    "SERVER_OPTIONS",
    "SERVICE_NAME",
    "Authenticator",
    "Guard",
    "LoaderService",
    "register",
    "server_credentials",
]
