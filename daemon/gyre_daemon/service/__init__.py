"""The gRPC face of the daemon: the only room that knows protobuf."""

from gyre_daemon.service.loader import SERVICE_NAME, LoaderService, register

__all__ = ["SERVICE_NAME", "LoaderService", "register"]
