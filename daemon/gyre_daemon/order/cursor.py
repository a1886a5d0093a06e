"""The cursor: where a job stands in its stream.

It is tiny, versioned, equal on every rank and opaque to clients. One that does not fit is refused.

Of a dataset that may grow, it also has the stages of the job and the shards that the last of them
needs, of a mixture the sources and the phases, the steps that its job leaves out, and the buckets
of its batches, each in its own format version. All other cursors are as they were before these
existed.
"""

import json
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, fields, replace
from typing import get_args

from gyre_protos.text import counted

from gyre_daemon.errors import CursorRejected, InvalidRequest
from gyre_daemon.order.balance import BucketRule
from gyre_daemon.order.mixture import MixtureState, decoded
from gyre_daemon.order.permutation import ALGORITHM_VERSION
from gyre_daemon.order.planner import MAX_POSITION, Order, OrderMode, Tail
from gyre_daemon.order.steps import (
    SkippedSteps,
    Stage,
    are_skipped,
    before,
    contains,
    in_words,
    is_growth,
)

_MAGIC = b"GYRE"
_HEAD = struct.Struct("<4sI")  # the magic number, and the CRC-32 of the rest
NUM_BEFORE = _HEAD.size
_FORMAT_VERSION, _GROWING_VERSION, _MIXED_VERSION, _SKIPPING_VERSION = 1, 2, 3, 4
_BUCKETED_VERSION = 5
MAX_CURSOR_BYTES = 4096  # a cursor has about 250; more is not even parsed
_MAX_POSITION = 1 << 63
_MAX_UINT64 = (1 << 64) - 1
_DIGITS_TO_COME = 100  # of positions and counts, which grow


@dataclass(frozen=True, slots=True)
class Cursor:
    """Everything that decides which sample comes next.

    Attributes:
        fingerprint: of the dataset; of one that may grow, of its first `num_shards`.
        order: how the job goes through the dataset.
        position: the first one not consumed; a multiple of G.
        num_substitutes: samples replaced so far.
        transforms: identifies the transforms of the samples; empty for none.
        algorithm: the version of the permutation.
        stages: of the job; empty where the dataset does not grow.
        num_shards: that the job reads in its last stage; 0 where the dataset does not grow.
        mixture: that the job reads; None for a plain dataset.
    """

    fingerprint: str
    order: Order
    position: int
    num_substitutes: int = 0
    transforms: str = ""
    algorithm: int = ALGORITHM_VERSION
    stages: tuple[Stage, ...] = ()
    num_shards: int = 0
    mixture: MixtureState | None = None

    def encode(self) -> bytes:
        """Magic number, CRC-32 of the rest, and format version and all fields as JSON."""
        return self.encoder().encode(self.position, self.num_substitutes)

    def encoder(self) -> "CursorEncoder":
        """Encodes this cursor at any position; everything else is encoded once."""
        values = {
            "fingerprint": self.fingerprint,
            "order": _without_defaults(self.order),
            "algorithm": self.algorithm,
        }
        if self.transforms:  # cursors of data served as stored keep their bytes
            values["transforms"] = self.transforms
        if self.stages:
            stages = [(stage.first_epoch, stage.num_samples) for stage in self.stages]
            values |= {"num_shards": self.num_shards, "stages": stages}
        if self.mixture:
            values["mixture"] = self.mixture.encoded()
        text = json.dumps([self._version, values], separators=(",", ":"), sort_keys=True)
        common = text.removesuffix("}]").encode()
        return CursorEncoder(common, zlib.crc32(common))

    @property
    def _version(self) -> int:
        """The lowest format version that can hold it."""
        if self.order.bucket:
            return _BUCKETED_VERSION
        if self.order.skipped:
            return _SKIPPING_VERSION
        if self.mixture:
            return _MIXED_VERSION
        return _GROWING_VERSION if self.stages else _FORMAT_VERSION

    @property
    def fits(self) -> bool:
        """Whether clients keep it, at this position and all later ones."""
        return len(self.encode()) <= MAX_CURSOR_BYTES - _DIGITS_TO_COME


@dataclass(frozen=True, slots=True)
class CursorEncoder:
    """Encodes the cursors of one job, which differ only in facts that follow from the position.

    Attributes:
        common: the bytes behind the first `NUM_BEFORE` that all of them have.
    """

    common: bytes
    _checksum: int  # of `common`

    def encode(self, position: int, num_substitutes: int = 0) -> bytes:
        """The cursor at a position, with the number of samples replaced before it."""
        (own,) = self.own([(position, num_substitutes)])
        return own[:NUM_BEFORE] + self.common + own[NUM_BEFORE:]

    def own(self, positions: Iterable[tuple[int, int]]) -> list[bytes]:
        """The cursors at positions, without the common bytes.

        Args:
            positions: each with the number of substitutes before it.
        """
        rests = [b',"position":%d,"num_substitutes":%d}]' % each for each in positions]
        return [_HEAD.pack(_MAGIC, zlib.crc32(rest, self._checksum)) + rest for rest in rests]


def decode_cursor(data: bytes) -> Cursor:
    """Read a cursor that `encode` wrote.

    Raises:
        CursorRejected: the bytes are damaged, are no cursor, or have a version that this daemon
            does not know.
    """
    body = data[NUM_BEFORE:]
    if len(data) > MAX_CURSOR_BYTES or data[:NUM_BEFORE] != _HEAD.pack(_MAGIC, zlib.crc32(body)):
        raise _rejected("the cursor is damaged or is none of this loader's")
    try:
        version, values = json.loads(body)
    except (ValueError, TypeError, RecursionError) as error:
        raise _rejected("the cursor cannot be read") from error
    if version not in range(_FORMAT_VERSION, _BUCKETED_VERSION + 1):
        raise CursorRejected(
            f"the cursor has format version {version}, but this daemon reads versions "
            f"{_FORMAT_VERSION} to {_BUCKETED_VERSION}; upgrade the daemon"
        )
    try:
        stages = tuple(Stage(*each) for each in values.get("stages", ()))
        mixture = decoded(values["mixture"]) if values.get("mixture") else None
        order = values["order"]
        if order.get("start_position"):
            raise CursorRejected(
                'the cursor is of a job that joined another one (join="rotate"), which this daemon '
                "does no more; begin a new run",
                {"differs": "the position of another job at which it joined"},
            )
        skipped = tuple((first, stop) for first, stop in order.get("skipped", ()))
        bucket = BucketRule(**order["bucket"]) if order.get("bucket") else None
        order = Order(**{**order, "skipped": skipped, "bucket": bucket})
        own = {"order": order, "stages": stages, "mixture": mixture}
        cursor = Cursor(**{**values, **own})
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise _rejected("the cursor lacks fields of its version") from error
    if cursor._version != version or not _are_possible(cursor) or not _is_order(order):
        raise _rejected("the cursor lacks fields of its version")
    if not _is_possible(cursor):
        raise _rejected("the cursor's position is no beginning of a global batch")
    return cursor


def _rejected(reason: str) -> CursorRejected:
    return CursorRejected(f"{reason}; pass the bytes as state_dict() gave them")


def check_cursor(
    cursor: Cursor,
    dataset_name: str,
    fingerprint: str,
    order: Order,
    what_changed: Callable[[str], str] = lambda _: "",
) -> None:
    """Check that the job would have had the same batches from the cursor on.

    Args:
        cursor: of a client.
        dataset_name: for the error.
        fingerprint: of the dataset.
        order: that was asked for.
        what_changed: takes another fingerprint, and says how the dataset with it differs.

    Raises:
        CursorRejected: it would not; says how they differ.
    """
    pairs = [
        ("the order algorithm's version", cursor.algorithm, ALGORITHM_VERSION),
        ("the order mode", cursor.order.mode, order.mode),
        ("the tail", cursor.order.tail, order.tail),
        ("the seed", cursor.order.seed, order.seed),
        ("the global batch size", cursor.order.global_batch_size, order.global_batch_size),
        ("the block size (io_block) in bytes", cursor.order.io_block_bytes, order.io_block_bytes),
        ("the window in blocks", cursor.order.window_blocks, order.window_blocks),
        ("the buckets", _in_words(cursor.order.bucket), _in_words(order.bucket)),
    ]
    if cursor.fingerprint != fingerprint:
        changed = what_changed(str(cursor.fingerprint))
        changed = f"{changed}; " if changed else ""
        raise CursorRejected(
            f"the cursor belongs to other data: its dataset's fingerprint is {cursor.fingerprint}, "
            f"that of `{dataset_name}` is {fingerprint}; {changed}restore "
            "the dataset, or start from the beginning",
            {"differs": "fingerprint"},
        )
    for what, theirs, ours in pairs:
        if theirs != ours:
            raise CursorRejected(
                f"the cursor does not fit: {what} is {theirs} there and {ours} here",
                {"differs": what},
            )


def skipping(cursor: Cursor, wanted: SkippedSteps | None) -> Cursor:
    """A cursor whose job leaves steps out.

    Steps that the cursor leaves out stay so. More can be left out from the cursor on, because a
    step before it was read.

    Args:
        cursor: where the job goes on.
        wanted: all steps to leave out, for which `are_skipped` holds; None for those of the
            cursor.

    Raises:
        CursorRejected: the cursor leaves out other steps than these, or has read some of them.
        InvalidRequest: they end beyond any training, or a cursor has no room for them.
    """
    theirs, size = cursor.order.skipped, cursor.order.global_batch_size
    if wanted is None or wanted == theirs:
        return cursor
    step = cursor.position // size
    both = (
        f"it leaves out the steps {in_words(theirs)}, and skip_steps says {in_words(wanted)}"
        if theirs
        else f"it leaves no step out, and skip_steps says {in_words(wanted)}"
    )
    if not contains(wanted, theirs):
        raise CursorRejected(
            f"the cursor does not fit: {both}; a state keeps its skipped steps, so name these "
            "steps too, or leave skip_steps out",
            {"differs": "the skipped steps"},
        )
    if before(wanted, step) != before(theirs, step):
        raise CursorRejected(
            f"the cursor does not fit: {both}, but it stands at step {step} and has read those "
            "before it. Resume from an earlier state, or leave out steps from there on.",
            {"differs": "the skipped steps"},
        )
    if wanted[-1][1] * size > MAX_POSITION:
        raise InvalidRequest(
            f"skip_steps is {in_words(wanted)}, which is beyond any training; positions end at "
            "2**62"
        )
    more = replace(cursor, order=replace(cursor.order, skipped=wanted))
    if not more.fits:
        raise InvalidRequest(
            f"a state has no room for {len(wanted)} ranges of skipped steps; leave out fewer, "
            "longer ones"
        )
    return more


def with_weights(cursor: Cursor, weights: Mapping[str, float], dataset_name: str) -> Cursor:
    """A cursor whose job reads the sources of its mixture with other weights from there on.

    Args:
        cursor: where the job begins or goes on.
        weights: of sources by name; empty for those of the cursor.
        dataset_name: for the error.

    Raises:
        InvalidRequest: it reads no mixture, or `MixtureState.with_weights` refuses them.
    """
    if not weights:
        return cursor
    if not cursor.mixture:
        raise InvalidRequest(
            f"weights: `{dataset_name}` is no mixture, and has no sources to weigh. Leave them out."
        )
    step = cursor.position // cursor.order.global_batch_size
    more = replace(cursor, mixture=cursor.mixture.with_weights(weights, step))
    if not more.fits:
        raise InvalidRequest("weights: a state has no room for more of them. Begin a new run.")
    return more


def check_transforms(cursor: Cursor, transforms: str, what_to_do: str = "") -> None:
    """Check that samples are transformed as they were; the order is the same either way.

    Args:
        cursor: of a client.
        transforms: identifies the current transforms of samples.
        what_to_do: ends the error; empty for the advice to a job that resumes.

    Raises:
        CursorRejected: something else is done to them.
    """
    others = "go on with the others: load_state_dict(state, changed_transforms=True)"
    if cursor.order.bucket:
        others = "begin a new run: its batches follow from the lengths that transforms make"
    if cursor.transforms != transforms:
        raise CursorRejected(
            "the cursor belongs to samples that were transformed otherwise (their transforms are "
            f"{cursor.transforms or 'none'} there and {transforms or 'none'} here); "
            f"{what_to_do or f'restore the transforms, or {others}'}",
            {"differs": "the transforms"},
        )


def _in_words(bucket: BucketRule | None) -> str:
    return f"{counted(bucket.window_batches, 'batch')} by `{bucket.field}`" if bucket else "none"


def _without_defaults(order: Order) -> dict[str, object]:
    """The fields of an order with other values than their defaults.

    So a cursor does not change when `Order` gets a field that its mode has no use for.
    """
    defaults = {field.name: field.default for field in fields(Order)}
    return {name: value for name, value in asdict(order).items() if value != defaults[name]}


def _is_possible(cursor: Cursor) -> bool:
    """Whether a job can have this state; the checksum proves only that the bytes are whole."""
    order, position, num_substitutes = cursor.order, cursor.position, cursor.num_substitutes
    if type(cursor.transforms) is not str:
        return False
    size = order.global_batch_size
    of_order = (order.seed, size, order.io_block_bytes, order.window_blocks)
    if not all(
        type(number) is int for number in (cursor.algorithm, position, num_substitutes, *of_order)
    ):
        return False
    if not are_skipped(order.skipped):
        return False
    if order.bucket and [*map(type, astuple(order.bucket))] != [str, int]:
        return False
    if order.skipped and order.skipped[-1][1] * size > MAX_POSITION:
        return False
    return size > 0 and 0 <= num_substitutes <= position < _MAX_POSITION and position % size == 0


def _is_order(order: Order) -> bool:
    """Whether a client can have asked for an order: its words are known, its numbers unsigned."""
    numbers = order.seed, order.io_block_bytes, order.window_blocks
    return (
        order.mode in get_args(OrderMode)
        and order.tail in get_args(Tail)
        and all(type(number) is int and 0 <= number <= _MAX_UINT64 for number in numbers)
    )


def _are_possible(cursor: Cursor) -> bool:
    """Whether a job can have these stages."""
    stages, num_shards = cursor.stages, cursor.num_shards
    if not stages or cursor.mixture:
        return num_shards == 0 and not stages
    numbers = [number for each in stages for number in (each.first_epoch, each.num_samples)]
    if not all(type(number) is int for number in (num_shards, *numbers)):
        return False
    return num_shards > 0 and is_growth(stages)
