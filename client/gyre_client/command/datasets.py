"""`gyre datasets`: which datasets a daemon serves."""

import argparse

from gyre_client.display.formatting import CommandOutput, plain, table
from gyre_client.transport.connection import Connection


def datasets(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Returns the datasets that the daemon serves by name."""
    found = connection.list_datasets().datasets
    rows = [(each.name, each.format, "yes" if each.open else "no", each.uri) for each in found]
    text = table(("NAME", "FORMAT", "OPEN", "URI"), rows)
    if not rows:
        text = "This daemon serves no dataset by name."
    return CommandOutput([plain(each) for each in found], text)
