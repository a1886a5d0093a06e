"""Every error that the client raises.

    GyreError
    ├── InvalidRequest (also a ValueError)   an argument or a request that cannot be valid
    ├── ConfigError (also a ValueError)      a dataset's configuration is wrong
    ├── UnknownDataset                       no dataset of that name, or nothing at its location
    ├── ShardMissing                         a shard of the dataset is gone
    ├── NotAuthenticated                     over TCP: caller or daemon did not prove its identity
    ├── NotAllowed                           the daemon does not serve the dataset to this reader
    ├── StorageUnavailable                   the daemon could not reach the storage in time
    ├── CorruptSample                        a sample cannot be read: shard, sample, offset, reason
    ├── CursorRejected                       a state does not fit: the message says how they differ
    ├── Fenced                               a newer session of this job and rank has taken over
    ├── LeaseExpired                         the daemon gave the session up; a Loader re-attaches
    ├── Overloaded                           the daemon has no room: says needed and limit
    ├── DaemonUnavailable                    no daemon answers at the address
    ├── UntrustedDaemon                      another user than one to trust serves the address
    ├── DaemonFault                          the daemon failed in a way it should not
    ├── ForkedProcess                        a Loader was used outside the process that made it
    ├── ConcurrentUse                        two threads used a Loader at the same time
    └── NotInstalled (also an ImportError)   a part of Gyre needs an extra: the message names it

A training script usually lets all of them pass: a Loader itself retries the errors that may pass
(DaemonUnavailable, LeaseExpired, StorageUnavailable, Overloaded) until `reattach_timeout_s`.
The daemon sends the class of an error as its `reason`; `BY_REASON` maps it to the class here.

An error has the problem and the fix in its message; the frames between the caller's line and the
place that found it help only those who look for a fault in Gyre. So public methods cut them
(`folded`). With `GYRE_TRACEBACK=1` in the environment, nothing is cut.
"""

import functools
import os
from collections.abc import Callable, Mapping
from typing import ParamSpec, Self, TypeVar

from gyre_protos.text import printable


class GyreError(Exception):
    """The base class of every error of the client.

        try:
            batch = next(loader)
        except CorruptSample as error:
            print(error.facts["shard"], error.facts["sample"])

    A message can be printed: control characters in quoted text are escaped, except line ends.

    Attributes:
        facts: The values in the error, as the daemon sent them: {"dataset": "wiki", ...}; may be
            empty. All values are strings, as they came.
    """

    def __init__(self, message: str, facts: Mapping[str, str] | None = None) -> None:
        super().__init__(printable(str(message), kept="\n"))
        self.facts = dict(facts or {})

    def told(self, message: str) -> Self:
        """Returns an error of the same class and facts with another message."""
        return type(self)(message, self.facts)


class InvalidRequest(GyreError, ValueError):
    """An argument is out of its range, or this daemon cannot accept the request."""


class ConfigError(GyreError, ValueError):
    """A dataset's configuration is wrong: an unknown format, option or value."""


class UnknownDataset(GyreError):
    """The daemon serves no dataset of that name, or finds nothing at its location."""


class ShardMissing(GyreError):
    """A shard that belongs to the dataset is gone."""


class NotAuthenticated(GyreError):
    """Over TCP: the daemon refuses the token or certificate, or its own certificate is not valid.

    The message says which, and how to fix it.
    """


class NotAllowed(GyreError):
    """The daemon refuses this dataset, or this way of naming it, to this reader."""


class StorageUnavailable(GyreError):
    """The daemon could not reach the dataset's storage, although it tried again."""


class CorruptSample(GyreError):
    """A sample cannot be read in the dataset's format.

    `facts` has shard, sample, offset (in bytes) and reason.
    """


class CursorRejected(GyreError):
    """A state does not fit the dataset, the order or the format; the message says how."""


class Fenced(GyreError):
    """A newer session of the same job and rank reads now; this session is over."""


class LeaseExpired(GyreError):
    """The daemon heard nothing for longer than the lease, and ended the session."""


class Overloaded(GyreError):
    """The daemon has no room for this session; the message says how much it needs and is free.

    `facts` has needed_bytes, free_bytes and limit_bytes where memory is short.
    """


class DaemonUnavailable(GyreError):
    """No daemon answers at the address, or the private daemon cannot be started."""


class UntrustedDaemon(GyreError):
    """The address is served by a user whom this process has no reason to trust.

    The message names the users, and says how to name another one.
    """


class DaemonFault(GyreError):
    """The daemon failed in a way it should not, or breaks the protocol; its log says more."""


class ForkedProcess(GyreError):
    """A Loader was used outside the process that made it."""


class ConcurrentUse(GyreError):
    """A thread used a Loader while another one did; the message names both threads."""


class NotInstalled(GyreError, ImportError):
    """A part of Gyre needs packages that a plain installation does not have.

    The message names the extra to install.
    """

    @classmethod
    def needs(cls, what: str, package: str | None, extra: str) -> "NotInstalled":
        """Returns the error for `what`, which imports `package`, which comes with `extra`."""
        return cls(
            f'{what} needs {package}, which is not installed. Run pip install "gyre-ml[{extra}]".'
        )


BY_REASON: dict[str, type[GyreError]] = {
    error.__name__: error for error in GyreError.__subclasses__()
}


_P = ParamSpec("_P")
_R = TypeVar("_R")


def fold(error: GyreError) -> None:
    """Cut the frames and causes that an error has so far; raise it on with a bare `raise`.

    A bare `raise` adds no frame, so the traceback begins with the caller's.
    """
    if os.environ.get("GYRE_TRACEBACK") != "1":
        error.__traceback__ = error.__cause__ = None
        error.__suppress_context__ = True


def folded(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make the tracebacks of a public function's errors begin with the caller."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except GyreError as error:
            fold(error)
            raise

    return call
