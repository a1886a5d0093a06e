"""What tests ask of a `gyred`: its status."""

from gyre_client.transport.address import parse_address
from gyre_client.transport.connection import Connection
from gyre_protos.v1 import loader_pb2 as pb

from tests.conftest import Daemon


def status(daemon: Daemon) -> pb.DaemonStatus:
    """Returns the daemon's status, as one of its operators sees it."""
    with Connection(parse_address(daemon.address)) as connection:
        return connection.status()
