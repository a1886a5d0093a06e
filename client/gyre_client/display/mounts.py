"""The messages about a mount of the daemon's machine that hangs."""

from gyre_protos.text import printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.display.formatting import duration


def mount_line(mount: pb.Mount) -> str:
    """Returns which mount hangs and since when, in one line."""
    name = f"{printable(mount.path)} ({printable(mount.file_system)})"
    return f"{name} has not answered for {duration(mount.hangs_since_s)}"
