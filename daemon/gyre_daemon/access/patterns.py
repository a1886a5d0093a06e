"""Patterns of users and jobs in the configuration: those that match no possible name are refused.

A pattern is a shell's: `*`, `?`, and sets such as `[0-9]`. Names of principals are `uid:1004`,
`token:ci`, `certificate:train-3` and `anonymous`.
"""

import fnmatch
import re
from collections.abc import Iterator, Sequence

from gyre_daemon.access.principal import ANONYMOUS
from gyre_daemon.config import DaemonConfig
from gyre_daemon.errors import ConfigError

_KINDS = ("uid:", "token:", "certificate:")
_WILDCARD = re.compile(r"[*?[]")
_UID = re.compile(r"0|[1-9][0-9]{0,9}")
_IMPOSSIBLE = "(?!)"  # the expression of a set like [z-a]


def check_patterns(config: DaemonConfig) -> None:
    """Refuse patterns of `job_weights` and `limits.users` that no user or job can match.

    Raises:
        ConfigError: names the pattern and its fault.
    """
    for pattern in config.job_weights:
        where = f"job_weights has the pattern {pattern[:100]!r}"
        user, slash, job = pattern.partition("/")
        if slash:
            _check_user(user, where)
        check_name(job if slash else pattern, where)
    for pattern in config.limits.users:
        _check_user(pattern, f"limits.users has the pattern {pattern[:100]!r}")


def unmatched(config: DaemonConfig) -> Iterator[str]:
    """A warning for each entry whose credential the daemon never checks."""
    for where, name in _named(config):
        kind, _, value = name.partition(":")
        if kind == "token" and not fnmatch.filter(config.tokens, value):
            yield f"{where} names {name[:100]!r}, and `tokens` has no file of that name"
        elif kind == "certificate" and not config.tls_client_ca:
            yield f"{where} names {name[:100]!r}, and there is no `tls_client_ca`"


def _named(config: DaemonConfig) -> Iterator[tuple[str, str]]:
    """Each place of the configuration that names principals, with the name or pattern."""
    lists = {f"datasets.{name}.allow": each.allow for name, each in config.datasets.items()}
    for where, entries in {"admin": config.admin, **lists}.items():
        yield from ((where, entry) for entry in entries)
    yield from (("limits.users", pattern) for pattern in config.limits.users)
    for pattern in config.job_weights:
        user, slash, _ = pattern.partition("/")
        if slash:
            yield "job_weights", user


def check_name(pattern: str, where: str) -> None:
    """Refuse a pattern that no name matches.

    Args:
        pattern: of a job or a common name.
        where: the place of the pattern, for the error.

    Raises:
        ConfigError: it is empty or has control characters, or one of its sets is not closed or has
            nothing in it.
    """
    if not pattern:
        raise ConfigError(f"{where}; an empty pattern matches nothing: write `*` for any name")
    if not pattern.isprintable():
        raise ConfigError(f"{where}; it has control characters, which no name has")
    without_sets = re.sub(r"\[!?+\]?+[^\]]*\]", "", pattern)
    if "[" in without_sets:
        raise ConfigError(f"{where}; its `[` has no `]`: write `[[]` for the character itself")
    if _IMPOSSIBLE in fnmatch.translate(pattern):
        raise ConfigError(
            f"{where}; a set such as [z-a] matches no character: write its range in rising order"
        )


def _check_user(pattern: str, where: str) -> None:
    check_name(pattern, where)
    wild = _WILDCARD.search(pattern)
    literal = pattern[: wild.start()] if wild else pattern
    if not _may_begin(literal, (*_KINDS, ANONYMOUS.name), is_whole=wild is None):
        raise ConfigError(
            f"{where}; a user is named `uid:1004`, `token:NAME`, `certificate:NAME` or "
            f"`{ANONYMOUS.name}`"
        )
    if not wild and literal.startswith("uid:") and not _UID.fullmatch(literal[4:]):
        raise ConfigError(f"{where}; `uid:` takes a user's number")


def _may_begin(literal: str, names: Sequence[str], *, is_whole: bool) -> bool:
    """Whether a principal's name can begin so, or equals the text if the pattern is only that."""
    if literal == ANONYMOUS.name or any(
        literal.startswith(kind) and (literal != kind or not is_whole) for kind in _KINDS
    ):
        return True
    return not is_whole and any(name.startswith(literal) for name in names)
