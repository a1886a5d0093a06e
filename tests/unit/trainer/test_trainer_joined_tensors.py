"""Tensors that consist of parts of others: what operators note, read and written by parts."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from gyre_trainer.shards.stored_weights import Joined, Piece
from torch import Tensor

Join = Callable[[Sequence[Tensor]], Tensor]

# As transformers joins and cuts tensors between files and models, and more than it does.
JOINS: dict[str, Join] = {
    "nothing": lambda t: t[0],
    "experts in one tensor": lambda t: torch.stack(list(t)),
    "gates and ups of all experts": lambda t: torch.cat(
        [torch.stack([t[0], t[2]]), torch.stack([t[1], t[3]])], dim=1
    ),
    "stacked inside": lambda t: torch.stack(list(t), dim=-1),
    "transposed": lambda t: t[0].transpose(0, 1).contiguous(),
    "transposed experts": lambda t: torch.stack(list(t)).transpose(1, -1),
    "chunks": lambda t: torch.cat([t[0], t[1]]).chunk(3)[1],
    "chunks of experts": lambda t: torch.stack(list(t)).chunk(4)[2].squeeze(0),
    "all ones squeezed": lambda t: torch.stack([t[0][:1], t[1][:1]]).squeeze(),
    "split": lambda t: torch.split(torch.cat(list(t)), [5, 2, 9], dim=0)[2],
    "slices": lambda t: torch.cat([t[0][1:, 2:], t[1][:3, -1:]], dim=1)[:, 1],
    "permuted": lambda t: torch.stack(list(t)).permute(2, 0, 1).unsqueeze(1),
    "T": lambda t: t[3].T,
}


def made() -> list[Tensor]:
    """Four tensors of unequal values."""
    return [torch.arange(20.0).reshape(4, 5) + 100 * place for place in range(4)]


def values_of(piece: Piece[Tensor]) -> Tensor:
    box = piece.source[tuple(slice(*each) for each in piece.source_ranges)]
    return piece.of_source(box)


def put(pieces: Sequence[Piece[Tensor]], shape: Sequence[int]) -> Tensor:
    """The tensor that consists of these pieces; NaN where there is none."""
    whole = torch.full(tuple(shape), torch.nan)
    for piece in pieces:
        whole[tuple(slice(*each) for each in piece.ranges)] = values_of(piece)
    return whole


@pytest.mark.parametrize("name", JOINS)
def test_pieces_are_where_the_values_are(name: str) -> None:
    tensors = made()
    expected = JOINS[name](tensors)
    found = JOINS[name]([Joined.whole(each, each.shape, each.dtype) for each in tensors])
    assert isinstance(found, Joined)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(put(found.pieces, found.shape), expected)
    for dim, size in enumerate(expected.shape):  # each rank reads its part
        for start, stop in pairwise((0, size // 3, size)):
            ranges = [(0, each) for each in expected.shape]
            ranges[dim] = start, stop
            cuts = [cut for each in found.pieces if (cut := each.within(ranges))]
            part = expected.narrow(dim, start, stop - start)
            assert torch.equal(put(cuts, part.shape), part)


@pytest.mark.parametrize("name", JOINS)
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_sources_are_written_once_each(name: str, dim: int) -> None:
    """Ranks have parts of the sources, and write those parts of the whole that they have."""
    tensors = made()
    expected = JOINS[name](tensors)
    found = JOINS[name]([Joined.whole(each, each.shape, each.dtype) for each in tensors])
    assert isinstance(found, Joined)
    cuts = []
    for bounds in pairwise((0, 2, 3, tensors[0].shape[dim])):
        ranges = [(0, size) for size in tensors[0].shape]
        ranges[dim] = bounds
        cuts += [cut for each in found.pieces if (cut := each.of_sources(ranges))]
    assert torch.equal(put(cuts, expected.shape), expected)
    assert sum(values_of(cut).numel() for cut in cuts) == expected.numel()


@pytest.mark.parametrize(
    "compute",
    [
        lambda t: t + 1,
        lambda t: t.reshape(-1),
        lambda t: t[::2],
        lambda t: torch.cat([t, t.T]),
        lambda t: t.float().tolist(),
    ],
)
def test_what_needs_values_is_refused(compute: Callable[[Tensor], object]) -> None:
    tensor = Joined.whole(torch.ones(4, 5), (4, 5), torch.float32)
    with pytest.raises((TypeError, RuntimeError)):
        compute(tensor)
