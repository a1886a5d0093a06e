"""A rotated module between two calls: how it is cut, where its slice lives, and when that slice sets out.

The life of a parameter: its owner keeps a slice of it at home and no rank ever has more. In forward the slice goes once round
the ring clockwise; every rank runs the module on its own part of the batch with the slice that visits, its own first, and
joins the outputs. In backward the slices come once more, counter-clockwise, the own one last; the gradient of each follows
one step behind it and is complete when it reaches the owner. `gyre_trainer.turn` runs one such call.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Literal
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from gyre_trainer.home import Home
from gyre_trainer.layout import Layout
from gyre_trainer.ring import Direction, Ring
from gyre_trainer.rule import Rule
from gyre_trainer.visitors import Visitors


@dataclass(frozen=True, slots=True)
class RotationPolicy:
    """How slices travel and compute; homes keep the dtype that the parameters have.

    Attributes:
        compute_dtype: of travelling weights and of the computation with them; None for the parameters' own.
        grad_dtype: of travelling gradients; None for the parameters' own.
        recompute: keep no activation inside the module, run each slice once more in backward. Sends no byte more.
        dropout: "independent", each rank draws its own masks; or "equal", they are the same at every number of ranks, where
            every rank was seeded alike (`torch.manual_seed`). See `gyre_trainer.draw`.
    """

    compute_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    recompute: bool = False
    dropout: Literal["independent", "equal"] = "independent"


@dataclass(frozen=True, eq=False)
class Rotation:
    """What there is to know of a rotated module.

    Attributes:
        module: whose parameters now lie in ``home``.
        forward: the module's own, for whole or sliced parameters alike.
        layout: as the home's, with the names that its parameters have in this module.
        passengers: names of parameters inside that no cut names; each rank has them whole.
    """

    module: nn.Module
    forward: Callable[..., Tensor]
    rule: Rule
    layout: Layout
    home: Home
    policy: RotationPolicy
    passengers: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of the module's class, for messages."""
        return type(self.module).__name__

    @contextmanager
    def own_slice(self) -> Iterator[Tensor]:
        """The own slice as it travels: the home itself, or a copy in the computation's dtype."""
        flat = self.home.flat
        dtype = self.policy.compute_dtype or flat.dtype
        if dtype == flat.dtype:
            yield flat
            return
        pool = self.home.ring.pool
        buffer = pool.take(self.layout.numel(0), dtype, flat.device)
        try:
            yield buffer[: flat.numel()].copy_(flat)
        finally:
            pool.put(buffer)


class Departure(ExitStack):
    """A rotation's slices on their way; leaving the context waits for what is under way and gives buffers back.

    Attributes:
        own: the own slice as it travels.
        visitors: the others', the first hop under way.
    """

    def __init__(self, rotation: Rotation, direction: Direction) -> None:
        super().__init__()
        self.own = self.enter_context(rotation.own_slice())
        self.visitors = self.enter_context(closing(Visitors(rotation.home.ring, self.own, rotation.layout, direction)))
        self.version = rotation.home.version


class Prefetch:
    """Sends off a rotation's first hop of backward while the rotation before it in backward still computes.

    Which one that is was learned from the last backward. All ranks learn the same, since all make the same calls in the same
    order; where the guess was wrong, the hop is made again.
    """

    def __init__(self) -> None:
        self._follower: WeakKeyDictionary[Rotation, ref[Rotation]] = WeakKeyDictionary()
        self._last: Rotation | None = None
        self._ready: tuple[Rotation, Departure] | None = None

    def begin(self, rotation: Rotation) -> None:
        """The backward of ``rotation`` begins."""
        if self._last is not None:
            self._follower[self._last] = ref(rotation)
        self._last = rotation
        Variable._execution_engine.queue_callback(self._end)

    def departure(self, rotation: Rotation) -> Departure:
        """The one that was sent off ahead, or a new one."""
        if self._ready is not None:
            guess, departure = self._ready
            self._ready = None
            if guess is rotation and departure.version == rotation.home.version:
                return departure
            departure.close()
        return Departure(rotation, Direction.COUNTER_CLOCKWISE)

    def send_ahead(self, rotation: Rotation) -> None:
        """Start what follows ``rotation``; to be called when its visitors are through."""
        known = self._follower.get(rotation)
        follower = known() if known is not None else None
        if follower is not None and follower.rule.backward_reads_weights:
            self._drop()
            self._ready = (follower, Departure(follower, Direction.COUNTER_CLOCKWISE))

    def _drop(self) -> None:
        if self._ready is not None:
            self._ready[1].close()
            self._ready = None

    def _end(self) -> None:
        """The whole backward is through; what comes next meets other weights."""
        self._drop()
        self._last = None


_PREFETCHES: WeakKeyDictionary[Ring, Prefetch] = WeakKeyDictionary()


def prefetch_of(ring: Ring) -> Prefetch:
    """The one of all rotations on a ring."""
    return _PREFETCHES.setdefault(ring, Prefetch())
