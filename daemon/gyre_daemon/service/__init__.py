"""The gRPC service: converts messages to the daemon's values and back, and errors to statuses.

In: a catalog of datasets, a table of sessions, and the side channels. Out: a service to register
with a server. `control` speaks the stream of one session, `convert` makes messages, and `loader`
has the calls. Only this package, `server` and `cli` import gRPC; only this package imports the
protocol. `server` imports this package.
"""

from gyre_daemon.service.loader import SERVICE_NAME, LoaderService, register

__all__ = ["SERVICE_NAME", "LoaderService", "register"]
