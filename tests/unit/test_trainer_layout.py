"""Where the parts of a slice lie."""

from math import prod

import pytest
import torch
from gyre_trainer.layout import Cut, Layout
from gyre_trainer.mesh import slice_bounds


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 64])
@pytest.mark.parametrize("num_slices", [1, 2, 3, 4, 8])
def test_bounds_are_those_of_torch_chunk(size: int, num_slices: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(num_slices)]
    chunks += [[]] * (num_slices - len(chunks))
    assert [list(range(*slice_bounds(size, index, num_slices))) for index in range(num_slices)] == chunks


@pytest.mark.parametrize("num_slices", [1, 2, 3, 5])
def test_the_slices_together_are_the_parameters(num_slices: int) -> None:
    layout = Layout((Cut("up", (7, 3), 0), Cut("down", (3, 7), 1), Cut("bias", (3,), 0, padded=True)), num_slices)
    whole = [torch.arange(prod(cut.shape)).view(cut.shape) for cut in layout.cuts]
    parts: list[list[torch.Tensor]] = [[] for _ in layout.cuts]
    for index in range(num_slices):
        flat = torch.empty(layout.numel(index), dtype=torch.int64)
        for cut, view, tensor, found in zip(layout.cuts, layout.views(flat, index), whole, parts, strict=True):
            start, stop = layout.bounds(cut, index)
            view.copy_(tensor.narrow(cut.dim, start, stop - start))
            found.append(view)
    for cut, tensor, found in zip(layout.cuts, whole, parts, strict=True):
        assert torch.equal(torch.cat(found, cut.dim), tensor)
    assert layout.numel(0) == max(layout.numel(index) for index in range(num_slices))


def test_a_layout_of_some_cuts_lies_without_gaps() -> None:
    layout = Layout((Cut("a", (4, 2), 0), Cut("b", (6, 2), 0), Cut("c", (2,), 0)), 2)
    assert layout.only([True, False, True]).numel(0) == 2 * 2 + 1
    assert layout.only([False, False, False]).views(torch.empty(0), 0) == []
