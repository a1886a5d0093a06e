"""A rotated module between two calls: how it is cut, where its slice lives, and when that slice sets out.

The life of a parameter: its owner keeps a slice of it at home and no rank ever has more. In forward the slice goes once round
the ring clockwise; every rank runs the module on its own part of the batch with the slice that visits, its own first, and
joins the outputs. In backward the slices come once more, counter-clockwise, the own one last; the gradient of each follows
one step behind it and is complete when it reaches the owner. `gyre_trainer.rotation.ring_pass` runs one such call.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.rule import Rule
from gyre_trainer.shards.layout import Layout
from gyre_trainer.shards.sharded_parameters import ShardedParameters

_MIN_PIECE = 2**18  # elements; hops of less cost time and save little
_MAX_ROUNDS = 16

_Dropout = Literal["independent", "equal"]


@dataclass(frozen=True, slots=True)
class RotationPolicy:
    """How slices travel and compute; homes keep the dtype that the parameters have.

    Attributes:
        compute_dtype: of travelling weights and of the computation with them; None for the parameters' own.
        grad_dtype: of travelling gradients; None for the parameters' own.
        recompute: keep no activation inside the module, run each slice once more in backward. Sends no byte more.
        recompute_tokens: for at most so many tokens at a time, where the module computes each token by itself, as an MLP does.
        dropout: "independent", each rank draws its own masks; or "equal", they are the same at every number of ranks, where
            every rank was seeded alike (`torch.manual_seed`). See `gyre_trainer.rotation.dropout_masks`.
    """

    compute_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    recompute: bool = False
    recompute_tokens: int = 4096
    dropout: _Dropout = "independent"

    def __post_init__(self) -> None:
        for name in ("compute_dtype", "grad_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise RotationError(f"RotationPolicy({name}={dtype}): what travels is a floating-point dtype, or None")
        if self.recompute_tokens < 1:
            raise RotationError(f"RotationPolicy(recompute_tokens={self.recompute_tokens}): it is 1 or more")
        if self.dropout not in get_args(_Dropout):
            raise RotationError(f"RotationPolicy(dropout={self.dropout!r}): it is one of {', '.join(get_args(_Dropout))}")


@dataclass(frozen=True, eq=False)
class Rotation:
    """What there is to know of a rotated module.

    Attributes:
        module: whose parameters now lie in ``sharded``.
        forward: the module's own, for whole or sliced parameters alike.
        layout: as the home's, with the names that its parameters have in this module.
        passengers: names of parameters inside that no cut names; each rank has them whole.
    """

    module: nn.Module
    forward: Callable[..., Tensor]
    rule: Rule
    layout: Layout
    sharded: ShardedParameters
    policy: RotationPolicy
    replicated: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of the module's class, for messages."""
        return type(self.module).__name__

    @cached_property
    def pieces(self) -> Layout:
        """How the slices travel: what can be divided is, where it is larger than what cannot.

        So one large vocabulary does not set the size of all transient buffers. It is settled at the first call, when all that
        rotates on the ring is known, and does not change afterwards.
        """
        largest_whole_numel = self.sharded.ring.pool.largest_whole_numel
        if not self.rule.divisible or len(self.layout.cuts) > 1 or not largest_whole_numel:
            return self.layout
        return self.layout.in_rounds(min(_MAX_ROUNDS, max(1, -(-self.layout.numel(0) // max(largest_whole_numel, _MIN_PIECE)))))

    @contextmanager
    def own_piece(self, round_: int) -> Iterator[Tensor]:
        """The own slice's piece of a round as it travels: in the home itself, or a copy in the computation's dtype."""
        flat = self.pieces.piece_in(self.sharded.flat, self.pieces.piece(self.sharded.ring.rank, round_))
        dtype = self.policy.compute_dtype or flat.dtype
        if dtype == flat.dtype:
            yield flat
            return
        pool = self.sharded.ring.pool
        buffer = pool.take(self.pieces.numel(0), dtype, flat.device)
        try:
            yield buffer[: flat.numel()].copy_(flat)
        finally:
            pool.put(buffer)
