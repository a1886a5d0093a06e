"""What a client asks for when it opens a session."""

from dataclasses import dataclass, replace

from gyre_daemon.config import MAX_PREFETCH_BATCHES
from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.errors import InvalidRequest
from gyre_daemon.fetching.layout import max_batch_bytes, max_note_bytes
from gyre_daemon.memory.share import Share, divide
from gyre_daemon.order.cursor import Cursor, check_cursor, decode_cursor
from gyre_daemon.order.plan import Order, check_ranks

MAX_EPOCHS = 1 << 32
MAX_POSITION = 1 << 62
_AHEAD_BYTES, _MIN_AHEAD, _MAX_AHEAD = 8 << 20, 4, 64  # the window, unless it is asked for
_LEAST_SLOTS = 10  # a window of three batches, as many that are queued, and what is kept
_STRIPS_AHEAD_BYTES, _MANY_IN_STRIPS = 24 << 20, 192  # the same where several batches make a strip
_MOST_IN_STRIPS, _SAMPLES_IN_STRIPS = 768, 48 << 10  # where layouts are equal: a third of them is planned in 1 ms
_FEW_STRIPS, _FEW_STRIPS_BYTES = 12, 80 << 20  # batches: three strips of four, as far as the bytes are enough for them


@dataclass(frozen=True, slots=True)
class Reader:
    """Who reads.

    Attributes:
        job: the job's name.
        rank: in `[0, world_size)`.
        world_size: ranks of the job.
        generation: grows with every attempt of the same rank; the newest wins.
    """

    job: str
    rank: int
    world_size: int
    generation: int


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """What a client asks for.

    Attributes:
        dataset: open.
        order: how to go through it.
        reader: for whom.
        num_epochs: the stream ends after the last step that begins in so many; 0 for never.
        cursor: encoded; empty for the beginning.
        prefetch_batches: size of the window; 0 to let the size of a batch decide.
        step: where to begin, instead of at the cursor's step.
    """

    dataset: Dataset
    order: Order
    reader: Reader
    num_epochs: int
    cursor: bytes
    prefetch_batches: int
    step: int | None = None

    def check(self) -> None:
        """Refuse what makes no sense.

        Raises:
            InvalidRequest: names the numbers.
        """
        check_ranks(self.order, self.reader.rank, self.reader.world_size)
        if self.num_epochs > MAX_EPOCHS or self.prefetch_batches > MAX_PREFETCH_BATCHES:
            raise InvalidRequest(f"at most {MAX_EPOCHS} epochs and {MAX_PREFETCH_BATCHES} prefetched batches can be asked for")
        if self.step is not None and self.step * self.order.global_batch_size > MAX_POSITION:
            raise InvalidRequest(f"step {self.step} lies beyond any training; positions end at 2**62")

    def start_cursor(self) -> Cursor:
        """Where it begins.

        Raises:
            CursorRejected: the client's cursor does not fit.
        """
        cursor = self._cursor()
        if self.step is None:
            return cursor
        return replace(cursor, position=self.step * self.order.global_batch_size, num_substitutes=0)

    def _cursor(self) -> Cursor:
        if not self.cursor:
            return Cursor(self.dataset.fingerprint, self.order, position=0)
        cursor = decode_cursor(self.cursor)
        check_cursor(cursor, self.dataset.name, self.dataset.fingerprint, self.order)
        return cursor

    def wanted_share(self, limit_bytes: int, *, scarce: bool = False) -> Share:
        """The memory that it would like to have; less where memory is scarce and it asks for no window in particular."""
        num_samples = self.order.global_batch_size // self.reader.world_size
        batch_bytes = max_batch_bytes(self.dataset.index, num_samples)
        in_strips = self.dataset.storage.reads_in_bulk
        num_wanted = self._in_strips(batch_bytes, scarce=scarce) if in_strips else _one_by_one(batch_bytes)
        num_ahead = self.prefetch_batches or num_wanted
        note_bytes, may_grow = max_note_bytes(self.dataset.index, num_samples), not self.prefetch_batches
        return divide(batch_bytes, num_ahead, limit_bytes, note_bytes=note_bytes, in_strips=in_strips, may_grow=may_grow)

    def scarce_share(self, limit_bytes: int, free_bytes: int) -> Share:
        """As much as seven eighths of what is free: who comes next finds something too."""
        return self.wanted_share(min(limit_bytes, free_bytes * 7 // 8), scarce=True)

    def least_bytes(self, limit_bytes: int) -> int:
        """What a share for a few batches reserves: no session that is open has to do with less."""
        share = self.wanted_share(limit_bytes, scarce=True)
        num_slots = min(share.num_bytes // share.batch_bytes, _LEAST_SLOTS)
        return share.reserved_for(num_slots * share.batch_bytes)

    def _in_strips(self, batch_bytes: int, *, scarce: bool) -> int:
        part = 2 if scarce else 1
        few = max(_MIN_AHEAD, min(_FEW_STRIPS, _FEW_STRIPS_BYTES // part // batch_bytes))
        most = _MANY_IN_STRIPS
        if self.dataset.has_equal_samples:
            most = max(most, min(_MOST_IN_STRIPS, _SAMPLES_IN_STRIPS * self.reader.world_size // self.order.global_batch_size))
        return min(max(_STRIPS_AHEAD_BYTES // part // batch_bytes, few), most)


def _one_by_one(batch_bytes: int) -> int:
    return min(max(_AHEAD_BYTES // batch_bytes, _MIN_AHEAD), _MAX_AHEAD)
