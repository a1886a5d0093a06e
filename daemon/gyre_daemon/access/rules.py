"""The lists `allow` and `admin`: the callers that may read a dataset, and the operators.

An entry is a word, a colon and a value:

    anyone               every caller, also one over TCP that gives no credential
    uid:1004             that user of this machine
    user:alice           the same, by name
    group:vision         a user of this machine in that group; a number is a group id
    token:ci             the holder of that token
    certificate:train-*  a client certificate whose common name matches the pattern
    job:prod-*           a job whose name matches the pattern

A client chooses the name of its job, so the name proves nothing. Entries `job:` therefore only
restrict: a caller needs another entry that admits it and, where there are entries `job:`, a job
that one of them matches. Where a list has no other entries, the default callers are admitted.

Names of users and groups become numbers when the configuration is read. The kernel tells the
numbers of a caller, so only they decide.
"""

import difflib
import fnmatch
import grp
import os
import pwd
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from gyre_daemon.access.patterns import check_name
from gyre_daemon.access.principal import Principal
from gyre_daemon.errors import ConfigError

_MAX_ID = 2**32 - 2  # the kernel's; one more stands for "no user"
_WORDS = ("uid", "user", "group", "token", "certificate", "job")


@dataclass(frozen=True, slots=True)
class Rules:
    """One list, parsed.

    Attributes:
        anyone: whether every caller is admitted.
        uids: admitted users.
        gids: groups whose members are admitted.
        names: patterns of the names of principals that hold a credential.
        jobs: patterns of names; a job must match one of them; empty for any job.
    """

    anyone: bool = False
    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()
    names: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()

    @property
    def admits_somebody(self) -> bool:
        """Whether it admits any caller, and does not only restrict jobs."""
        return bool(self.anyone or self.uids or self.gids or self.names)

    def admits(self, caller: Principal) -> bool:
        """Whether an entry other than `job:` admits the caller."""
        return (
            self.anyone
            or caller.uid in self.uids
            or not self.gids.isdisjoint(caller.gids)
            or any(fnmatch.fnmatchcase(caller.name, pattern) for pattern in self.names)
        )

    def admits_job(self, job: str) -> bool:
        """Whether a job of this name may read; ask only for an admitted caller."""
        return not self.jobs or any(fnmatch.fnmatchcase(job, pattern) for pattern in self.jobs)


def own_user_and_group() -> Rules:
    """The callers that a dataset without `allow` admits: the daemon's user and group, and root."""
    return Rules(uids=frozenset((0, os.geteuid())), gids=frozenset((os.getegid(),)))


def own_user() -> Rules:
    """The operators where `admin` is absent: the daemon's user, and root."""
    return Rules(uids=frozenset((0, os.geteuid())))


def parse_allow(entries: Sequence[str], key: str) -> Rules:
    """The rules of a list `allow`; the default where no entry admits a caller.

    Args:
        entries: as the module says.
        key: the list's name in the configuration, for errors.

    Raises:
        ConfigError: an entry has an unknown word, user or group; the error names the nearest known
            one; or a pattern that matches no possible name.
    """
    rules = _parse(entries, key)
    return rules if rules.admits_somebody else replace(own_user_and_group(), jobs=rules.jobs)


def parse_admin(entries: Sequence[str], key: str = "admin") -> Rules:
    """The rules of the list `admin`; the default where it is empty.

    Raises:
        ConfigError: as `parse_allow`; or an entry would make every caller or a job an operator.
    """
    rules = _parse(entries, key)
    if rules.anyone or rules.jobs:
        raise ConfigError(
            f"{key} has an entry `anyone` or `job:`, and an operator may read and see everything. "
            "Name users, groups, tokens or certificates."
        )
    return rules if rules.admits_somebody else own_user()


def _parse(entries: Iterable[str], key: str) -> Rules:
    uids, gids, names, jobs = set(), set(), [], []
    anyone = False
    for entry in entries:
        word, _, value = entry.partition(":")
        where = f"{key} has the entry {entry[:100]!r}"
        if entry == "anyone":
            anyone = True
            continue
        if word not in _WORDS or not value:
            raise ConfigError(f"{where}; {_advice(word, value)}")
        match word:
            case "uid":
                uids.add(_number(value, where))
            case "user":
                uids.add(_user(value, where))
            case "group":
                gids.add(_number(value, where) if value.isdecimal() else _group(value, where))
            case "job":
                check_name(value, where)
                jobs.append(value)
            case "token":
                names.append(_literal(entry))
            case "certificate":
                check_name(value, where)
                names.append(entry)
    return Rules(anyone, frozenset(uids), frozenset(gids), tuple(names), tuple(jobs))


def _advice(word: str, value: str) -> str:
    close = difflib.get_close_matches(word, (*_WORDS, "anyone"), n=1)
    if close == ["anyone"] and not value:
        return "did you mean `anyone`?"
    if close and close[0] != word:
        return f"did you mean `{close[0]}:{value or 'NAME'}`?"
    return f"an entry is `anyone`, or one of {', '.join(f'{each}:' for each in _WORDS)} and a name"


def _number(text: str, where: str) -> int:
    if not text.isdecimal() or not text.isascii() or len(text) > 10 or int(text) > _MAX_ID:
        raise ConfigError(f"{where}; an id is a whole number of at most {_MAX_ID}")
    return int(text)


def _user(name: str, where: str) -> int:
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        known = _nearest(name, lambda: [each.pw_name for each in pwd.getpwall()])
    raise ConfigError(
        f"{where}, but this machine has no user of that name; {known}`uid:` works too"
    )


def _group(name: str, where: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except (KeyError, ValueError):
        known = _nearest(name, lambda: [each.gr_name for each in grp.getgrall()])
    raise ConfigError(
        f"{where}, but this machine has no group of that name; {known}a group's number works too"
    )


def _nearest(name: str, names: Callable[[], list[str]]) -> str:
    close = difflib.get_close_matches(name, names(), n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def _literal(text: str) -> str:
    """A pattern that matches this text alone."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in text)
