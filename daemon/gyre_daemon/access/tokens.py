"""Tokens: secrets in files, by which callers over TCP are known.

A file has a token a line, perhaps followed by the time at which it expires (RFC 3339):

    # for the nightly runs
    0iVxZ2PvJm3nYc7bqLr5TgKd8WsAeHfU  2027-01-31T00:00:00Z

Several lines let a new token be handed out before the old one is taken away.
"""

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from math import inf
from pathlib import Path

from gyre_daemon.errors import ConfigError, NotAuthenticated
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.private_files import FileStamp, read_file, stamp_of

# RFC 6750, section 2.1. With 32 characters, a token cannot be found by trying, however fast.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_MIN_CHARS, _MAX_CHARS = 32, 4096
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class _Token:
    name: str
    digest: bytes
    expires: float  # seconds since the epoch; infinity for never


class TokenStore:
    """The tokens of all files, by name. The files are read again when they change."""

    def __init__(self, files: Mapping[str, str], clock: Callable[[], float] = time.time) -> None:
        """Read all files.

        Args:
            files: by the name that their tokens stand for.
            clock: seconds since the epoch.

        Raises:
            ConfigError: a name or a file cannot be used, or two names have one token.
        """
        self._clock = clock
        self._files = {name: Path(path) for name, path in files.items()}
        for name in self._files:
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"tokens: the name {name!r:.100} must have 1 to 64 letters, digits, `_`, `.` "
                    "or `-`"
                )
        self._stamps: dict[str, FileStamp | None] = {}
        self._tokens: dict[str, tuple[_Token, ...]] = {}
        for name in self._files:
            self._read(name)

    def __bool__(self) -> bool:
        return bool(self._files)

    def refresh(self) -> None:
        """Read the changed files again, and log the differences.

        The tokens of a file that was removed are no longer valid. Of a file that cannot be used,
        the earlier tokens stay valid.
        """
        for name, path in self._files.items():
            before = self._stamps[name]
            if stamp_of(path) == before:
                continue
            if (stamp := stamp_of(path)) is None:
                self._stamps[name], self._tokens[name] = None, ()
                log_event("tokens removed", {"name": name, "path": path}, logging.WARNING)
                continue
            try:
                self._read(name)
            except ConfigError as error:
                self._stamps[name] = stamp
                log_event("tokens refused", {"name": name, "reason": error}, logging.ERROR)
            else:
                log_event("tokens reloaded", {"name": name, "tokens": len(self._tokens[name])})

    def name_of(self, token: str) -> str:
        """The name that a token stands for. It is compared with all tokens, in constant time.

        Raises:
            NotAuthenticated: no file has the token, or it has expired.
        """
        digest, found = _digest(token), None
        for each in self._all():
            if hmac.compare_digest(each.digest, digest):
                found = each
        if found is None:
            raise NotAuthenticated("this daemon does not know the token that was sent")
        if found.expires <= self._clock():
            raise NotAuthenticated(f"the token {found.name!r} has expired; ask for a new one")
        return found.name

    def expiries(self) -> dict[str, float]:
        """When the last token of each name expires, in seconds since the epoch, unless never."""
        last = {
            name: max((each.expires for each in tokens), default=0.0)
            for name, tokens in list(self._tokens.items())
        }
        return {name: at for name, at in last.items() if at < inf}

    def _all(self) -> Iterator[_Token]:
        for tokens in list(self._tokens.values()):
            yield from tokens

    def _read(self, name: str) -> None:
        """Take the tokens of one file over."""
        path = self._files[name]
        stamp = stamp_of(path)
        text = read_file(path, f"tokens.{name}", is_secret=True).decode(errors="replace")
        lines = [line.split() for line in text.splitlines()]
        tokens = tuple(
            _parse(name, f"line {number} of {path}", words)
            for number, words in enumerate(lines, 1)
            if words and not words[0].startswith("#")
        )
        if not tokens:
            raise ConfigError(f"tokens.{name}: {path} has no token")
        others = {each.digest: each.name for each in self._all() if each.name != name}
        for token in tokens:
            if token.digest in others:
                raise ConfigError(
                    f"tokens.{name}: a token of {path} is also one of "
                    f"tokens.{others[token.digest]}; each name needs its own"
                )
        self._stamps[name], self._tokens[name] = stamp, tokens


def _parse(name: str, where: str, words: list[str]) -> _Token:
    token, *rest = words
    if not (_MIN_CHARS <= len(token) <= _MAX_CHARS and _TOKEN.fullmatch(token)):
        raise ConfigError(
            f"tokens.{name}: {where} must begin with a token of at least {_MIN_CHARS} letters, "
            "digits or any of `._~+/-`, such as `openssl rand -hex 32` makes"
        )
    return _Token(name, _digest(token), _expiry(name, where, rest) if rest else inf)


def _expiry(name: str, where: str, words: list[str]) -> float:
    try:
        (text,) = words
        expires = datetime.fromisoformat(text)
        if expires.tzinfo is None:
            raise ValueError
    except ValueError as error:
        raise ConfigError(
            f"tokens.{name}: {where} must have the time of expiry, with its time zone, behind the "
            "token, such as 2027-01-31T00:00:00Z, or nothing"
        ) from error
    return expires.timestamp()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
