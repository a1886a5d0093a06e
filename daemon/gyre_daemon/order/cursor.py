"""The cursor: where a job stands. Tiny, versioned, equal on every rank, opaque to clients, refused where it does not fit."""

import json
import struct
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

from gyre_daemon.errors import CursorRejected
from gyre_daemon.order.permutation import ALGORITHM_VERSION
from gyre_daemon.order.plan import MAX_START_POSITION, Order

_MAGIC = b"GYRE"
_SEALED = struct.Struct("<4sI")  # magic, and checksum of the rest
NUM_BEFORE = _SEALED.size
_FORMAT_VERSION = 1
_MAX_BYTES = 4096
_MAX_POSITION = 1 << 63


@dataclass(frozen=True, slots=True)
class Cursor:
    """Everything that decides which sample comes next.

    Attributes:
        fingerprint: of the dataset.
        order: mode, tail, seed and G; of the order `block` its blocks and window; where the job joined another one.
        algorithm: version of the permutation.
        position: the first that has not been consumed; a multiple of G.
        num_substitutes: samples replaced so far.
    """

    fingerprint: str
    order: Order
    position: int
    num_substitutes: int = 0
    algorithm: int = ALGORITHM_VERSION

    def encode(self) -> bytes:
        """As bytes: magic, CRC-32 of the rest, format version and fields as JSON."""
        return self.encoder().encode(self.position)

    def encoder(self) -> "CursorEncoder":
        """Encodes this cursor at any position; what does not change is encoded once."""
        told = {**asdict(self), "order": _given(self.order), "position": 0}
        text = json.dumps([_FORMAT_VERSION, told], separators=(",", ":"), sort_keys=True)
        before, after = (part.encode() for part in text.rsplit("0", 1))  # `position` sorts last
        return CursorEncoder(before, zlib.crc32(before), after)


@dataclass(frozen=True, slots=True)
class CursorEncoder:
    """Encodes the cursors of one job, which differ in their position and checksum alone.

    Attributes:
        common: what all have, behind their first `NUM_BEFORE` bytes.
    """

    common: bytes
    _checksum: int  # of `common`
    _after: bytes

    def encode(self, position: int) -> bytes:
        """The cursor at a position; see `Cursor.encode`."""
        (own,) = self.own([position])
        return own[:NUM_BEFORE] + self.common + own[NUM_BEFORE:]

    def own(self, positions: Iterable[int]) -> list[bytes]:
        """The cursors at positions, without what all have in common."""
        rests = [b"%d%b" % (position, self._after) for position in positions]
        return [_SEALED.pack(_MAGIC, zlib.crc32(rest, self._checksum)) + rest for rest in rests]


def decode_cursor(data: bytes) -> Cursor:
    """Read what `encode` wrote.

    Raises:
        CursorRejected: damaged, no cursor, or of a version that this daemon does not know.
    """
    body = data[8:]
    if len(data) > _MAX_BYTES or data[:4] != _MAGIC or zlib.crc32(body).to_bytes(4, "little") != data[4:8]:
        raise CursorRejected("the cursor is damaged or is none of this loader's; pass the bytes as state_dict() gave them")
    try:
        version, told = json.loads(body)
    except (ValueError, TypeError, RecursionError) as error:
        raise CursorRejected("the cursor cannot be read; pass the bytes as state_dict() gave them") from error
    if version != _FORMAT_VERSION:
        raise CursorRejected(
            f"the cursor has format version {version}, but this daemon reads version {_FORMAT_VERSION}; upgrade the daemon"
        )
    try:
        cursor = Cursor(**{**told, "order": Order(**told["order"])})
    except (TypeError, KeyError) as error:
        raise CursorRejected("the cursor lacks what its version promises; pass the bytes as state_dict() gave them") from error
    if not _is_possible(cursor):
        raise CursorRejected(
            "the cursor's position is no beginning of a global batch; pass the bytes as state_dict() gave them"
        )
    return cursor


def check_cursor(cursor: Cursor, dataset_name: str, fingerprint: str, order: Order) -> None:
    """Let a cursor pass only where every batch from it on is the one its job would have had.

    Raises:
        CursorRejected: one sentence that says what differs.
    """
    pairs = [
        ("the order algorithm's version", cursor.algorithm, ALGORITHM_VERSION),
        ("the order mode", cursor.order.mode, order.mode),
        ("the tail", cursor.order.tail, order.tail),
        ("the seed", cursor.order.seed, order.seed),
        ("the global batch size", cursor.order.global_batch_size, order.global_batch_size),
        ("the block size (io_block) in bytes", cursor.order.io_block_bytes, order.io_block_bytes),
        ("the window in blocks", cursor.order.window_blocks, order.window_blocks),
        ("the position of another job at which it joined", cursor.order.start_position, order.start_position),
    ]
    if cursor.fingerprint != fingerprint:
        raise CursorRejected(
            f"the cursor belongs to other data: its dataset's fingerprint is {cursor.fingerprint}, that of `{dataset_name}` is "
            f"{fingerprint}; restore the dataset or start anew",
            {"differs": "fingerprint"},
        )
    for what, theirs, ours in pairs:
        if theirs != ours:
            raise CursorRejected(f"the cursor does not fit: {what} is {theirs} there and {ours} here", {"differs": what})


def joined_at(data: bytes) -> int:
    """The start position of the job that a cursor is of: who resumes stays where it joined.

    Raises:
        CursorRejected: see `decode_cursor`.
    """
    return decode_cursor(data).order.start_position


def _given(order: Order) -> dict[str, object]:
    """What is said of an order: a field that its mode has no use for is left out, as in cursors from before there was one."""
    defaults = {field.name: field.default for field in fields(Order)}
    return {name: value for name, value in asdict(order).items() if value != defaults[name]}


def _is_possible(cursor: Cursor) -> bool:
    """Whether a job can have come there; a checksum proves no more than that the bytes travelled well."""
    order, position, num_substitutes = cursor.order, cursor.position, cursor.num_substitutes
    size, start = order.global_batch_size, order.start_position
    of_order = (order.seed, size, order.io_block_bytes, order.window_blocks, start)
    if not all(type(number) is int for number in (cursor.algorithm, position, num_substitutes, *of_order)):
        return False
    if not 0 <= start <= MAX_START_POSITION:
        return False
    return size > 0 and 0 <= num_substitutes <= position < _MAX_POSITION and position % size == 0
