"""A client's request for a session, and the cursor and the samples at which it begins.

[Note: How a dataset grows] A dataset with `append = true` may get shards behind all others. A
cursor of such a dataset says how many shards its job reads, with their fingerprint. The daemon
compares that with the fingerprint of as many of the first shards that it has. If a client resumes
from a saved state, it asks to grow: then the epochs that begin from there on have all samples, and
the cursor says so from then on (`Stages.grown`). If it opens a session again within its run, it
does not ask, and the job keeps its samples. So the samples of a job are decided once, where all of
its ranks are given the same state, and never by the moment at which one rank loses its daemon.

[Note: Fixed shares] A session's share is fixed when it opens, and nothing takes it back. The first
rank of a job reserves for all its ranks on this node; its client says how many there are. They get
equal shares. Together these take a fourth of the free memory, so the next job finds some; or three
batches each, where a fourth is less. A rank that ends leaves its share to its successor. When the
last rank has ended, all is free.

A user may take a fraction of the memory that other users do not have (`limits.user.memory`), so a
user who comes later still finds some. All jobs of a user share that fraction.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from gyre_protos.text import counted
from msgspec import Struct

from gyre_daemon.access.policy import Limits, Principal
from gyre_daemon.config import MAX_PREFETCH_BATCHES, DatasetConfig
from gyre_daemon.datasets.dataset import Dataset, Prefix
from gyre_daemon.datasets.formats import FieldSpec
from gyre_daemon.datasets.indexing.catalog import Catalog
from gyre_daemon.errors import CursorRejected, InvalidRequest, Overloaded
from gyre_daemon.fetching.layout import (
    max_batch_bytes,
    max_metadata_bytes,
    max_packed_bytes,
    max_packed_metadata_bytes,
)
from gyre_daemon.memory.arenas import ArenaRegistry, Budget
from gyre_daemon.memory.share import (
    Share,
    default_window,
    default_window_in_groups,
    share_within,
)
from gyre_daemon.order.balance import CostRule
from gyre_daemon.order.cursor import Cursor, check_cursor, check_transforms, decode_cursor
from gyre_daemon.order.mixture import MixtureState, check_mixture, check_ranks
from gyre_daemon.order.planner import Order, stages_of
from gyre_daemon.order.steps import MAX_STAGES, Stage

MAX_EPOCHS = 1 << 32
MAX_POSITION = 1 << 62


@dataclass(frozen=True, slots=True)
class Reader:
    """The rank of a job that reads.

    Attributes:
        job: the job's name.
        rank: its number, in `[0, world_size)`.
        world_size: the number of ranks.
        generation: grows with every attempt of the same peer; the newest wins.
        peer: tells readers of one rank apart; None where it has no peers.
        num_local: how many ranks of the job are on this node; 0 where the client does not say.
        fence: tells the run from all others of the user that have the same name; the name itself
            where no other run has it.
    """

    job: str
    rank: int
    world_size: int
    generation: int
    peer: int | None = None
    num_local: int = 0
    fence: str = field(kw_only=True)


class SessionRequest(Struct, frozen=True):
    """A client's request for a session.

    Attributes:
        owner: the principal that asks; no other may use the session.
        dataset: an open one.
        order: how to go through it.
        reader: the rank that reads.
        num_epochs: the stream ends after the last step that begins in this many epochs; 0 for
            never.
        cursor: where it begins, which fits dataset and order; see `resumption`.
        prefetch_batches: the size of the window; 0 to let the size of a batch decide.
        step: the step to begin at, instead of the cursor's; None for the cursor's.
        is_operator: whether the owner may know how much other users have.
        iteration_epochs: nothing is read beyond the end of an iteration of this many epochs until
            the client says so; 0 where the client has no iterations.
        balance: the cost of samples, to share out each global batch by; None for parts in the order
            of positions.
        definition: of the dataset, with the packing and the transforms that the client declared.
    """

    owner: Principal
    dataset: Dataset
    order: Order
    reader: Reader
    num_epochs: int
    cursor: Cursor
    prefetch_batches: int
    step: int | None = None
    is_operator: bool = False
    balance: CostRule | None = None
    iteration_epochs: int = 0
    definition: DatasetConfig | None = None

    def check(self) -> None:
        """Refuse a request that makes no sense.

        Raises:
            InvalidRequest: a number is out of range; it is named.
        """
        check_ranks(self.order, self.reader.rank, self.reader.world_size)
        for name in ("num_epochs", "iteration_epochs"):
            if (num := getattr(self, name)) > MAX_EPOCHS:
                raise InvalidRequest(f"{name} is {num}; at most {MAX_EPOCHS} are served")
        if self.prefetch_batches > MAX_PREFETCH_BATCHES:
            raise InvalidRequest(
                f"prefetch_batches is {self.prefetch_batches}; at most {MAX_PREFETCH_BATCHES} "
                "batches are prefetched"
            )
        if self.step is not None and self.order.position_of(self.step) > MAX_POSITION:
            raise InvalidRequest(f"step {self.step} is beyond any training; positions end at 2**62")

    def start_cursor(self) -> Cursor:
        """Where it begins: at its step, or else at its cursor."""
        if self.step is None:
            return self.cursor
        position = self.order.position_of(self.step)
        return replace(self.cursor, position=position, num_substitutes=0)

    @property
    def num_samples(self) -> int:
        """N of its last epochs: of the dataset, or of its first shards where it has grown since."""
        stages = self.cursor.stages
        return stages[-1].num_samples if stages else self.dataset.num_samples

    def share(self, limit_bytes: int) -> Share:
        """The memory that it would like to have, within a limit, but three batches if that is more.

        Its window then has one batch, and there is one for the queue and one for the script.
        """
        batch_bytes, metadata_bytes = self._most_bytes
        in_groups = self.dataset.is_read_in_groups
        alike = self.dataset.has_equal_samples
        num_samples = self.order.global_batch_size // self.reader.world_size
        default = (
            default_window_in_groups(batch_bytes, num_samples if alike else None)
            if in_groups
            else default_window(batch_bytes)
        )
        return share_within(
            batch_bytes,
            self.prefetch_batches or default,
            limit_bytes,
            metadata_bytes=metadata_bytes,
            in_groups=in_groups,
        )

    @property
    def _most_bytes(self) -> tuple[int, int]:
        """Upper bounds of the size of a batch, and of the bytes kept next to it."""
        dataset, num_samples = self.dataset, self.order.global_batch_size // self.reader.world_size
        if packed := dataset.packed:
            return max_packed_bytes(packed, num_samples), max_packed_metadata_bytes(
                packed, num_samples
            )
        stages, num_corrupt = self.cursor.stages, len(dataset.corrupt)
        if dataset.mixture and num_corrupt:
            num_corrupt = num_samples  # a small source may come often
        least_epoch = stages[0].num_samples if stages else None
        return (
            max_batch_bytes(dataset.sized, num_samples, num_corrupt, dataset.fields, least_epoch),
            max_metadata_bytes(dataset.sized, num_samples),
        )


class Resumption(Struct, frozen=True):
    """Finds where a session on one dataset begins.

    Attributes:
        catalog: has the dataset.
        name: of the dataset in the catalog.
        config: of the dataset.
        dataset: open, without transforms.
    """

    catalog: Catalog
    name: str
    config: DatasetConfig
    dataset: Dataset

    async def cursor(
        self, order: Order, data: bytes, transforms: str, *, grow: bool, changed_transforms: bool
    ) -> Cursor:
        """The cursor at which a session begins.

        Args:
            order: that was asked for.
            data: the client's cursor; empty for the beginning.
            transforms: identifies the transforms of the samples.
            grow: whether epochs that have not begun get the shards that were added since.
            changed_transforms: whether the cursor may belong to samples that were transformed
                otherwise; never where their lengths decide the order.

        Raises:
            CursorRejected: the client's cursor is of other data, another order or other transforms.
            InvalidRequest: the order does not fit the dataset.
            GyreError: as `Catalog.open`.
        """
        its = self.dataset
        if not data:
            mixture = MixtureState.of(its.mixture) if its.mixture else None
            start = Cursor(its.fingerprint, order, 0, transforms=transforms, mixture=mixture)
            return self._with_all(start) if its.grows else start
        cursor = decode_cursor(data)
        changed = await self._changed_source(cursor)
        check_mixture(cursor.mixture, its.mixture, its.name, lambda *_: changed)
        first = None if cursor.fingerprint == its.fingerprint else await self._first_shards(cursor)
        wanted = first.fingerprint if first else its.fingerprint
        changed = ""
        if cursor.fingerprint != wanted:
            changed = await self.catalog.what_changed(its, cursor.fingerprint)
        check_cursor(cursor, its.name, wanted, order, lambda _: changed)
        if not changed_transforms or order.bucket:
            check_transforms(cursor, transforms)
        cursor = replace(cursor, transforms=transforms)
        num_samples = first.num_samples if first else its.num_samples
        if its.grows and not cursor.stages:
            num_shards = await self._num_shards(cursor) if first else len(its.shards)
            cursor = replace(cursor, stages=(Stage(0, num_samples),), num_shards=num_shards)
        if cursor.stages and cursor.stages[-1].num_samples != num_samples:
            raise CursorRejected(
                "the state says that its data has "
                f"{counted(cursor.stages[-1].num_samples, 'sample')}, but it has "
                f"{num_samples}; pass the state as state_dict() gave it"
            )
        if not grow or not its.grows:
            return cursor
        stages = stages_of(order, cursor.stages).grown(cursor.position, its.num_samples)
        if len(stages) > MAX_STAGES:
            raise CursorRejected(
                f"the job's dataset `{its.name}` has grown {MAX_STAGES} times, and a state holds "
                "no more; begin a new run"
            )
        return replace(self._with_all(cursor), stages=stages)

    async def _changed_source(self, cursor: Cursor) -> str:
        """How the data of a mixture's first source that differs were when the cursor was made."""
        now = dict(MixtureState.of(self.dataset.mixture).sources) if self.dataset.mixture else {}
        for source, fingerprint in cursor.mixture.sources if cursor.mixture else ():
            opened = self.dataset.sources.get(source)
            if opened and now.get(source, fingerprint) != fingerprint:
                return await self.catalog.what_changed(opened, fingerprint)
        return ""

    def _with_all(self, cursor: Cursor) -> Cursor:
        """The cursor, of all samples of the dataset."""
        its = self.dataset
        stages = (Stage(0, its.num_samples),)
        return replace(
            cursor, fingerprint=its.fingerprint, stages=stages, num_shards=len(its.shards)
        )

    async def _num_shards(self, cursor: Cursor) -> int:
        """The number of shards that a cursor covers; 0 if unknown.

        One from before its dataset could grow does not say it, but the daemon may remember.
        """
        remembered = self.catalog.num_shards_then
        return cursor.num_shards or await remembered(self.dataset, cursor.fingerprint)

    async def _first_shards(self, cursor: Cursor) -> Prefix | None:
        """The first shards of a grown dataset, if a cursor covers just these.

        Raises:
            CursorRejected: it is of more shards than there are, or their samples have other fields
                or lie in other blocks.
        """
        its = self.dataset
        if not its.grows:
            return None
        num_shards = await self._num_shards(cursor)
        if num_shards > len(its.shards):
            raise CursorRejected(
                f"the state is of {counted(num_shards, 'shard')} of `{its.name}`, and this daemon "
                f"has opened it with {len(its.shards)}; if the others were added since, "
                "`gyre index` finds them, otherwise restore them",
                {"differs": "fingerprint"},
            )
        if not 0 < num_shards < len(its.shards):
            return None
        prefix = await self.catalog.prefix(self.name, self.config, its, num_shards)
        if prefix.fingerprint != cursor.fingerprint:
            return None
        then, now = _by_name(prefix.fields), _by_name(its.fields)
        if then != now:
            others = [name for name in then | now if then.get(name) != now.get(name)]
            raise CursorRejected(
                f"the shards that were added to `{its.name}` change the fields of a sample: "
                f"{', '.join(others)}. Name the fields to serve in the dataset's table, or begin "
                "a new run.",
                {"differs": "fields"},
            )
        if cursor.order.io_block_bytes and not prefix.keeps_blocks:
            raise CursorRejected(
                f"a shard that was added to `{its.name}` must be decoded, which changes the blocks "
                "of the shards before it. Write it without dictionaries, compression and JSON, or "
                "begin a new run.",
                {"differs": "blocks"},
            )
        return prefix


def _by_name(fields: Sequence[FieldSpec]) -> dict[str, tuple[object, ...]]:
    """The properties of each field of a sample that a job sees, in the fields' order."""
    return {
        each.name: (place, each.dtype, each.shape, each.ragged, each.categories)
        for place, each in enumerate(fields)
    }


InUse = tuple[str, int]  # a user, and the bytes that a session of it has reserved

_PART_OF_FREE = 4


@dataclass(slots=True)
class _Reservation:
    """The memory of the ranks of one job that read the same.

    Attributes:
        user: the job's owner.
        num_taken: how many ranks have a share.
        left: the shares of ranks that have not come yet, or have ended.
    """

    user: str
    num_taken: int = 0
    left: list[Share] = field(default_factory=list)


class Reservations:
    """The reserved shares of all jobs."""

    def __init__(self, budget: Budget, limits: Limits, limit_bytes: int) -> None:
        """Nothing is reserved.

        Args:
            budget: of the daemon.
            limits: on users.
            limit_bytes: the most memory that one session may reserve, three batches excepted.
        """
        self._budget = budget
        self._limits = limits
        self._limit_bytes = limit_bytes
        self._by_key: dict[Hashable, _Reservation] = {}

    def take(self, request: SessionRequest, in_use: Iterable[InUse]) -> Share:
        """A share for a rank: one that its job has left, or a new one.

        Args:
            request: that of the rank.
            in_use: the memory of open sessions.

        Raises:
            Overloaded: the memory is not free, or beyond a limit.
        """
        key = _key(request)
        reservation = self._by_key.get(key) or _Reservation(request.owner.name)
        if not reservation.left:
            num_ranks = max(1, request.reader.num_local - reservation.num_taken)
            reservation.left = self._reserve(request, num_ranks, in_use)
        self._by_key[key] = reservation
        reservation.num_taken += 1
        return reservation.left.pop()

    async def settle(self, request: SessionRequest, arenas: ArenaRegistry) -> None:
        """Where memory is scarce, wait until that of sessions just ended is back.

        Args:
            request: that of a session about to `take` memory.
            arenas: all arenas of the daemon.
        """
        num_bytes = request.share(self._limit_bytes).reserved_bytes
        num_ranks = max(1, request.reader.num_local)
        if num_bytes * num_ranks > self._budget.free_bytes // _PART_OF_FREE:
            await arenas.settle()

    def give_back(self, request: SessionRequest, share: Share) -> None:
        """Leave a rank's share to the rank that takes its place, or to all if it is the last."""
        key = _key(request)
        reservation = self._by_key[key]
        reservation.num_taken -= 1
        reservation.left.append(share)
        if not reservation.num_taken:
            del self._by_key[key]
            self._budget.give_back(_bytes_of(reservation.left))

    def check(self, request: SessionRequest) -> None:
        """Check that the session could have memory if no other had any.

        Raises:
            Overloaded: it could not.
        """
        limit_bytes = self._budget.limit_bytes
        num_bytes = request.share(min(self._limit_bytes, limit_bytes)).reserved_bytes
        if num_bytes > limit_bytes:
            raise Overloaded(
                f"{_purpose(request, 1)} needs {num_bytes} bytes, more than the daemon's "
                f"memory_budget of {limit_bytes} bytes. Lower the batch size or raise "
                "memory_budget.",
                {"needed_bytes": num_bytes, "limit_bytes": limit_bytes},
            )

    def _reserve(
        self, request: SessionRequest, num_ranks: int, in_use: Iterable[InUse]
    ) -> list[Share]:
        user, budget = request.owner.name, self._budget
        limits, purpose = self._limits.of_user(user), _purpose(request, num_ranks)
        free_bytes, taken_bytes, own_limit_bytes = budget.free_bytes, 0, 0
        if limits:
            by_user = budget.abandoned_by.copy()
            left = ((each.user, _bytes_of(each.left)) for each in self._by_key.values())
            for its_user, num_bytes in chain(in_use, left):
                by_user[its_user] += num_bytes
            taken_bytes = by_user[user]
            others_bytes = by_user.total() - taken_bytes
            own_limit_bytes = int(limits.memory * (budget.limit_bytes - others_bytes))
            free_bytes = min(free_bytes, own_limit_bytes - taken_bytes)
        part_bytes = max(0, free_bytes) // _PART_OF_FREE // num_ranks
        share = request.share(min(self._limit_bytes, part_bytes))
        num_bytes = num_ranks * share.reserved_bytes
        budget.reserve(num_bytes, purpose, None if request.is_operator else user)
        if limits and taken_bytes + num_bytes > own_limit_bytes:
            budget.give_back(num_bytes)
            raise Overloaded(
                f"{purpose} needs {num_bytes} bytes, but {user} has {taken_bytes} and may have "
                f"{own_limit_bytes} now (limits.user.memory). Close a session, lower the batch "
                "size, or end what is kept by clients whose sessions are over.",
                {
                    "needed_bytes": num_bytes,
                    "free_bytes": max(0, own_limit_bytes - taken_bytes),
                    "limit_bytes": int(limits.memory * budget.limit_bytes),
                    "who": user,
                },
            )
        return [share] * num_ranks


def _key(request: SessionRequest) -> Hashable:
    """Equal for the ranks of one run that read the same batches."""
    reader, dataset = request.reader, request.dataset
    run = request.owner.name, reader.job, reader.fence, reader.world_size
    batches = dataset.name, dataset.fingerprint, request.order, request.balance
    return run, batches, request.prefetch_batches


def _purpose(request: SessionRequest, num_ranks: int) -> str:
    what = "a session" if num_ranks == 1 else f"a job of {num_ranks} ranks on this node"
    return f"{what} on `{request.dataset.name}`"


def _bytes_of(shares: Iterable[Share]) -> int:
    return sum(each.reserved_bytes for each in shares)
