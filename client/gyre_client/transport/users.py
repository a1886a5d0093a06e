"""Which users' daemons this process trusts."""

import contextlib
import os
import pwd

from gyre_client.errors import InvalidRequest
from gyre_client.messages.arguments import shown, whole

ENVIRONMENT_VARIABLE = "GYRE_DAEMON_USER"
_MAX_UID = 2**32 - 2  # 2^32 - 1 means "no user" to the kernel


def trusted_uids(daemon_user: int | str | None) -> frozenset[int]:
    """Returns the users whose daemons this process trusts: root, its own, and a named one.

    Args:
        daemon_user: A user id or name; None for the one in the environment, if there is one.

    Raises:
        InvalidRequest: This machine knows no such user.
    """
    own = {0, os.geteuid()}
    if daemon_user is None:
        daemon_user = os.environ.get(ENVIRONMENT_VARIABLE) or None
    return frozenset(own if daemon_user is None else {*own, _uid_of(daemon_user)})


def name_of(uid: int) -> str:
    """Returns a user's id and, if this machine knows it, name."""
    with contextlib.suppress(KeyError):
        return f"uid {uid} ({pwd.getpwuid(uid).pw_name})"
    return f"uid {uid}"


def _uid_of(user: int | str) -> int:
    if isinstance(user, str):
        if not (user.isascii() and user.isdigit() and len(user) < 20):
            with contextlib.suppress(KeyError, ValueError):
                return pwd.getpwnam(user).pw_uid
            raise InvalidRequest(
                f"daemon_user is {shown(user)}, but this machine knows no user of that name; give "
                "the user's name or id"
            )
        user = int(user)
    return whole("daemon_user", user, 0, _MAX_UID)
