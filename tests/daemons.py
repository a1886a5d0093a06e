"""A `gyred` that waits longer for a slow job, and the status of any."""

from gyre_client.transport.address import parse_address
from gyre_client.transport.connection import Connection
from gyre_protos.v1 import loader_pb2 as pb

from tests.conftest import Daemon

# A daemon with another limit of what a consumer may cost others: the pauses of a test count, and
# those of a busy machine do not.
WITH_STALL = """
import sys
from gyre_daemon import cli
from gyre_daemon.sessions import stream_state
stream_state.STALL_S = {}
cli.main(["serve", "--config", sys.argv[1]])
"""


def status(daemon: Daemon) -> pb.DaemonStatus:
    """Returns the daemon's status, as one of its operators sees it."""
    with Connection(parse_address(daemon.address)) as connection:
        return connection.status()
