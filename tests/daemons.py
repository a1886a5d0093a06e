"""A `gyred` that waits longer for a slow job, the status of any, and those that are private."""

import contextlib
from pathlib import Path

import psutil
from gyre_client.transport.channel import parse_address
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


def private_daemons(temporary: Path) -> list[psutil.Process]:
    """Returns the private daemons that run with their folders in one for temporary files."""
    found = []
    for folder in temporary.glob("gyred-*"):
        with contextlib.suppress(OSError, ValueError, psutil.Error):  # it ends, or has just begun
            process = psutil.Process(int((folder / "gyre.sock.lock").read_text()))
            if str(folder) in process.cmdline():
                found.append(process)
    return found
