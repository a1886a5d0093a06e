"""How a session divides its memory among the window, the client's queue, and what the client keeps. Pure."""

from dataclasses import dataclass, replace

from gyre_daemon.memory.pages import whole_pages

_SESSION_NOTE_BYTES = 256 << 10  # of a session, its feed and its connection
_STRIP_BYTES, _MAX_TOGETHER, _MAX_WINDOWS = 26 << 20, 256, 4


@dataclass(frozen=True, slots=True)
class Share:
    """How a session divides its memory.

    Attributes:
        batch_bytes: upper bound of one batch.
        note_bytes: upper bound of what is noted of one batch beside its memory.
        num_bytes: of its arenas.
        num_ahead: batches in flight or ready: the prefetch window.
        num_together: batches that make a strip: they are read together and lie in one slot.
        max_windows: how many times the memory makes strips as long as they may be.
        num_queued: batches that its client may have received and not taken.
        num_kept: batches that its client may go on to use after it took the next.
        may_grow: nobody asked for just this window.
    """

    batch_bytes: int
    note_bytes: int
    num_bytes: int
    num_ahead: int
    num_together: int
    max_windows: int
    num_queued: int
    num_kept: int
    may_grow: bool

    @property
    def strip_bytes(self) -> int:
        """Upper bound of a strip."""
        return self.batch_bytes * self.num_together

    @property
    def reserved_bytes(self) -> int:
        """What a session with it takes of the budget."""
        return self.reserved_for(self.num_bytes)

    def reserved_for(self, num_bytes: int) -> int:
        """What a session with so many bytes of arenas takes of the budget."""
        return _SESSION_NOTE_BYTES + self.with_notes(num_bytes)

    def with_notes(self, num_bytes: int) -> int:
        """So many bytes of arenas, with what is noted of the batches in them."""
        return num_bytes + num_bytes // self.batch_bytes * self.note_bytes

    def times(self, num_windows: int) -> "Share":
        """As many times the memory, for longer strips."""
        return replace(
            self,
            num_bytes=self.num_bytes * num_windows,
            num_ahead=self.num_ahead * num_windows,
            num_together=self.num_together * num_windows,
            num_queued=self.num_queued * num_windows,
            num_kept=self.num_kept * num_windows,
        )


def divide(
    batch_bytes: int,
    num_ahead: int,
    limit_bytes: int,
    *,
    note_bytes: int = 0,
    in_strips: bool = False,
    may_grow: bool = False,
) -> Share:
    """The share of a session that wants to be so many batches ahead: within the limit, but room for one batch in any case.

    Args:
        batch_bytes: upper bound of a batch.
        num_ahead: the prefetch window it would like.
        limit_bytes: what it may have.
        note_bytes: see `Share`.
        in_strips: whether several small batches are read together; a third of the window at most.
        may_grow: whether more may be added later.
    """
    batch_bytes = whole_pages(batch_bytes)
    num_wanted = 2 * num_ahead + max(2, 2 * num_ahead // 3)
    num_slots = max(1, min(num_wanted, (limit_bytes - _SESSION_NOTE_BYTES) // (batch_bytes + note_bytes)))
    if num_slots < num_wanted:
        num_ahead = max(1, 3 * (num_slots - 1) // 8)
    longest = max(1, min(_STRIP_BYTES // batch_bytes, _MAX_TOGETHER)) if in_strips else 1
    num_together = max(1, min(longest, num_ahead // 3))
    max_windows = min(_MAX_WINDOWS, longest // num_together) if num_ahead >= 3 else 1  # three strips at least are under way
    num_queued = min(num_ahead, max(1, num_slots - num_ahead)) // num_together * num_together  # whole strips travel
    num_kept = max(0, num_slots - num_ahead - num_queued)
    num_bytes = num_slots * batch_bytes
    return Share(batch_bytes, note_bytes, num_bytes, num_ahead, num_together, max_windows, num_queued, num_kept, may_grow)
