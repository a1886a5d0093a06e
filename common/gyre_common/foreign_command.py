"""Another distribution also installs a command `gyre`, and pip overwrites the older of the two."""

import sysconfig
from importlib.metadata import entry_points
from pathlib import Path

_OURS = "gyre-ml"
_PACKAGE = b"gyre_client"  # our script imports it


def foreign_command() -> str:
    """Warn if `gyre` in this environment starts another distribution's program; empty if not.

    The script is read first: only if it is not Gyre's are all distributions searched.
    """
    script = Path(sysconfig.get_path("scripts"), "gyre")
    try:
        if _PACKAGE in script.read_bytes():
            return ""
    except OSError:
        return ""
    owners = {
        each.dist.name for each in entry_points(group="console_scripts", name="gyre") if each.dist
    }
    others = sorted(owners - {_OURS})
    if not others:
        return ""
    return (
        f"the command `gyre` starts a program of {others[0]}, which pip installed over Gyre's. "
        "Type `python -m gyre_client` instead."
    )
