"""The gRPC service: converts messages to the daemon's values and back, and errors to statuses.

In: a catalog of datasets, a table of sessions, and the side channels. Out: a service to register
with a server. `guard` and `authentication` stand before every call, `control` speaks the stream of
one session, `convert` makes messages, and `loader` has the calls. Only this package, `server` and
`cli` import gRPC; only this package imports the protocol. `server` imports this package.
"""

from gyre_daemon.service.authentication import Authenticator
from gyre_daemon.service.guard import Guard
from gyre_daemon.service.loader import SERVICE_NAME, LoaderService, register
from gyre_daemon.service.transport import SERVER_OPTIONS, server_credentials

__all__ = [
    "SERVER_OPTIONS",
    "SERVICE_NAME",
    "Authenticator",
    "Guard",
    "LoaderService",
    "register",
    "server_credentials",
]
