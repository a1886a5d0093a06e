"""The layout of a slice's shards in its buffer."""

from itertools import pairwise
from math import prod

import pytest
import torch
from gyre_trainer.shards.layout import Cut, Layout, slice_bounds


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 64])
@pytest.mark.parametrize("num_slices", [1, 2, 3, 4, 8])
def test_bounds_are_those_of_torch_chunk(size: int, num_slices: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(num_slices)]
    chunks += [[]] * (num_slices - len(chunks))
    assert [
        list(range(*slice_bounds(size, index, num_slices))) for index in range(num_slices)
    ] == chunks


@pytest.mark.parametrize("num_slices", [1, 2, 3, 5])
def test_the_slices_together_are_the_parameters(num_slices: int) -> None:
    layout = Layout(
        (Cut("up", (7, 3), 0), Cut("down", (3, 7), 1), Cut("bias", (3,), 0, padded=True)),
        num_slices,
    )
    whole = [torch.arange(prod(cut.shape)).view(cut.shape) for cut in layout.cuts]
    parts: list[list[torch.Tensor]] = [[] for _ in layout.cuts]
    for index in range(num_slices):
        flat = torch.empty(layout.numel(index), dtype=torch.int64)
        for cut, view, tensor, found in zip(
            layout.cuts, layout.views(flat, index), whole, parts, strict=True
        ):
            start, stop = layout.bounds(cut, index)
            view.copy_(tensor.narrow(cut.dim, start, stop - start))
            found.append(view)
    for cut, tensor, found in zip(layout.cuts, whole, parts, strict=True):
        assert torch.equal(torch.cat(found, cut.dim), tensor)
    assert layout.numel(0) == max(layout.numel(index) for index in range(num_slices))


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 7])
@pytest.mark.parametrize("num_slices", [1, 2, 3, 5])
def test_the_pieces_together_are_the_slices(num_slices: int, num_rounds: int) -> None:
    slices = Layout((Cut("rows", (23, 2), 0),), num_slices)
    pieces = slices.in_rounds(num_rounds)
    numels = [pieces.numel(piece) for piece in range(num_slices * num_rounds)]
    assert max(numels) == numels[0] <= -(-slices.numel(0) // num_rounds) + 1
    for index in range(num_slices):
        of_slice = range(index, num_slices * num_rounds, num_slices)
        assert [pieces.piece(index, round_) for round_ in range(num_rounds)] == list(of_slice)
        flat = torch.arange(slices.numel(index))
        assert torch.equal(torch.cat([pieces.piece_in(flat, piece) for piece in of_slice]), flat)
        bounds = [pieces.bounds(pieces.cuts[0], piece) for piece in of_slice]
        assert (bounds[0][0], bounds[-1][1]) == slices.bounds(slices.cuts[0], index)
        assert all(stop == start for (_, stop), (start, _) in pairwise(bounds))
        assert [2 * (stop - start) for start, stop in bounds] == [
            numels[piece] for piece in of_slice
        ]


def test_a_layout_of_some_cuts_lies_without_gaps() -> None:
    layout = Layout((Cut("a", (4, 2), 0), Cut("b", (6, 2), 0), Cut("c", (2,), 0)), 2)
    assert layout.only([True, False, True]).numel(0) == 2 * 2 + 1
    assert layout.only([False, False, False]).views(torch.empty(0), 0) == []


def test_the_layout_of_some_cuts_is_made_once() -> None:
    layout = Layout((Cut("up", (7, 3), 0), Cut("down", (3, 7), 1)), 2)
    assert layout.only([True, True]) is layout
    down = layout.only([False, True])
    assert down is layout.only([False, True])
    assert down == Layout((layout.cuts[1],), 2)
    assert layout.only([True, False]) == Layout((layout.cuts[0],), 2)


def test_the_bounds_of_a_piece_are_found_by_name() -> None:
    layout = Layout((Cut("up", (7, 3), 0), Cut("down", (3, 7), 1)), 2)
    assert layout.bounds_in == [
        {"up": (0, 4), "down": (0, 4)},
        {"up": (4, 7), "down": (4, 7)},
    ]


def test_shards_are_found_in_a_buffer_that_does_not_begin_its_memory() -> None:
    layout = Layout((Cut("up", (2, 3), 0), Cut("down", (3, 2), 1)), 1)
    up, down = layout.views(torch.arange(20)[4:16], 0)
    assert up.tolist() == [[4, 5, 6], [7, 8, 9]]
    assert down.tolist() == [[10, 11], [12, 13], [14, 15]]
