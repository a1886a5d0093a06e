"""Decides the window of a session, and divides its memory. Pure.

The window is the number of batches in flight or ready. A job asks for one with `prefetch_batches`,
or the size of a batch decides; the session's share of the memory bounds it when the session opens.
A share never changes afterwards. Consumers of one stream have the window of the first one.
"""

from msgspec import Struct

_PAGE_BYTES = 4096


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
# A window of one batch, one in the queue, and one that the client keeps.
_LEAST_SLOTS = 3
# The memory of a session, its shared stream and its connection, batches excepted.
_SESSION_METADATA_BYTES = 256 << 10
# A batch group is at most this long. Longer ones cost less per batch, but the first batch of a
# group comes only with its last, and a window has room for fewer of them.
_GROUP_BYTES, _MAX_TOGETHER = 26 << 20, 256


class Share(Struct, frozen=True):
    """The memory that a session reserves, and its division.

    Attributes:
        batch_bytes: the most bytes that a batch has, in whole pages.
        metadata_bytes: the most bytes of the daemon's notes about a batch.
        num_bytes: the size of all arenas.
        window_batches: how many batches may be in flight or ready.
        num_together: how many batches make a batch group, which is read into one slot.
        max_queued: how many batches the client may have received and not taken.
        num_kept: how many batches the client may go on to use after it took the next.
    """

    batch_bytes: int
    metadata_bytes: int
    num_bytes: int
    window_batches: int
    num_together: int
    max_queued: int
    num_kept: int

    @property
    def group_bytes(self) -> int:
        """The most bytes that a batch group has."""
        return self.batch_bytes * self.num_together

    @property
    def reserved_bytes(self) -> int:
        """The bytes of the budget that a session with this share takes."""
        num_batches = self.num_bytes // self.batch_bytes
        return _SESSION_METADATA_BYTES + self.num_bytes + num_batches * self.metadata_bytes


def default_window(batch_bytes: int) -> int:
    """The window in batches that are read one by one, where none was asked for."""
    return min(max(_AHEAD_BYTES // batch_bytes, _MIN_AHEAD), _MAX_AHEAD)


def default_window_in_groups(batch_bytes: int, num_samples: int | None) -> int:
    """The window in batches that are read together, where none was asked for.

    Args:
        batch_bytes: the most bytes that a batch has.
        num_samples: of a batch, if all batches have one layout; else None.
    """
    few = max(_MIN_AHEAD, min(_FEW_GROUPS, _FEW_GROUPS_BYTES // batch_bytes))
    most = _MANY_IN_GROUPS
    if num_samples is not None:
        most = max(most, min(_MOST_IN_GROUPS, _SAMPLES_IN_GROUPS // num_samples))
    return min(max(_GROUPS_AHEAD_BYTES // batch_bytes, few), most)


def share_within(
    batch_bytes: int,
    window_batches: int,
    limit_bytes: int,
    *,
    metadata_bytes: int = 0,
    in_groups: bool = False,
) -> Share:
    """The share of a session within a limit, but with room for three batches in any case.

    Args:
        batch_bytes: the most bytes that a batch has.
        window_batches: the window in batches that the session would like.
        limit_bytes: the most that it may reserve.
        metadata_bytes: see `Share`.
        in_groups: whether several small batches are read together: a third of the window at most,
            so that three batch groups are under way.
    """
    batch_bytes = -(-batch_bytes // _PAGE_BYTES) * _PAGE_BYTES
    num_wanted = 2 * window_batches + max(2, 2 * window_batches // 3)
    num_possible = (limit_bytes - _SESSION_METADATA_BYTES) // (batch_bytes + metadata_bytes)
    num_slots = max(_LEAST_SLOTS, min(num_wanted, num_possible))
    if num_slots < num_wanted:
        window_batches = max(1, 3 * (num_slots - 1) // 8)
    longest = max(1, min(_GROUP_BYTES // batch_bytes, _MAX_TOGETHER)) if in_groups else 1
    num_together = max(1, min(longest, window_batches // 3))
    # whole batch groups travel
    max_queued = (
        min(window_batches, max(1, num_slots - window_batches)) // num_together * num_together
    )
    return Share(
        batch_bytes,
        metadata_bytes,
        num_slots * batch_bytes,
        window_batches,
        num_together,
        max_queued,
        num_kept=max(0, num_slots - window_batches - max_queued),
    )
