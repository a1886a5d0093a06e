"""Rows of packed parameters, on their way from where they rest to the slices that they are in.

[Note: Packed parameters]

A packed parameter has the rows of several layers, one section after the other: queries, keys and
values, or gate and up. A slice that computes by itself needs the same part of every section. Rank
r's shard is one range of rows, because every reader of a DTensor, of an optimizer's state and of a
checkpoint takes it for that. So where a module has a packed parameter, its slices travel in another
form than its shards rest in. Before a pass, ranks send each other the rows that the other's slice
needs, and the slices go round the ring. After backward, the gradient's rows go the same way back.

Slices of query heads may need the same key/value head (`Cut.of_slices`). Then its rows are sent to
each of these slices, and what comes back is added up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gyre_trainer.comm.identity import HopIdentity
from gyre_trainer.comm.ring import Direction, Ring
from gyre_trainer.comm.transport import Stream
from gyre_trainer.shards.layout import Layout


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one parameter that lie together on a rank and in a slice; or columns, as it is cut.

    Attributes:
        position: the parameter's index among the cuts.
        dim: the dim that is cut.
        resting: the first row in the rank's shard.
        travelling: the first row in the slice.
        count: how many there are.
    """

    position: int
    dim: int
    resting: int
    travelling: int
    count: int


@lru_cache(maxsize=4096)
def _rows(layout: Layout, rank: int, index: int) -> tuple[_Rows, ...]:
    """What slice ``index`` has of the shards of ``rank``."""
    found = []
    for position, cut in enumerate(layout.cuts):
        first, last = layout.at_rest.bounds(cut, rank)
        offset = 0
        for start, stop in layout.ranges(cut, index):
            begin, end = max(start, first), min(stop, last)
            if begin < end:
                travelling = offset + begin - start
                found.append(_Rows(position, cut.dim, begin - first, travelling, end - begin))
            offset += stop - start
    return tuple(found)


def to_slice(
    layout: Layout, ring: Ring, resting: Tensor, travelling: Tensor, hop: HopIdentity
) -> None:
    """Fill ``travelling``, flat, with the own slice, of the shards ``resting`` of all ranks.

    Raises:
        RingError: a rank is gone or too late.
        RotationError: another rank calls another module.
    """
    shards = layout.at_rest.views(resting, ring.rank)
    parts = layout.views(travelling, ring.rank)
    _move(
        [_resting(shards, _rows(layout, ring.rank, other)) for other in range(ring.size)],
        [_travelling(parts, _rows(layout, other, ring.rank)) for other in range(ring.size)],
        ring,
        Stream.WEIGHTS,
        hop,
    )


def meet(ring: Ring, like: Tensor, hop: HopIdentity) -> None:
    """Return when both neighbours begin the same pass; one number in the dtype of ``like`` travels.

    Neighbours may share memory, while rows go through the process group. Without this, a rank that
    calls another module would wait there, and this one here, until the timeout.

    Raises:
        RingError: a neighbour is gone or too late.
        RotationError: a neighbour calls another module.
    """
    buffer = ring.pool.take(1, like.dtype, like.device)
    try:
        number, arrives = like.new_zeros(1), buffer[:1]
        ring.shift(number, arrives, Direction.CLOCKWISE, Stream.WEIGHTS, hop.pack()).wait()
    finally:
        ring.pool.put(buffer)


def to_shards(layout: Layout, ring: Ring, gradient: Tensor, hop: HopIdentity) -> Tensor:
    """The gradient of the own shards, flat, of every rank's ``gradient`` of its own slice.

    Raises:
        RingError: a rank is gone or too late.
        RotationError: another rank calls another module.
    """
    numel, adds = layout.at_rest.numel(ring.rank), layout.has_shared_rows
    found = gradient.new_zeros(numel) if adds else gradient.new_empty(numel)
    shards = layout.at_rest.views(found, ring.rank)
    parts = layout.views(gradient, ring.rank)
    _move(
        [_travelling(parts, _rows(layout, other, ring.rank)) for other in range(ring.size)],
        [_resting(shards, _rows(layout, ring.rank, other)) for other in range(ring.size)],
        ring,
        Stream.GRADIENTS,
        hop,
        adds=adds,
    )
    return found


def _resting(shards: Sequence[Tensor], rows: Sequence[_Rows]) -> list[Tensor]:
    return [shards[each.position].narrow(each.dim, each.resting, each.count) for each in rows]


def _travelling(parts: Sequence[Tensor], rows: Sequence[_Rows]) -> list[Tensor]:
    return [parts[each.position].narrow(each.dim, each.travelling, each.count) for each in rows]


def _move(
    sources: Sequence[Sequence[Tensor]],
    targets: Sequence[Sequence[Tensor]],
    ring: Ring,
    stream: Stream,
    hop: HopIdentity,
    *,
    adds: bool = False,
) -> None:
    """Send the views ``sources[i]`` to rank i, and fill ``targets[i]`` with those of rank i.

    Rows are sent from where they lie, and arrive where they belong; columns take a copy. Where
    targets of several ranks are the same rows, what arrives ``adds`` up, from copies, too.
    """
    others = [rank for rank in range(ring.size) if rank != ring.rank]
    outgoing = [(rank, view.contiguous()) for rank in others for view in sources[rank]]
    views = [(rank, view) for rank in others for view in targets[rank]]
    incoming = [
        (rank, view if view.is_contiguous() and not adds else torch.empty_like(view).contiguous())
        for rank, view in views
    ]
    under_way = ring.send_among(outgoing, incoming, stream, hop.pack())
    for source, target in zip(sources[ring.rank], targets[ring.rank], strict=True):
        _put(target, source, adds=adds)
    under_way.wait()
    for (_, view), (_, arrived) in zip(views, incoming, strict=True):
        if arrived is not view:
            _put(view, arrived, adds=adds)


def _put(target: Tensor, source: Tensor, *, adds: bool) -> None:
    target.add_(source) if adds else target.copy_(source)
