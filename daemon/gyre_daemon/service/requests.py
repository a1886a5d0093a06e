"""From a client's requests, which are checked here, to the daemon's own values."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gyre_protos.v1 import loader_pb2 as pb

from gyre_daemon.config import DatasetConfig, PackConfig, parse_dataset, parse_pack
from gyre_daemon.datasets.cost import CostQuery
from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.datasets.formats.chunk_index import chunks_of
from gyre_daemon.errors import InvalidRequest
from gyre_daemon.order.balance import DEFAULT_WINDOW_BATCHES, BucketRule, CostRule
from gyre_daemon.order.cursor import decode_cursor
from gyre_daemon.order.permutation import (
    default_io_block_bytes,
    default_window_blocks,
    window_of_chunks,
)
from gyre_daemon.order.planner import Order, OrderMode, Tail
from gyre_daemon.order.steps import MAX_SKIPPED, SkippedSteps, Stage, are_skipped, is_growth
from gyre_daemon.sessions.session_request import MAX_EPOCHS, Reader
from gyre_daemon.storage.cache.node import shared_block_bytes
from gyre_daemon.storage.reads import JoinedFiles

_TAILS: dict[int, Tail] = {
    pb.TAIL_UNSPECIFIED: "wrap",
    pb.TAIL_WRAP: "wrap",
    pb.TAIL_DROP: "drop",
    pb.TAIL_PAD: "pad",
}
_MODES: dict[int, OrderMode] = {
    pb.ORDER_MODE_UNSPECIFIED: "full",
    pb.ORDER_MODE_FULL: "full",
    pb.ORDER_MODE_BLOCK: "block",
    pb.ORDER_MODE_SEQUENTIAL: "sequential",
}
# A block is one range request and a window of blocks is in memory at once: larger limits let one
# client take the daemon's memory. The length of a job's name bounds the size of status and metrics.
_MIN_IO_BLOCK_BYTES, _MAX_IO_BLOCK_BYTES = 512, 1 << 30
_MAX_WINDOW_BLOCKS = 1 << 16
_MAX_JOB_CHARS = 200
# No Unix time in milliseconds is beyond it, and a client could not tell it from a damaged one.
_MAX_GENERATION = 1 << 53
# The options of an ad hoc dataset: a dozen scalars, a list of fields, and a table of storage
# settings. These limits bound the cost of one request for the event loop to 1 ms.
_MAX_OPTION_KEY_CHARS, _MAX_OPTION_VALUES, _MAX_OPTION_DEPTH = 100, 1000, 4

_Transforming = (
    pb.DescribeDatasetRequest
    | pb.IndexDatasetRequest
    | pb.PlanStepRequest
    | pb.LocateStepRequest
    | pb.OpenSessionRequest
    | pb.ReadSamplesRequest
)


def to_order(message: pb.OrderSpec) -> Order:
    """The order that a client asks for.

    Where the request leaves block and window open they follow from G alone, so that all daemons
    choose the same.

    Raises:
        InvalidRequest: an unknown mode or tail, a number out of range, or as `BucketRule.check`.
    """
    if message.mode not in _MODES:
        raise InvalidRequest(
            f"this daemon does not know order mode {message.mode}; "
            "it knows full, block and sequential"
        )
    if message.tail not in _TAILS:
        raise InvalidRequest(
            f"this daemon does not know tail {message.tail}; it knows wrap, drop and pad"
        )
    mode, blocks = _MODES[message.mode], (0, 0)
    if mode == "block":
        window_blocks = message.window_blocks or default_window_blocks(message.global_batch_size)
        blocks = message.io_block_bytes or default_io_block_bytes(window_blocks), window_blocks
        check_blocks(*blocks)
    elif message.io_block_bytes or message.window_blocks:
        raise InvalidRequest(
            f"the order `{mode}` has neither blocks nor a window of them; ask for the order `block`"
        )
    order = Order(mode, _TAILS[message.tail], message.seed, message.global_batch_size, *blocks)
    if not message.HasField("bucket"):
        return order
    bucket = message.bucket
    rule = BucketRule(bucket.field, bucket.window_batches or DEFAULT_WINDOW_BATCHES)
    rule.check(order.mode, order.tail, order.global_batch_size)
    return replace(order, bucket=rule)


def to_balance(message: pb.OrderSpec, world_size: int) -> CostRule | None:
    """The cost rule of samples, checked, if each global batch is to be shared out by it."""
    if not message.HasField("balance"):
        return None
    balance = message.balance
    rule = CostRule(balance.linear, balance.quadratic, balance.field)
    rule.check(message.global_batch_size, world_size)
    return rule


def fitted(order: Order, message: pb.OrderSpec, dataset: Dataset, cursor: bytes = b"") -> Order:
    """The order of `to_order` on a dataset.

    Where blocks are chunks, their size decides the default window: all daemons choose the same,
    because equal datasets have equal chunks. A job whose dataset grows, and which resumes at a
    cursor, keeps the window that it began with.

    Raises:
        CursorRejected: the cursor is none.
    """
    chunks = chunks_of(dataset.index)
    if order.mode != "block" or message.window_blocks or chunks is None:
        return order
    if cursor and dataset.grows:
        window_blocks = decode_cursor(cursor).order.window_blocks
        return replace(order, window_blocks=min(max(1, window_blocks), _MAX_WINDOW_BLOCKS))
    mean_bytes = float(chunks.chunk_bytes.mean())
    return replace(order, window_blocks=window_of_chunks(order.window_blocks, mean_bytes))


def check_blocks(io_block_bytes: int, window_blocks: int) -> None:
    """Raise InvalidRequest for blocks or windows that would take the daemon's memory."""
    if not _MIN_IO_BLOCK_BYTES <= io_block_bytes <= _MAX_IO_BLOCK_BYTES:
        raise InvalidRequest(
            f"io_block is {io_block_bytes} bytes; "
            f"it must be {_MIN_IO_BLOCK_BYTES} to {_MAX_IO_BLOCK_BYTES}, as a block is one request"
        )
    if window_blocks > _MAX_WINDOW_BLOCKS:
        raise InvalidRequest(
            f"a window of {window_blocks} blocks is too wide; "
            f"at most {_MAX_WINDOW_BLOCKS} can be mixed"
        )


def to_reader(message: pb.Reader) -> Reader:
    """The job and rank that read.

    Raises:
        InvalidRequest: the job has no name, or its name or fence is too long or cannot be printed;
            or the generation is absurd.
    """
    if not 1 <= len(message.job) <= _MAX_JOB_CHARS:
        raise InvalidRequest(
            f"a job's name must have 1 to {_MAX_JOB_CHARS} characters, but has {len(message.job)}"
        )
    if message.generation > _MAX_GENERATION:
        raise InvalidRequest(
            f"generation {message.generation} is too large; it must be at most {_MAX_GENERATION}, "
            "such as a count or a Unix time in milliseconds"
        )
    if not message.job.isprintable():
        raise InvalidRequest(
            f"the job's name {message.job!r} has characters that cannot be printed; "
            "choose one without control characters"
        )
    if len(message.fence) > _MAX_JOB_CHARS or not message.fence.isprintable():
        raise InvalidRequest(
            f"a job's fence must be text of at most {_MAX_JOB_CHARS} characters that can be printed"
        )
    peer = message.peer if message.HasField("peer") else None
    world_size = message.world_size or 1
    who = message.job, message.rank, world_size, message.generation
    num_local = min(message.num_local, world_size)
    return Reader(*who, peer, num_local, fence=message.fence or message.job)


def to_ad_hoc(message: pb.AdHocDataset) -> DatasetConfig:
    """A dataset that the client defines.

    Raises:
        InvalidRequest: the options are too many, too deep, or have no value.
        ConfigError: as `parse_dataset`.
    """
    # A private daemon runs as its client, who could open whatever a link leads to.
    options = {"follow_links": True} | _OptionReader().table(message.options, depth=1)
    return parse_dataset("ad hoc", {**options, "uri": message.uri, "format": message.format})


def to_pack(message: pb.OptionTable) -> PackConfig:
    """How a client wants documents to be packed.

    Raises:
        InvalidRequest: as `to_ad_hoc`.
        ConfigError: as `parse_pack`.
    """
    return parse_pack(_OptionReader().table(message.values, depth=1), "pack")


def to_shards(request: pb.IndexDatasetRequest | pb.LintDatasetRequest) -> range | None:
    """The shards that a call is about; None for all of a dataset."""
    if not request.HasField("shards"):
        return None
    return range(request.shards.first, request.shards.stop)


def declared(request: _Transforming) -> pb.TransformList | None:
    """The transforms that a client declares; None for those of the dataset's definition."""
    return request.transforms if request.HasField("transforms") else None


def to_transforms(message: pb.TransformList) -> list[dict[str, Any]]:
    """The transforms that a client declares, as tables.

    Raises:
        InvalidRequest: their options are too many, too deep, or have no value.
    """
    reader = _OptionReader()
    return [reader.table(table.values, depth=1) for table in message.transforms]


def to_skipped(request: pb.OpenSessionRequest) -> SkippedSteps | None:
    """The steps that a job is to leave out; None for those of its cursor.

    Raises:
        InvalidRequest: they are no rising ranges, or too many; or a step has no samples.
    """
    if not request.HasField("skip_steps"):
        return None
    if not request.order.global_batch_size:
        raise InvalidRequest("the global batch size must be 1 to 2**32, but is 0")
    skipped = tuple((each.first, each.stop) for each in request.skip_steps.ranges)
    if not are_skipped(skipped):
        raise InvalidRequest(
            f"skip_steps must be at most {MAX_SKIPPED} ranges of steps that rise and do not touch"
        )
    return skipped


def to_stages(messages: Sequence[pb.Stage]) -> tuple[Stage, ...]:
    """The stages of a job; raises InvalidRequest for those that no job has."""
    stages = tuple(Stage(each.first_epoch, each.num_samples) for each in messages)
    if stages and not is_growth(stages):
        raise InvalidRequest(
            "the stages of a job are at most 100, the first begins with epoch 0, and epochs and "
            "samples rise from one to the next"
        )
    return stages


class _OptionReader:
    """Converts the options of one definition or list, and counts their values."""

    def __init__(self) -> None:
        self._num_values = 0

    def table(self, values: Mapping[str, pb.OptionValue], depth: int) -> dict[str, Any]:
        table = {}
        # A map comes in any order; what is kept under a chain's digest must not depend on it.
        for key, value in sorted(values.items()):
            if len(key) > _MAX_OPTION_KEY_CHARS:
                raise InvalidRequest(
                    f"an option has a key of {len(key)} characters; at most "
                    f"{_MAX_OPTION_KEY_CHARS} are allowed"
                )
            table[key] = self._value(value, depth)
        return table

    def _value(self, value: pb.OptionValue, depth: int) -> Any:
        self._num_values += 1
        if self._num_values > _MAX_OPTION_VALUES:
            raise InvalidRequest(f"the options have more than {_MAX_OPTION_VALUES} values")
        kind = value.WhichOneof("kind")
        if kind is None:
            raise InvalidRequest("an option has no value that this daemon knows")
        if kind not in ("list", "table"):
            return getattr(value, kind)
        if depth == _MAX_OPTION_DEPTH:
            raise InvalidRequest(f"the options are nested more than {_MAX_OPTION_DEPTH} deep")
        if kind == "list":
            return [self._value(each, depth + 1) for each in value.list.values]
        return self.table(value.table.values, depth + 1)


def to_cost_question(message: pb.PlanCostRequest, dataset: Dataset) -> CostQuery:
    """The question of an estimate; raises InvalidRequest as `to_order` does."""
    if message.num_epochs > MAX_EPOCHS:
        raise InvalidRequest(
            f"num_epochs is {message.num_epochs}; at most {MAX_EPOCHS} can be planned"
        )
    spec = pb.OrderSpec()
    spec.CopyFrom(message.order)
    spec.mode = pb.ORDER_MODE_BLOCK
    storage = dataset.storage
    first = storage.shards[0]
    files = first.table if isinstance(first, JoinedFiles) else None
    is_mounted = files.stamps is not None if files else storage.local_file(0) is not None
    return CostQuery(
        fitted(to_order(spec), spec, dataset),
        message.num_epochs or 1,
        message.cache_bytes,
        shared_block_bytes(dataset.storage.shards),
        is_local=is_mounted and storage.is_node_local,
        is_by_file=files is not None,
        opens_files=files is not None and is_mounted,
    )
