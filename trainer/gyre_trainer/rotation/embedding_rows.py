"""Rows of an embedding, from the ranks that own them to those whose tokens they are for.

[Note: Rows of an embedding]

A batch has few of a vocabulary's tokens, so an embedding's slices do not go round the ring. Each
rank says which rows it needs: one byte for each row of the vocabulary, 1 or 0. These flags go round
the ring. So messages have the same sizes on all ranks, whatever their tokens are, hops carry the
module's identity, and a row travels to a rank once, however often the rank has its token. The
owners send the rows, in ascending order. In backward each rank adds up its gradients row by row and
sends the sums to the owners, which know the rows. An owner adds what it gets in the order of the
ranks, so that sums are the same, to the bit, in every run.

No slice is copied as a whole, and a rank has at most as many rows as it has tokens. An owner sends
at most its rows to every other rank, as much as on the ring, and mostly far less.

Also here:

* One call of an embedding whose rows are sent, instead of slices that go round the ring.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gyre_trainer.comm.buffer_pool import with_room
from gyre_trainer.comm.identity import HopIdentity, path_of, span
from gyre_trainer.comm.ring import Direction, Ring, Stream
from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.call import cast
from gyre_trainer.rotation.output_reduction import DeferredGrads
from gyre_trainer.rotation.rule import ModuleSlice, Rotation, RowsRule, parameter_at, swapped
from gyre_trainer.shards.layout import Cut, Layout, local_of, spec_of, with_spec
from gyre_trainer.shards.travel import meet
from gyre_trainer.torch_internals import is_fake


@dataclass(frozen=True, slots=True)
class WantedRows:
    """The rows that this rank needs.

    Attributes:
        ids: their numbers in the whole parameter, ascending, each once.
        places: of each token, the place of its row among ``ids``.
        starts: for each owner, the place of its first row, and at last the number of ``ids``.
        padding: the place of the padding's row; None where no token is padding.
    """

    ids: Tensor
    places: Tensor
    starts: Sequence[int]
    padding: int | None

    def of(self, rows: Tensor, owner: int) -> Tensor:
        """Those of ``rows``, one for each of `ids`, that belong to an owner, as a view."""
        return rows[self.starts[owner] : self.starts[owner + 1]]


def wanted_rows(layout: Layout, tokens: Tensor, padding_idx: int | None) -> WantedRows:
    """The rows of ``tokens``.

    Fake tokens have no values. All are taken to differ, and to be spread evenly over the owners.

    Raises:
        IndexError: a token is not in the vocabulary. On CUDA, the device stops instead.
        TypeError: tokens are no int64 or int32, which torch refuses, too.
    """
    (cut,) = layout.cuts
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"tokens of an embedding must be int64 or int32, not {tokens.dtype}")
    if is_fake(tokens):
        return _assumed(layout, cut, tokens)
    _require_rows(tokens, cut.shape[0])
    tokens = tokens.to(torch.int64).contiguous()
    flags = torch.zeros(cut.shape[0], dtype=torch.bool, device=tokens.device)
    ids = flags.scatter_(0, tokens.view(-1), True).nonzero().view(-1)
    padding = [] if padding_idx is None else [padding_idx, padding_idx + 1]
    limits = torch.tensor([*_first_rows(layout, cut), *padding], device=tokens.device)
    starts = torch.searchsorted(ids, limits).tolist()
    place = None
    if padding:
        *starts, place, behind = starts
        place = place if place < behind else None
    return WantedRows(ids, torch.searchsorted(ids, tokens), starts, place)


def _first_rows(layout: Layout, cut: Cut) -> list[int]:
    return [*(start for start, _ in layout.all_bounds(cut)), cut.shape[0]]


def _require_rows(tokens: Tensor, num_rows: int) -> None:
    if tokens.is_cuda or not tokens.numel():
        return
    lowest, highest = map(int, torch.aminmax(tokens))
    if lowest < 0 or highest >= num_rows:
        raise IndexError(
            f"token {lowest if lowest < 0 else highest} is not in the embedding, "
            f"which has {num_rows} rows"
        )


def _assumed(layout: Layout, cut: Cut, tokens: Tensor) -> WantedRows:
    num_ids = min(tokens.numel(), cut.shape[0])
    starts = [-(-first * num_ids // cut.shape[0]) for first in _first_rows(layout, cut)]
    ids = tokens.new_zeros(num_ids, dtype=torch.int64)
    return WantedRows(ids, torch.zeros_like(tokens, dtype=torch.int64), starts, None)


class RowExchange:
    """The rows of one parameter that ranks need of each other in one call.

    See [Note: Rows of an embedding].

    Attributes:
        wanted: the rows that this rank needs.
    """

    def __init__(self, ring: Ring, layout: Layout, wanted: WantedRows, number: int) -> None:
        """``number`` is the module's in `Ring.modules`."""
        self.wanted = wanted
        self._ring = ring
        self._number = number
        (cut,) = layout.cuts
        self._num_rows = cut.shape[0]
        self._own = layout.bounds(cut, ring.rank)
        self._asked: list[Tensor] = []

    def fetch(self, shard: Tensor, dtype: torch.dtype) -> Tensor:
        """The wanted rows, in ``dtype``, of the ``shard`` of every rank. Collective.

        Raises:
            RingError: a rank is gone or too late.
            RotationError: another rank calls another module.
        """
        self._asked = self._ask(dtype)
        rows = shard.new_empty((len(self.wanted.ids), shard.shape[1]), dtype=dtype)
        self._send(
            [shard.index_select(0, asked).to(dtype) for asked in self._asked],
            [self.wanted.of(rows, owner) for owner in range(self._ring.size)],
            Stream.WEIGHTS,
        )
        return rows

    def add_up(self, grads: Tensor, total: Tensor) -> None:
        """Add all ranks' gradients of the own rows to ``total``, as their average. Collective.

        Args:
            grads: this rank's gradients of the wanted rows, which travel in their dtype.
            total: of the own shard.

        Raises:
            RingError: a rank is gone or too late.
            RotationError: another rank calls another module.
        """
        ring = self._ring
        if ring.size > 1:
            # in the dtype of gradients: a buffer of weights may be in flight for the next module
            meet(ring, total[:0], HopIdentity(self._number, False, False, 0, 0))
        found = [grads.new_empty((len(asked), grads.shape[1])) for asked in self._asked]
        parts = [self.wanted.of(grads, owner) for owner in range(ring.size)]
        self._send(parts, found, Stream.GRADIENTS)
        for asked, rows in zip(self._asked, found, strict=True):
            total.index_add_(0, asked, rows.to(total.dtype), alpha=1 / ring.size)

    def _ask(self, dtype: torch.dtype) -> list[Tensor]:
        """For each rank, the rows of the own slice that it needs, counted from the first.

        Flags travel as numbers of ``dtype``, in the buffers that slices travel in.
        """
        ring, ids = self._ring, self.wanted.ids
        numel = -(-self._num_rows // dtype.itemsize)
        outgoing, before = with_room(numel, dtype, ids.device).zero_(), None
        if not is_fake(ids):
            outgoing.view(torch.uint8).index_fill_(0, ids, 1)
        asked = [self._of_own(outgoing)] * ring.size
        for step in range(1, ring.size):
            buffer = ring.pool.take(numel, dtype, ids.device)
            hop = HopIdentity(self._number, True, False, 0, step).pack()
            ring.shift(outgoing, buffer[:numel], Direction.CLOCKWISE, Stream.WEIGHTS, hop).wait()
            if before is not None:
                ring.pool.put(before)
            outgoing, before = buffer[:numel], buffer
            asked[(ring.rank - step) % ring.size] = self._of_own(outgoing)
        if before is not None:
            ring.pool.put(before)
        return asked

    def _of_own(self, flags: Tensor) -> Tensor:
        """The rows of the own slice whose flag is set."""
        start, stop = self._own
        if is_fake(flags):
            return self.wanted.of(self.wanted.ids, self._ring.rank).clone()
        return flags.view(torch.uint8)[start:stop].nonzero().view(-1)

    def _send(self, parts: Sequence[Tensor], targets: Sequence[Tensor], stream: Stream) -> None:
        """Send ``parts[i]`` to rank i, and fill ``targets[i]`` from rank i; both may be empty."""
        others = [rank for rank in range(self._ring.size) if rank != self._ring.rank]
        outgoing = [(rank, parts[rank]) for rank in others if parts[rank].numel()]
        incoming = [(rank, targets[rank]) for rank in others if targets[rank].numel()]
        # Hops before have compared whose rows these are. Messages cost more than rows.
        under_way = self._ring.send_among(outgoing, incoming, stream)
        targets[self._ring.rank].copy_(parts[self._ring.rank])
        under_way.wait()


def run_by_rows(rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The module's output; backward leaves an averaged gradient on the sharded parameter."""
    rule, sharded, module = rotation.rule, rotation.sharded, rotation.module
    assert isinstance(rule, RowsRule)
    (tokens,) = (*args, *kwargs.values())
    (cut,) = rotation.layout.cuts
    parameter = parameter_at(module, cut.name)
    sharded.require_here(parameter, cut.name)
    if torch.is_grad_enabled() and sharded.replica_gradients is not None:
        sharded.replica_gradients.before_training(path_of(module))
    wanted = wanted_rows(rotation.layout, tokens, rule.padding_idx)
    exchange = RowExchange(sharded.ring, rotation.layout, wanted, rotation.number)
    rows: Tensor = _Rows.apply(rotation, exchange, parameter)  # type: ignore[no-untyped-call]
    others = {
        name: cast(local_of(parameter_at(module, name)), rotation.policy.compute_dtype)
        for name in rotation.replicated
    }
    bounds = {cut.name: (0, len(rows))}
    with swapped(module, {cut.name: rows} | others), span(f"{path_of(module)} forward: of rows"):
        current = ModuleSlice(
            module, rotation.forward, {cut.name: rows}, bounds, DeferredGrads({}), 1, (cut,)
        )
        output = rule.of_rows(current, exchange.wanted.places, exchange.wanted.padding)
    return output.to(rotation.outer_dtype(()))


class _Rows(torch.autograd.Function):
    """From the parameter of which this rank has a shard to the rows of its tokens."""

    @staticmethod
    def forward(ctx: Any, rotation: Rotation, exchange: RowExchange, parameter: Tensor) -> Tensor:
        ctx.rotation, ctx.exchange, ctx.spec = rotation, exchange, spec_of(parameter)
        sharded = rotation.sharded
        ctx.version = sharded.version
        with span(f"{path_of(rotation.module)} forward: fetching rows"):
            (shard,) = sharded.views(sharded.flat)
            return exchange.fetch(shard.detach(), rotation.travelling_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[None, None, Tensor]:
        rotation, sharded = ctx.rotation, ctx.rotation.sharded
        if sharded.version != ctx.version:
            raise RotationError(
                f"parameters of {rotation.name} changed between forward and backward"
            )
        own, wanted = sharded.flat.dtype, rotation.policy.grad_dtype or sharded.flat.dtype
        if wanted.itemsize < grads.dtype.itemsize:
            grads = grads.to(wanted)
        with span(f"{path_of(rotation.module)} backward: sending gradients of rows"):
            total = sharded.flat.new_zeros(
                sharded.flat.numel(), dtype=torch.promote_types(own, wanted)
            )
            (shard,) = sharded.views(total)
            ctx.exchange.add_up(grads.contiguous(), shard)
        (grad,) = sharded.views(total.to(own))
        return None, None, grad if ctx.spec is None else with_spec(grad, ctx.spec)
