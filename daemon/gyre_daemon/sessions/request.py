"""A client's request for a session."""

from dataclasses import dataclass, field, replace

from gyre_daemon.access.principal import Principal
from gyre_daemon.config import MAX_PREFETCH_BATCHES, DatasetConfig
from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.errors import InvalidRequest
from gyre_daemon.fetching.layout import max_batch_bytes, max_metadata_bytes
from gyre_daemon.fetching.packed import max_packed_bytes, max_packed_metadata_bytes
from gyre_daemon.memory.share import Share, divide
from gyre_daemon.order.balance import CostRule
from gyre_daemon.order.cursor import Cursor
from gyre_daemon.order.planner import Order
from gyre_daemon.order.planning import check_ranks

MAX_EPOCHS = 1 << 32
MAX_POSITION = 1 << 62
# The window, unless it is asked for: these bytes, but batches within these bounds. With less, a
# storage that answers late is asked for too little at once; with more, a job has more memory than
# it needs, and others find less.
_AHEAD_BYTES, _MIN_AHEAD, _MAX_AHEAD = 32 << 20, 4, 256
# The same where several batches make a batch group; three groups are under way. A window of half
# the bytes has batch groups of half the length: small batches then cost far more each.
_GROUPS_AHEAD_BYTES, _MANY_IN_GROUPS = 72 << 20, 576
# More batches than that only where all have one layout. A third of them is planned in 1 ms, during
# which the event loop does nothing else.
_MOST_IN_GROUPS, _SAMPLES_IN_GROUPS = 768, 48 << 10
# Large batches: three batch groups of four, as far as these bytes are enough for them.
_FEW_GROUPS, _FEW_GROUPS_BYTES = 12, 80 << 20


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


@dataclass(frozen=True, slots=True)
class SessionRequest:
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
        if self.num_epochs > MAX_EPOCHS:
            raise InvalidRequest(
                f"num_epochs is {self.num_epochs}; at most {MAX_EPOCHS} are served"
            )
        if self.iteration_epochs > MAX_EPOCHS:
            raise InvalidRequest(
                f"iteration_epochs is {self.iteration_epochs}; at most {MAX_EPOCHS} are served"
            )
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
        num_wanted = self._in_groups(batch_bytes) if in_groups else _singly(batch_bytes)
        return divide(
            batch_bytes,
            self.prefetch_batches or num_wanted,
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

    def _in_groups(self, batch_bytes: int) -> int:
        few = max(_MIN_AHEAD, min(_FEW_GROUPS, _FEW_GROUPS_BYTES // batch_bytes))
        most = _MANY_IN_GROUPS
        if self.dataset.has_equal_samples:
            num_samples = self.order.global_batch_size // self.reader.world_size
            most = max(most, min(_MOST_IN_GROUPS, _SAMPLES_IN_GROUPS // num_samples))
        return min(max(_GROUPS_AHEAD_BYTES // batch_bytes, few), most)


def _singly(batch_bytes: int) -> int:
    return min(max(_AHEAD_BYTES // batch_bytes, _MIN_AHEAD), _MAX_AHEAD)
