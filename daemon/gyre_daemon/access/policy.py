"""The caller of a request, its rights by the configuration in force, and its limits.

A pattern is a shell's: `*`, `?`, and sets such as `[0-9]`. Names of principals are `uid:1004`,
`token:ci`, `certificate:train-3` and `anonymous`.

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

import ctypes
import difflib
import fnmatch
import grp
import hashlib
import os
import pwd
import re
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from gyre_protos.text import counted
from msgspec import Struct

from gyre_daemon.config import DaemonConfig, LimitsConfig, UserLimits
from gyre_daemon.config.load import sources_below
from gyre_daemon.errors import ConfigError, NotAllowed, Overloaded
from gyre_daemon.runtime.threads import Bucket

_CREDENTIALS = struct.Struct("3i")
_SO_PEERGROUPS = 59  # since Linux 4.13; the standard library does not name it
_MAX_GROUPS = 65536  # the kernel's NGROUPS_MAX
_getsockopt = ctypes.CDLL(None, use_errno=True).getsockopt


class Principal(Struct, frozen=True):
    """The identity of a caller: a user of this machine, or the holder of a credential.

    Sessions, limits and the audit log belong to `name`. Two callers with the same name may do the
    same things, and share one limit. The other fields are those of a user of this machine, with all
    groups of its process, and that process when it connected.
    """

    name: str
    uid: int | None = None
    gids: frozenset[int] = frozenset()
    pid: int = 0


ANONYMOUS = Principal("anonymous")


def peer_principal(connection: socket.socket) -> Principal:
    """The user at the other end of a Unix socket, as the kernel knew it when it connected.

    Raises:
        OSError: the socket is not connected.
    """
    pid, uid, gid = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return Principal(f"uid:{uid}", uid, frozenset((gid, *_peer_groups(connection))), pid)


def _peer_groups(connection: socket.socket) -> list[int]:
    groups = (ctypes.c_uint32 * _MAX_GROUPS)()  # `socket.getsockopt` returns at most 1 KiB
    size = ctypes.c_uint32(ctypes.sizeof(groups))
    level = socket.SOL_SOCKET
    if _getsockopt(connection.fileno(), level, _SO_PEERGROUPS, groups, ctypes.byref(size)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return groups[: size.value // ctypes.sizeof(ctypes.c_uint32)]


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
    """Refuse a pattern that no job's or common name matches; `where` is its place, for the error.

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
    is_named = any(each != literal and literal.startswith(each) for each in _KINDS)
    may_become = wild and any(each.startswith(literal) for each in (*_KINDS, ANONYMOUS.name))
    if not (is_named or may_become or literal == ANONYMOUS.name):
        raise ConfigError(
            f"{where}; a user is named `uid:1004`, `token:NAME`, `certificate:NAME` or "
            f"`{ANONYMOUS.name}`"
        )
    if not wild and literal.startswith("uid:") and not _UID.fullmatch(literal[4:]):
        raise ConfigError(f"{where}; `uid:` takes a user's number")


_MAX_ID = 2**32 - 2  # the kernel's; one more stands for "no user"
_WORDS = ("uid", "user", "group", "token", "certificate", "job")


class Rules(Struct, frozen=True):
    """One list, parsed: whom it admits; and patterns of jobs that it restricts them to, if any."""

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


def parse_allow(entries: Sequence[str], key: str) -> Rules:
    """The rules of a list `allow`, called `key`.

    Where no entry admits a caller, the daemon's user and group and root are admitted.

    Raises:
        ConfigError: an entry has an unknown word, user or group; the error names the nearest known
            one; or a pattern that matches no possible name.
    """
    rules = _parse(entries, key)
    if rules.admits_somebody:
        return rules
    return Rules(uids=_own_uids(), gids=frozenset((os.getegid(),)), jobs=rules.jobs)


def parse_admin(entries: Sequence[str]) -> Rules:
    """The rules of the list `admin`; where it is empty, the daemon's user and root are operators.

    Raises:
        ConfigError: as `parse_allow`; or an entry would make every caller or a job an operator.
    """
    rules = _parse(entries, "admin")
    if rules.anyone or rules.jobs:
        raise ConfigError(
            "admin has an entry `anyone` or `job:`, and an operator may read and see everything. "
            "Name users, groups, tokens or certificates."
        )
    return rules if rules.admits_somebody else Rules(uids=_own_uids())


def _own_uids() -> frozenset[int]:
    return frozenset((0, os.geteuid()))


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
        known = [each.pw_name for each in pwd.getpwall()]
    raise ConfigError(f"{where}, {_unknown('user', name, known)}`uid:` works too")


def _group(name: str, where: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except (KeyError, ValueError):
        known = [each.gr_name for each in grp.getgrall()]
    raise ConfigError(f"{where}, {_unknown('group', name, known)}a group's number works too")


def _unknown(kind: str, name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    advice = f"did you mean {close[0]!r}? " if close else ""
    return f"but this machine has no {kind} of that name; {advice}"


def _literal(text: str) -> str:
    """A pattern that matches this text alone."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in text)


class Policy:
    """Decides for each caller. Operators may do everything."""

    def __init__(self, config: DaemonConfig) -> None:
        """Decide by the lists of this configuration.

        Raises:
            ConfigError: a list has an entry that cannot be understood.
        """
        self._admin = parse_admin(config.admin)
        self._readers = {
            name: parse_allow(dataset.allow, f"datasets.{name}.allow")
            for name, dataset in config.datasets.items()
        }
        self._sources = {name: sources_below(name, config.datasets) for name in config.datasets}
        self.has_rules = any(dataset.allow for dataset in config.datasets.values())

    def take_over(self, other: "Policy") -> None:
        """Decide as another policy does from now on; it was made where that may take its time."""
        self._readers, self._admin, self.has_rules = other._readers, other._admin, other.has_rules
        self._sources = other._sources

    def is_admin(self, caller: Principal) -> bool:
        """Whether the caller is an operator."""
        return self._admin.admits(caller)

    def may_read(self, caller: Principal, dataset: str) -> bool:
        """Whether the caller may read a dataset, with some job at least.

        Only operators may read a dataset outside of the configuration, which they define ad hoc.
        """
        rules = self._readers.get(dataset)
        return self.is_admin(caller) or (rules is not None and rules.admits(caller))

    def sources(self, dataset: str) -> tuple[str, ...]:
        """The datasets whose samples a configured mixture has; none of any other dataset."""
        return self._sources.get(dataset, ())

    def sees_all(self, caller: Principal) -> bool:
        """Whether the caller may read every dataset."""
        return self.is_admin(caller) or all(
            rules.admits(caller) for rules in self._readers.values()
        )

    def readable(self, caller: Principal) -> list[str]:
        """The configured datasets that the caller may read, in the order of their names."""
        return [name for name in sorted(self._readers) if self.may_read(caller, name)]

    def check_job(self, caller: Principal, dataset: str, job: str) -> None:
        """Refuse a job that may not read a dataset, or a source of it, which its user may read.

        Raises:
            NotAllowed: no entry `job:` matches its name; lists them.
        """
        for name in (dataset, *self.sources(dataset)):
            rules = self._readers.get(name)
            if rules is None or self.is_admin(caller) or rules.admits_job(job):
                continue
            raise NotAllowed(
                f"only jobs named {' or '.join(rules.jobs)} may read `{name}`, and this one is "
                f"named {job!r}; give it such a name, or ask the operator",
                {"dataset": name, "job": job},
            )

    def check_sources(self, caller: Principal, dataset: str) -> None:
        """Refuse a mixture with a source that the caller may not read; no source is named.

        Raises:
            NotAllowed: the caller may not read every source.
        """
        if not all(self.may_read(caller, source) for source in self.sources(dataset)):
            raise NotAllowed(
                f"{caller.name} may read the mixture `{dataset}`, but not every source of it; ask "
                "the operator",
                {"dataset": dataset},
            )

    def refusal(self, caller: Principal, dataset: str, job: str) -> str:
        """The list by which the caller may not read a dataset with this job; empty for none."""
        if self.is_admin(caller):
            return ""
        for name in (dataset, *self.sources(dataset)):
            rules = self._readers.get(name)
            if rules and not (rules.admits(caller) and rules.admits_job(job)):
                return f"datasets.{name}.allow"
        return ""

    def check_session(self, caller: Principal, dataset: str, job: str) -> None:
        """Refuse a session whose owner has lost the right to its dataset in a reload.

        A session keeps a dataset that the configuration no longer has.

        Raises:
            NotAllowed: its owner may no longer read the dataset, or not with this job.
        """
        names = (dataset, *self.sources(dataset))
        if not all(self.may_read(caller, name) for name in names if name in self._readers):
            raise NotAllowed(
                f"{caller.name} may no longer read `{dataset}`: its operator changed who may",
                {"dataset": dataset},
            )
        self.check_job(caller, dataset, job)


# A user that was silent may make the requests of this many seconds at once: the ranks of a
# job begin together. With more, a burst keeps the event loop busy for longer.
_BURST_S = 5.0
# A message on a control stream costs this part of a request, and again for each of these bytes: a
# message of 64 KiB may release thousands of batches. A user who sends more is not refused but read
# later. Jobs of small batches need some hundred messages per second; with a smaller number of
# messages per request they would wait.
_MESSAGES_PER_REQUEST = 20
_MESSAGE_BYTES = 64
# Lists of transforms, and ways to pack, that a user may declare at once, and how many more per
# second. Each new list may have to be measured, which reads the dataset and leaves a file for each
# shard; to pack takes up to minutes, one after the other. With more, a user who declares one after
# the other fills the disk and the memory, and keeps others from packing.
_CHAINS_AT_ONCE, _CHAINS_PER_S = 64, 0.2
_MAX_CHAINS = 4096  # to remember, of all users
_MAX_BUCKETS = 4096  # of those that called last


class Limits:
    """The limits of all users and jobs, and how fast each of them calls."""

    def __init__(
        self, config: LimitsConfig | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """No caller is known yet; None, as in a private daemon, limits none."""
        self._config = config
        self._requests = Rates(clock)
        self._chains = Rates(clock, _CHAINS_AT_ONCE / _CHAINS_PER_S)
        self._declared: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def replace(self, config: LimitsConfig) -> None:
        """Apply these limits from now on; users already beyond them keep their sessions."""
        self._config = config

    def of_user(self, name: str) -> UserLimits | None:
        """The limits of a user; None for none."""
        if self._config is None:
            return None
        overrides = self._config.users.items()
        return next(
            (limits for pattern, limits in overrides if fnmatch.fnmatchcase(name, pattern)),
            self._config.user,
        )

    def count_request(self, caller: Principal) -> None:
        """Count a request of a user.

        Raises:
            Overloaded: the user calls too often.
        """
        name, limits = caller.name, self.of_user(caller.name)
        if limits and (wait_s := self._requests.take(name, limits.requests_per_s)):
            raise Overloaded(
                f"{name} makes more than {limits.requests_per_s:g} requests per second; try again "
                f"in {wait_s:.1f} s",
                {
                    "limit_per_s": limits.requests_per_s,
                    "who": name,
                    "retry_after_s": round(wait_s, 3),
                },
            )

    def count_chain(self, user: str, chain: bytes) -> None:
        """Count transforms or a way to pack that a user declares, unless it did so lately.

        Raises:
            Overloaded: the user declares too many different ones.
        """
        if self.of_user(user) is None:
            return
        key = user, hashlib.blake2b(chain, digest_size=16).digest()
        if key not in self._declared and (wait_s := self._chains.take(user, _CHAINS_PER_S)):
            raise Overloaded(
                f"{user} has declared more than {_CHAINS_AT_ONCE} different lists of transforms "
                "or ways to pack; "
                f"try again in {wait_s:.1f} s",
                {"who": user, "retry_after_s": round(wait_s, 3)},
            )
        self._declared[key] = None
        self._declared.move_to_end(key)
        if len(self._declared) > _MAX_CHAINS:
            self._declared.popitem(last=False)

    def pace(self, user: str) -> Callable[[int], float]:
        """How a user's control stream is slowed down.

        Returns:
            A function from the bytes of a message to the seconds before the next is to be read.
        """

        def pause_s(num_bytes: int) -> float:
            if limits is None:
                return 0.0
            per_s = _MESSAGES_PER_REQUEST * limits.requests_per_s
            return self._requests.charge(key, per_s, 1.0 + num_bytes / _MESSAGE_BYTES)

        limits, key = self.of_user(user), f"{user} messages"
        return pause_s

    def why_no_connection(self, caller: Principal, num_open: int) -> str:
        """Why a user with this many connections may have no further one; empty if it may."""
        limits = self.of_user(caller.name)
        if limits is None or num_open < limits.connections:
            return ""
        return (
            f"{caller.name} has {counted(num_open, 'connection')} to the daemon, and may have "
            f"{limits.connections} (limits.user.connections); close some"
        )

    def check_sessions(self, user: str, num_open: int) -> None:
        """Refuse a further session of a user that has this many.

        Raises:
            Overloaded: it has all that it may have.
        """
        limits = self.of_user(user)
        if limits and num_open >= limits.sessions:
            raise Overloaded(
                f"user {user} has {counted(num_open, 'session')}, and may have {limits.sessions} "
                "(limits.user.sessions); close one",
                {"needed_sessions": num_open + 1, "limit_sessions": limits.sessions, "who": user},
            )


class Rates:
    """How often each caller has called lately: a token bucket each, for the last ones."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, burst_s: float = _BURST_S
    ) -> None:
        """No one has called; `burst_s` is how many seconds' tokens may be taken at once."""
        self._clock, self._burst_s = clock, burst_s
        self._buckets: dict[tuple[str, float], Bucket] = {}

    def __len__(self) -> int:
        """How many callers are remembered."""
        return len(self._buckets)

    def take(self, key: str, per_s: float) -> float:
        """Take a token of a caller; 0, or the seconds until there is one."""
        bucket = self._bucket(key, per_s)
        return 0.0 if bucket.take(self._clock()) else bucket.wait_s

    def charge(self, key: str, per_s: float, num: float) -> float:
        """Take tokens, whether they are there or not; the seconds until none is owed."""
        return self._bucket(key, per_s).charge(self._clock(), num)

    def _bucket(self, key: str, per_s: float) -> Bucket:
        bucket = self._buckets.pop((key, per_s), None)
        if bucket is None:
            bucket = Bucket(max(1.0, per_s * self._burst_s), per_s, self._clock())
        self._buckets[key, per_s] = bucket  # the last of all
        if len(self._buckets) > _MAX_BUCKETS:
            del self._buckets[next(iter(self._buckets))]
        return bucket
