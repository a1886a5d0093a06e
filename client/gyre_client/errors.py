"""Everything that the client raises.

    GyreError
    ├── InvalidRequest (also a ValueError)   an argument or a request that cannot be meant
    ├── ConfigError (also a ValueError)      a configuration that cannot be meant
    ├── UnknownDataset                       no dataset of that name, or nothing where it should be
    ├── ShardMissing                         a shard of the dataset is gone
    ├── NotAllowed                           the dataset is not for this reader
    ├── StorageUnavailable                   the daemon could not reach the storage in time
    ├── CorruptSample                        a sample cannot be read: says shard, sample, offset, reason
    ├── CursorRejected                       a state that does not fit: says what differs
    ├── Fenced                               a newer session of the same job and rank has taken over
    ├── LeaseExpired                         the daemon gave the session up; a Loader re-attaches by itself
    ├── Overloaded                           no room in the daemon: says needed and limit
    ├── DaemonUnavailable                    nobody answers at the address
    ├── DaemonFault                          the daemon failed in a way it should not
    ├── ForkedProcess                        a Loader used outside the process that made it
    ├── ConcurrentUse                        a Loader used by two threads at the same time
    └── NotInstalled (also an ImportError)   a part of Gyre that needs an extra: names it

The daemon names the class of an error by its `reason`; `BY_REASON` is that one table.
"""

from collections.abc import Mapping


class GyreError(Exception):
    """What every error of the client is.

    Attributes:
        facts: What the error is about, as the daemon told it: {"dataset": "wiki", ...}; may be empty.
    """

    def __init__(self, message: str, facts: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.facts = dict(facts or {})


class InvalidRequest(GyreError, ValueError):
    """An argument that no dataset and no daemon could accept, or one that this daemon cannot."""


class ConfigError(GyreError, ValueError):
    """A dataset's configuration is wrong: an unknown format, option or value."""


class UnknownDataset(GyreError):
    """The daemon serves no dataset of that name, or finds nothing at its address."""


class ShardMissing(GyreError):
    """A shard that belongs to the dataset is gone."""


class NotAllowed(GyreError):
    """The daemon refuses this dataset, or this way of naming it, to this reader."""


class StorageUnavailable(GyreError):
    """The daemon could not reach the dataset's storage, although it tried again."""


class CorruptSample(GyreError):
    """A sample cannot be read as what it should be; `facts` has shard, sample, offset and reason."""


class CursorRejected(GyreError):
    """A state does not fit the dataset, the order or the format; the message says what differs."""


class Fenced(GyreError):
    """A newer session of the same job and rank reads now; this one is over."""


class LeaseExpired(GyreError):
    """The daemon heard nothing for longer than the lease and gave the session up."""


class Overloaded(GyreError):
    """The daemon has no room for this session; the message says what it needs and what there is."""


class DaemonUnavailable(GyreError):
    """Nobody answers at the address, or the daemon cannot be started."""


class DaemonFault(GyreError):
    """The daemon failed in a way it should not, or speaks another protocol; its log says more."""


class ForkedProcess(GyreError):
    """A Loader was used outside the process that made it."""


class ConcurrentUse(GyreError):
    """A Loader was used by a thread while another one used it; the message names both."""


class NotInstalled(GyreError, ImportError):
    """A part of Gyre needs packages that a plain installation does not bring; the message names the extra."""

    @classmethod
    def needs(cls, what: str, package: str | None, extra: str) -> "NotInstalled":
        """Returns the error for `what`, which imports `package`, which comes with `extra`."""
        return cls(f'{what} needs {package}, which is not installed: pip install "gyre-ml[{extra}]"')


BY_REASON: dict[str, type[GyreError]] = {error.__name__: error for error in GyreError.__subclasses__()}
