"""Checks a daemon's answers, before they are used.

A daemon may be broken, of another version, or not a daemon at all. Its numbers decide how much this
process maps, allocates and waits for. No layout is read from memory, or allocated, that was not
checked here.
"""

import math
import mmap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod

from google.protobuf.message import Message
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.errors import CursorRejected, DaemonFault

SAMPLE_ID = "sample_id"
MASK = "mask"
OFFSETS_SUFFIX = ".offsets"

# By numpy's names, the dtypes that torch has as well; and bfloat16, which numpy has not.
BFLOAT16 = "bfloat16"
DTYPE_BYTES = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float16": 2,
    BFLOAT16: 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
ALIGNMENT_BYTES = 64
# More than any batch or arena that a machine holds, and far from where sizes overflow.
MAX_BYTES = 1 << 46


def check_fields(fields: Sequence[pb.Field]) -> None:
    """Checks the fields of a dataset.

    Raises:
        DaemonFault: A batch cannot have such fields: unknown dtypes, or equal names.
    """
    names = {SAMPLE_ID, MASK}
    for field in fields:
        own = {field.name, field.name + OFFSETS_SUFFIX} if field.ragged else {field.name}
        if not field.name or own & names:
            raise DaemonFault(f"the daemon names {field.name!r} as a field, but it cannot be one")
        names |= own
        if field.dtype not in DTYPE_BYTES:
            raise DaemonFault(
                f"the daemon says that the field {field.name!r} has the dtype {field.dtype!r}, "
                f"which is none of {', '.join(DTYPE_BYTES)}"
            )
        if prod(field.shape) * DTYPE_BYTES[field.dtype] > MAX_BYTES:
            raise DaemonFault(
                f"the daemon says that the field {field.name!r} has the shape {list(field.shape)}, "
                "which fits into no memory"
            )


class BatchTensors:
    """The tensors that each batch of a session has.

    Attributes:
        ragged: The names of the fields whose samples differ in length.
    """

    def __init__(self, fields: Sequence[pb.Field], num_samples: int, *, has_mask: bool) -> None:
        """Takes fields that were checked.

        Each batch has `num_samples` on this rank. With a mask, an epoch's last batch is filled up.
        """
        # Their dtypes and shapes; None is for the elements of a ragged field.
        self._tensors: dict[str, tuple[str, tuple[int | None, ...]]] = {}
        self._tensors[SAMPLE_ID] = "int64", (num_samples,)
        if has_mask:
            self._tensors[MASK] = "bool", (num_samples,)
        for field in fields:
            num_rows = None if field.ragged else num_samples
            self._tensors[field.name] = field.dtype, (num_rows, *field.shape)
            if field.ragged:
                self._tensors[field.name + OFFSETS_SUFFIX] = "int64", (num_samples + 1,)
        self.ragged = tuple(field.name for field in fields if field.ragged)

    def check(self, layout: pb.Layout) -> None:
        """Checks the layout of a batch: all tensors, one behind the other, inside its payload.

        Raises:
            DaemonFault: It is not the layout of a batch of this session; says how they differ.
        """
        names = [tensor.name for tensor in layout.tensors]
        if len(names) != len(self._tensors) or set(names) != self._tensors.keys():
            raise DaemonFault(
                f"the daemon sent a batch with the tensors {_listed(names)}, "
                f"but this session's batches have {_listed(self._tensors)}"
            )
        end = 0
        for tensor in layout.tensors:
            self._check_shape(tensor)
            if tensor.offset_bytes < end or tensor.offset_bytes % ALIGNMENT_BYTES:
                raise DaemonFault(
                    f"the daemon put the tensor {tensor.name!r} at byte {tensor.offset_bytes} of "
                    f"its batch, where it overlaps another one or is not aligned to "
                    f"{ALIGNMENT_BYTES} bytes"
                )
            end = tensor.offset_bytes + prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
        if not end <= layout.num_bytes < end + ALIGNMENT_BYTES or end > MAX_BYTES:
            raise DaemonFault(
                f"the daemon announced a batch of {layout.num_bytes} bytes, "
                f"but its tensors end at byte {end}"
            )

    def _check_shape(self, tensor: pb.Tensor) -> None:
        dtype, wanted = self._tensors[tensor.name]
        shape = tuple(tensor.shape)
        fits = len(shape) == len(wanted) and all(
            size in (None, num) for num, size in zip(shape, wanted, strict=True)
        )
        if tensor.dtype != dtype or not fits:
            sizes = ", ".join("*" if each is None else str(each) for each in wanted)
            raise DaemonFault(
                f"the daemon sent the tensor {tensor.name!r} as {tensor.dtype} {list(shape)}, "
                f"but it is {dtype} [{sizes}] in this session"
            )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


MAX_CURSOR_BYTES = 4096  # the daemon takes no longer one; it has about 250
# The daemon's own limits: a credit is at most 2^20, and positions end at 2^62.
MAX_QUEUED = 1 << 20
MAX_COUNT = 1 << 62
MAX_LEASE_S = 24 * 3600.0
_MAX_ID_CHARS = 128
# Of an index: a daemon lists a million shards, and each has a path of at most 4 KiB.
_MAX_SHARDS = 1 << 24
_MAX_NAMES_CHARS = 1 << 30
_MAX_COLUMNS = 1000  # that a filter compares; a daemon reads one of at most 1,000 characters
_MAX_BOUNDS = 100  # of a histogram; a daemon sends 21
_MAX_FINDINGS = 100_000  # of the checks of a dataset; a daemon names no more


def check_numbers(message: Message) -> None:
    """Checks that no number of a message is infinite or NaN, however deep.

    Raises:
        DaemonFault: One is; names its field.
    """
    for field, value in message.ListFields():
        if field.type == field.TYPE_DOUBLE:
            for number in [value] if isinstance(value, float) else value:
                if not math.isfinite(number):
                    raise DaemonFault(f"the daemon says that {field.full_name} is {number}")
        elif field.message_type is not None:
            for each in [value] if isinstance(value, Message) else value:
                if isinstance(each, Message):
                    check_numbers(each)


def check_description(description: pb.DatasetDescription) -> None:
    """Checks the description of a dataset.

    Raises:
        DaemonFault: There can be no such dataset.
    """
    for name in ("num_samples", "num_shards", "num_bytes"):
        _check_count(f"the dataset's {name}", getattr(description, name), 0, MAX_COUNT)
    if not description.num_samples or not description.fields or not description.fingerprint:
        raise DaemonFault("the daemon describes a dataset without samples, fields or fingerprint")
    check_fields(description.fields)
    for each in description.lengths:
        bounds = list(each.bounds)
        if not 2 <= len(bounds) <= _MAX_BOUNDS or len(bounds) != len(each.counts) + 1:
            raise DaemonFault(f"the daemon's histogram of {each.field!r} has wrong bounds")
        if bounds != sorted(bounds) or bounds[-1] > MAX_COUNT or max(each.counts) > MAX_COUNT:
            raise DaemonFault(f"the daemon's histogram of {each.field!r} cannot be one")


def check_plan(response: pb.PlanStepResponse, request: pb.PlanStepRequest) -> None:
    """Checks the sample ids of a step.

    Raises:
        DaemonFault: There are not as many as the rank reads, or not as many marks; or transforms
            were left out.
    """
    wanted = request.order.global_batch_size // (request.world_size or 1)
    for name, num in (("sample ids", len(response.sample_ids)), ("marks", len(response.mask))):
        if num != wanted and (num or name == "sample ids"):
            raise DaemonFault(f"the daemon planned {num} {name} for a step of {wanted} samples")
    _check_transforms(request.transforms, response.transforms)


def checked_progress(messages: Iterable[pb.IndexProgress]) -> Iterator[pb.IndexProgress]:
    """Yields the messages about an index, which come to an end.

    Each is about another shard. Behind them, as many and one more may be about each column to read,
    and twice as many about measuring, which may be done twice.

    Raises:
        DaemonFault: There are more than that, or the number of shards changes or can be none; or
            removed shards come before the end.
    """
    num_shards = num_chars = 0
    nums: Counter[tuple[str, str]] = Counter()
    for progress in messages:
        num_shards = num_shards or progress.num_shards
        _check_count("the dataset's num_shards", progress.num_shards, 1, _MAX_SHARDS)
        kind = next((each for each in ("column", "measured") if progress.HasField(each)), "")
        nums[kind, progress.column.name] += 1
        number = nums[kind, progress.column.name]
        most = {"": num_shards, "column": num_shards + 1, "measured": 2 * (num_shards + 1)}[kind]
        num_chars += len(progress.shard) + len(progress.column.name)
        if (
            number > most
            or len(nums) > _MAX_COLUMNS
            or progress.num_shards != num_shards
            or num_chars > _MAX_NAMES_CHARS
            or (progress.removed and number != num_shards)
        ):
            raise DaemonFault(
                f"the daemon sent message {nums.total()} about an index of {num_shards} shards, "
                "which does not fit those before"
            )
        yield progress


def checked_findings(messages: Iterable[pb.LintProgress]) -> Iterator[pb.LintProgress]:
    """Yields the messages about the checks of a dataset; each is about one more pass over a shard.

    Raises:
        DaemonFault: There are more than two for each shard, or the number of shards changes or can
            be none; or more is found than a client can keep.
    """
    num_shards = num_findings = 0
    for number, progress in enumerate(messages, 1):
        num_shards = num_shards or progress.num_shards
        _check_count("the dataset's num_shards", progress.num_shards, 1, _MAX_SHARDS)
        num_findings += len(progress.findings)
        if (
            number > 2 * num_shards + 1
            or progress.num_shards != num_shards
            or max(progress.num_scanned, progress.num_checked) > num_shards
            or num_findings > _MAX_FINDINGS
        ):
            raise DaemonFault(
                f"the daemon sent message {number} about the checks of {num_shards} shards, which "
                "does not fit those before"
            )
        for name in ("num_samples", "num_bytes", "num_left_out", "num_decoded"):
            _check_count(f"the checks' {name}", getattr(progress, name), 0, MAX_COUNT)
        yield progress


def check_located(response: pb.LocateStepResponse, request: pb.LocateStepRequest) -> None:
    """Checks where a daemon says that samples are stored.

    Raises:
        DaemonFault: It names a shard or a source that it does not list, has too few rows, or left
            transforms out.
    """
    _check_transforms(request.transforms, response.transforms)
    samples = [sample for row in response.rows for sample in row.samples]
    num_shards, num_sources = len(response.shards), max(1, len(response.sources))
    if any(each.shard >= num_shards or each.source >= num_sources for each in samples):
        raise DaemonFault("the daemon names a shard or a source that it does not list")
    wanted = 0 if response.skipped else response.order.global_batch_size
    if len(response.rows) != wanted:
        raise DaemonFault(
            f"the daemon found {len(response.rows)} rows of a step of {wanted} samples"
        )


def check_opened(opened: pb.SessionOpened, request: pb.OpenSessionRequest) -> None:
    """Checks a daemon's grants to a session.

    Raises:
        DaemonFault: They differ from the request, or are impossible.
    """
    session_id = opened.session_id
    if not 0 < len(session_id) <= _MAX_ID_CHARS or not session_id.isascii():
        raise DaemonFault(f"the daemon calls a session {session_id[:_MAX_ID_CHARS]!r}")
    if not 0 < opened.lease_s <= MAX_LEASE_S:
        raise DaemonFault(f"the daemon grants a lease of {opened.lease_s} s")
    check_cursor_bytes(len(opened.cursor))
    _check_count("the session's first step", opened.first_step, 0, MAX_COUNT)
    if request.HasField("step") and opened.first_step != request.step:
        raise DaemonFault(
            f"the session begins at step {opened.first_step}, but step {request.step} was asked for"
        )
    _check_count("the dataset's num_samples", opened.num_samples, 1, MAX_COUNT)
    if opened.stages:
        _check_stages(opened, request.order)
    skipped = [(each.first, each.stop) for each in opened.skip_steps.ranges]
    if not all(first < stop <= MAX_COUNT for first, stop in skipped) or not all(
        before[1] < after[0] for before, after in pairwise(skipped)
    ):
        raise DaemonFault(f"the daemon says that a job leaves out the steps {skipped[:10]}")
    if request.HasField("skip_steps") and opened.skip_steps != request.skip_steps:
        raise DaemonFault(
            f"the daemon leaves out the steps {skipped[:10]}, and others were asked for; it may be "
            "of an older version"
        )
    _check_count("max_queued_batches", opened.max_queued_batches, 1, MAX_QUEUED)
    _check_count("max_kept_batches", opened.max_kept_batches, 0, MAX_QUEUED)
    _check_count("arena_bytes", opened.arena_bytes, 0, MAX_BYTES)
    if opened.arena_bytes % mmap.PAGESIZE:
        raise DaemonFault(
            f"the daemon announces an arena of {opened.arena_bytes} bytes, which are not whole "
            "pages"
        )
    check_fields(opened.fields)
    _check_transforms(request.transforms, opened.transforms)


def _check_transforms(asked: pb.TransformList, applied: str) -> None:
    if asked.transforms and not applied:
        raise DaemonFault(
            "the daemon takes samples as they are stored, although transforms were asked for; it "
            "may be of an older version"
        )


def _check_stages(opened: pb.SessionOpened, order: pb.OrderSpec) -> None:
    stages = [(each.first_epoch, each.num_samples) for each in opened.stages]
    least = order.global_batch_size if order.tail == pb.TAIL_DROP else 1
    rise = all(before[0] < after[0] and before[1] < after[1] for before, after in pairwise(stages))
    if not rise or stages[0][0] or stages[0][1] < least or stages[-1][1] != opened.num_samples:
        raise DaemonFault(f"the daemon says that the epochs of a job grow so: {stages[:10]}")
    _check_count("the first epoch of a stage", stages[-1][0], 0, MAX_COUNT)


def check_same_dataset(
    opened: pb.SessionOpened, before: pb.SessionOpened | pb.DatasetDescription
) -> None:
    """Checks that a session reads the dataset that was described, or read, before.

    The number of samples of a dataset that grows may differ from that of its description.

    Raises:
        CursorRejected: The dataset has changed meanwhile.
        DaemonFault: It is said to be the same one, but has other samples or fields.
    """
    if isinstance(before, pb.DatasetDescription) and before.grows and opened.stages:
        if opened.fields != before.fields:
            raise CursorRejected("the fields of the dataset have changed. Make a new Loader")
        return
    if opened.fingerprint != before.fingerprint:
        raise CursorRejected(
            f"the dataset has changed: its fingerprint was {before.fingerprint} and is "
            f"{opened.fingerprint} now. Make a new Loader, which begins with the new samples"
        )
    is_same = opened.num_samples == before.num_samples and opened.fields == before.fields
    if not is_same:
        raise DaemonFault(
            f"the daemon describes the dataset with the fingerprint {opened.fingerprint} in two "
            "ways: the number of its samples or its fields differ"
        )


def check_grant(batches: pb.Batches) -> None:
    """Checks how many batches a session may now have under way.

    Raises:
        DaemonFault: They are more than any session has.
    """
    _check_count("max_queued_batches", batches.max_queued_batches, 0, MAX_QUEUED)
    _check_count("max_kept_batches", batches.max_kept_batches, 0, MAX_QUEUED)


def check_group(group: pb.BatchGroup, step: int, num_expected: int) -> None:
    """Checks which steps a batch group has, and their cursors.

    `step` comes next, and the daemon has credit for `num_expected` batches.

    Raises:
        DaemonFault: A step is missing or comes twice, there are more batches than credit, or a
            cursor is invalid.
    """
    cursors = group.cursors
    if group.first_step != step:
        raise DaemonFault(f"the daemon sent step {group.first_step} where step {step} comes next")
    if not 0 < len(cursors.own) <= num_expected:
        raise DaemonFault(
            f"the daemon sent {len(cursors.own)} batches from step {step} on, "
            f"but it may send 1 to {num_expected}"
        )
    sizes = set(map(len, cursors.own))
    if cursors.num_before > min(sizes):
        raise DaemonFault(f"the cursors from step {step} on are shorter than their beginning")
    for size in sizes:
        check_cursor_bytes(size + len(cursors.common))


def check_cursor_bytes(num_bytes: int) -> None:
    """Checks the size of a cursor.

    Raises:
        DaemonFault: No cursor has this size.
    """
    if not 0 < num_bytes <= MAX_CURSOR_BYTES:
        raise DaemonFault(
            f"the daemon sent a cursor of {num_bytes} bytes; one has 1 to {MAX_CURSOR_BYTES}"
        )


def _check_count(name: str, number: int, least: int, most: int) -> None:
    if not least <= number <= most:
        raise DaemonFault(
            f"the daemon says that {name} is {number}; it must be from {least} to {most}"
        )
