"""`gyre drain`: stops a daemon, as an operator."""

import argparse

from gyre_client.display.formatting import CommandOutput, duration, plain
from gyre_client.transport.connection import Connection


def drain(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Lets the daemon stop: it sends the batches in flight, and opens no more sessions."""
    answer = connection.drain()
    text = (
        f"The daemon at {connection.address.text} drains {answer.num_sessions} open sessions and "
        f"ends, after {duration(answer.timeout_s)} at the latest."
    )
    return CommandOutput(plain(answer), text)
