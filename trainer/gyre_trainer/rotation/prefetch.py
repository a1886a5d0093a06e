"""Hops of backward that start ahead of time, while what comes before them still computes."""

from contextlib import ExitStack, closing
from weakref import WeakKeyDictionary, ref

from torch.autograd import Variable

from gyre_trainer.comm.ring import Direction, Ring
from gyre_trainer.rotation.rotation import Rotation
from gyre_trainer.shards.remote_slices import Visitors


class Departure(ExitStack):
    """A rotation's slices, or their pieces of one round, on their way.

    Leaving the context waits for what is under way and gives buffers back.

    Attributes:
        own: the number of the own piece, and the piece as it travels.
        visitors: the others', the first hop under way.
    """

    def __init__(self, rotation: Rotation, direction: Direction, round_: int) -> None:
        super().__init__()
        ring, pieces = rotation.home.ring, rotation.pieces
        flat = self.enter_context(rotation.own_piece(round_))
        self.own = pieces.piece(ring.rank, round_), flat
        self.visitors = self.enter_context(closing(Visitors(ring, flat, pieces, direction, round_)))
        self.version = rotation.home.version


class Prefetch:
    """Sends off the first hop of what comes next in backward while what is before it still computes.

    That is the same rotation's next round, or the next rotation: which one was learned from the last backward. All ranks
    learn the same, since all make the same calls in the same order; where the guess was wrong, the hop is made again.
    """

    def __init__(self) -> None:
        self._follower: WeakKeyDictionary[Rotation, ref[Rotation]] = WeakKeyDictionary()
        self._last: Rotation | None = None
        self._ready: tuple[Rotation, int, Departure] | None = None

    def begin(self, rotation: Rotation) -> None:
        """The backward of ``rotation`` begins."""
        if self._last is not None:
            self._follower[self._last] = ref(rotation)
        self._last = rotation
        Variable._execution_engine.queue_callback(self._end)

    def departure(self, rotation: Rotation, round_: int) -> Departure:
        """The one that was sent off ahead, or a new one."""
        if self._ready is not None:
            guess, guessed_round, departure = self._ready
            self._ready = None
            if guess is rotation and guessed_round == round_ and departure.version == rotation.home.version:
                return departure
            departure.close()
        return Departure(rotation, Direction.COUNTER_CLOCKWISE, round_)

    def send_ahead(self, rotation: Rotation, round_: int) -> None:
        """Start what follows a round of ``rotation``; to be called when its visitors are through."""
        if round_ + 1 < rotation.pieces.num_rounds:
            follower: Rotation | None = rotation
        else:
            known = self._follower.get(rotation)
            follower, round_ = known() if known is not None else None, -1
        if follower is None:
            _make_room(rotation)
        elif follower.rule.backward_reads_weights:
            self._drop()
            self._ready = follower, round_ + 1, Departure(follower, Direction.COUNTER_CLOCKWISE, round_ + 1)

    def _drop(self) -> None:
        if self._ready is not None:
            self._ready[2].close()
            self._ready = None

    def _end(self) -> None:
        """The whole backward is through; what comes next meets other weights."""
        self._drop()
        self._last = None


def _make_room(rotation: Rotation) -> None:
    """As much as sending ahead will take, which the first backward does not do; so the second one allocates nothing."""
    home, dtype = rotation.home, rotation.policy.compute_dtype or rotation.home.flat.dtype
    if home.ring.size > 1:
        num_buffers = 1 if dtype == home.flat.dtype else 2  # the visitor, and the own slice as it travels
        buffers = [home.ring.pool.take(rotation.pieces.numel(0), dtype, home.flat.device) for _ in range(num_buffers)]
        for buffer in buffers:
            home.ring.pool.put(buffer)


_PREFETCHES: WeakKeyDictionary[Ring, Prefetch] = WeakKeyDictionary()


def prefetch_of(ring: Ring) -> Prefetch:
    """The one of all rotations on a ring."""
    return _PREFETCHES.setdefault(ring, Prefetch())
