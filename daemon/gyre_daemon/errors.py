"""The errors that the daemon raises on purpose.

GyreError
├── InvalidInput (ValueError)
│   ├── ConfigError          the operator's file, flag or environment
│   └── InvalidRequest       a client's request
├── UnknownDataset           no dataset of that name
├── ShardMissing             a shard that the dataset names is not there
├── NotAuthenticated         a call over TCP proves with no valid credential who makes it
├── NotAllowed               the dataset or the location is not for this client
├── StorageUnavailable       the storage does not answer, or not in time
├── CorruptSample            bytes that contradict the index or the format
├── CursorRejected           a cursor of another dataset, order or version
├── Fenced                   a newer session of the same job and rank has taken over
├── LeaseExpired             the client was silent for too long
├── Overloaded               a budget is reached; says needed and limit
└── Draining                 the daemon is about to stop

A message names the object, its problem, and the fix. `facts` say the same to programs.
"""

from collections.abc import Mapping


class GyreError(Exception):
    """Base of the tree.

    Attributes:
        facts: details of the error, as text by name; the client gets them with the message.
    """

    def __init__(self, message: str, facts: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.facts = {key: str(value) for key, value in (facts or {}).items()}


class InvalidInput(GyreError, ValueError):
    """A value from the operator or a client does not make sense."""


class ConfigError(InvalidInput):
    """The configuration cannot be used."""


class InvalidRequest(InvalidInput):
    """The request cannot be served as it stands."""


class UnknownDataset(GyreError):
    """No dataset of that name is configured."""


class ShardMissing(GyreError):
    """A shard of the dataset is not where its location says."""


class NotAuthenticated(GyreError):
    """The caller has no valid token or certificate."""


class NotAllowed(GyreError):
    """This client may not read the dataset or the location."""


class StorageUnavailable(GyreError):
    """The storage failed to answer after all retries."""


class CorruptSample(GyreError):
    """The bytes of a sample or of a shard contradict their format or their index."""


class CursorRejected(GyreError):
    """The cursor does not fit the opened dataset, order or job."""


class Fenced(GyreError):
    """A newer session of the same job and rank has taken over."""


class LeaseExpired(GyreError):
    """The session ended because its client was silent for too long."""


class Overloaded(GyreError):
    """A budget has no room for the request now."""


class Draining(GyreError):
    """The daemon is stopping: it finishes its batches and accepts no new session."""


def first_error(group: BaseExceptionGroup[Exception]) -> Exception:
    """The first exception of a task group; the others follow from it."""
    first = group.exceptions[0]
    return first_error(first) if isinstance(first, BaseExceptionGroup) else first
