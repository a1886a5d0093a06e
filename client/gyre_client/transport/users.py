"""Which users' daemons this process trusts."""

import contextlib
import os
import pwd

from gyre_client.errors import InvalidRequest

ENVIRONMENT_VARIABLE = "GYRE_DAEMON_USER"
_MAX_UID = 2**32 - 2  # 2^32 - 1 means "no user" to the kernel


def trusted_uids(daemon_user: int | str | None) -> frozenset[int]:
    """Returns the users whose daemons this process trusts: root, its own, and one that is named.

    Args:
        daemon_user: A user id or name; None for the one in the environment, if there is one.

    Raises:
        InvalidRequest: This machine knows no such user.
    """
    named = daemon_user if daemon_user is not None else os.environ.get(ENVIRONMENT_VARIABLE, "")
    own = {0, os.geteuid()}
    return frozenset(own if named == "" else {*own, _uid_of(named)})


def name_of(uid: int) -> str:
    """Returns a user's id and, if this machine knows it, name."""
    with contextlib.suppress(KeyError):
        return f"uid {uid} ({pwd.getpwuid(uid).pw_name})"
    return f"uid {uid}"


def _uid_of(user: int | str) -> int:
    if isinstance(user, str) and not (user.isascii() and user.isdigit() and len(user) < 20):
        with contextlib.suppress(KeyError, ValueError):
            return pwd.getpwnam(user).pw_uid
        raise InvalidRequest(
            f"daemon_user is {user!r}, but this machine knows no user of that name; give the "
            "user's name or id"
        )
    if not 0 <= int(user) <= _MAX_UID:
        raise InvalidRequest(f"daemon_user is {user}; a user's id is from 0 to {_MAX_UID}")
    return int(user)
