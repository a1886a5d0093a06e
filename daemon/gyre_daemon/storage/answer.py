"""What came of a request, and what it means. Pure."""

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from gyre_daemon.errors import GyreError, NotAllowed, ShardMissing, StorageUnavailable
from gyre_daemon.storage.location import redact
from gyre_daemon.storage.shard import Shard, changed, truncated

_STATUS = re.compile(r"status code: (\d{3})")
_STALE = ("ExpiredToken", "TokenRefreshRequired")  # Amazon says so with a 400
_MAX_SHORT_TRIES = 3
_MAX_DETAIL = 300


@dataclass(slots=True)
class Answer:
    """What came of one request.

    Attributes:
        status: HTTP's; 206 for the bytes that were asked for, whatever the protocol; 0 where the connection or the driver
            failed.
        data: the body, or what there is of it.
        etag: of the object as it is now; empty where the storage did not say.
        object_bytes: its size; -1 where the storage did not say.
        detail: what a failure said.
        unreachable: nobody was there to ask.
    """

    status: int
    data: bytes = b""
    etag: str = ""
    object_bytes: int = -1
    detail: str = ""
    unreachable: bool = False


class Range(NamedTuple):
    """What is asked for: the bytes `[start, stop)` of a shard."""

    shard: Shard
    start: int
    stop: int


class Meaning(Enum):
    """What to do about an answer."""

    GOOD = auto()
    AGAIN = auto()  # it may go better the next time
    REFUSED = auto()  # too much was asked at once, or nobody is there: ask for less, and then again
    REFRESH = auto()  # credentials may have expired, or the object is read elsewhere: the source must be set up anew
    FINAL = auto()  # it cannot get better


def meaning(wanted: Range, answer: Answer, num_tries: int) -> Meaning:
    """Judge an answer.

    Args:
        wanted: what was asked for.
        answer: what came.
        num_tries: requests for it so far, this one included.
    """
    status = answer.status
    if status in (200, 206):
        if is_changed(wanted, answer) or is_whole_by_mistake(wanted, answer):
            return Meaning.FINAL
        if len(answer.data) == wanted.stop - wanted.start:
            return Meaning.GOOD
        says_size = answer.object_bytes >= 0  # that of the object as it was listed: what is missing was lost on the way
        return Meaning.AGAIN if says_size or num_tries < _MAX_SHORT_TRIES else Meaning.FINAL
    if status in (401, 403) or 300 <= status < 400 or (status == 400 and any(word in answer.detail for word in _STALE)):
        return Meaning.REFRESH
    if status in (429, 503) or answer.unreachable:
        return Meaning.REFUSED
    return Meaning.AGAIN if status in (0, 408) or status >= 500 else Meaning.FINAL


def final_error(wanted: Range, answer: Answer) -> GyreError:
    """The error for an answer that is final."""
    name, status = wanted.shard.name, answer.status
    facts = {"shard": name}
    if status in (404, 410):
        return ShardMissing(f"{name} does not exist; restore it or correct the dataset's URI", facts)
    if status in (401, 403):
        return NotAllowed(f"the storage refused access to {name}; check the daemon's credentials", facts)
    if status in (412, 416) or (status in (200, 206) and is_changed(wanted, answer)):
        return changed(name)
    if is_whole_by_mistake(wanted, answer):
        return StorageUnavailable(f"the storage failed for {name}: it sends whole objects where a range is asked for", facts)
    if status in (200, 206):
        return truncated(name, wanted.start, wanted.stop, len(answer.data))
    return StorageUnavailable(f"the storage failed for {name}: {told(answer)}", facts)


def too_late(endpoint: str, wanted: Range, deadline_s: float, num_tries: int, last: Answer | None) -> StorageUnavailable:
    """The error where no good answer came in time.

    Args:
        endpoint: that was asked.
        wanted: what was asked for.
        deadline_s: the time that there was.
        num_tries: requests sent for it.
        last: the answer to one that failed, if any did.
    """
    name = wanted.shard.name
    return StorageUnavailable(
        f"the storage at {endpoint} did not answer for {name} within {deadline_s:g} s: "
        f"requests sent for it: {num_tries}; the last one that failed said: {told(last) if last else 'nothing'}",
        {"shard": name, "endpoint": endpoint, "num_tries": num_tries},
    )


def not_let_in(endpoint: str, deadline_s: float, last: Answer | None) -> StorageUnavailable:
    """The error of a read that was not even begun in time, since what was sent before it was not answered.

    Args:
        endpoint: that was asked.
        deadline_s: the time that there was.
        last: the answer to a request that failed, if any did.
    """
    return StorageUnavailable(
        f"the storage at {endpoint} answered nothing for {deadline_s:g} s: "
        f"the last request that failed said: {told(last) if last else 'nothing'}",
        {"endpoint": endpoint},
    )


def told(answer: Answer) -> str:
    """What an answer that was not good said, in one line without secrets."""
    if answer.status in (200, 206):
        return f"{len(answer.data)} bytes came, which are not as many as were asked for"
    detail = redact(answer.detail).partition("\n")[0][:_MAX_DETAIL]
    return detail if not answer.status or "status" in detail else f"HTTP status {answer.status} {detail}".rstrip()


def is_changed(wanted: Range, answer: Answer) -> bool:
    """The object is not what was listed, by its etag or its size."""
    listed, size = wanted.shard.version, answer.object_bytes
    if size not in (-1, wanted.shard.size_bytes):
        return True
    return listed.endswith('"') and answer.etag not in ("", listed) and _bare(answer.etag) != _bare(listed)


def is_whole_by_mistake(wanted: Range, answer: Answer) -> bool:
    """All of the object came instead of a part."""
    return answer.status == 200 and (wanted.start, wanted.stop) != (0, wanted.shard.size_bytes)


def failure(error: BaseException) -> Answer:
    """What a driver's exception says: builtin meanings and HTTP statuses are kept, all else is a failure of the connection."""
    if isinstance(error, FileNotFoundError):
        status = 404
    elif isinstance(error, PermissionError):
        status = 403
    else:
        found = _STATUS.search(str(error))
        status = getattr(error, "status", int(found[1]) if found else 0)
    detail = f"{type(error).__name__}: {error}"
    return Answer(status if isinstance(status, int) else 0, detail=detail)


def _bare(etag: str) -> str:
    """An etag without what servers put round it at will."""
    return etag.removeprefix("W/").strip('"')
