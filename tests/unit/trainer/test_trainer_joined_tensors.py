"""Tensors that consist of parts of others: what operators note, read and written by parts."""

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from gyre_trainer.shards.stored_weights import Joined, Target, _write, box_of
from gyre_trainer.shards.tensor_files import layout_of
from safetensors.torch import load_file
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


def joined(tensors: Sequence[Tensor], name: str) -> Joined:
    found = JOINS[name]([Joined.whole(each, each.shape, each.dtype) for each in tensors])
    assert isinstance(found, Joined)
    return found


def put(found: Joined) -> Tensor:
    """The tensor that consists of boxes of its sources; NaN where there is none."""
    whole = torch.full(tuple(found.shape), torch.nan)
    for source, ranges, place in found.sources(whole):
        place.copy_(box_of(source, ranges))
    return whole


@pytest.mark.parametrize("name", JOINS)
def test_sources_are_where_the_values_are(name: str) -> None:
    tensors = made()
    expected, found = JOINS[name](tensors), joined(tensors, name)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(put(found), expected)
    for dim, size in enumerate(expected.shape):  # each rank reads its part
        for bounds in pairwise((0, size // 3, size)):
            ranges = [(0, each) for each in expected.shape]
            ranges[dim] = bounds
            assert torch.equal(put(found.box(ranges)), box_of(expected, ranges))


@pytest.mark.parametrize("name", JOINS)
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_sources_are_written_once_each(tmp_path: Path, name: str, dim: int) -> None:
    """Ranks have parts of the sources, and write those parts of the whole that they have."""
    tensors, written = made(), list[int]()
    expected = JOINS[name](tensors)
    sizes = tuple(expected.shape)
    header, places = layout_of(tmp_path / "file", [("x", sizes, torch.float32)])
    (tmp_path / "file").write_bytes(header + bytes([255]) * expected.nbytes)

    of_system = os.pwritev

    def write(fd: int, buffers: list[memoryview], offset: int) -> int:
        written.append(of_system(fd, buffers, offset))
        return written[-1]

    for start, stop in pairwise((0, 2, 3, tensors[0].shape[dim])):
        targets = []
        for each in tensors:
            ranges = [(0, size) for size in each.shape]
            ranges[dim] = start, stop
            targets.append(Target(("x",), each, box_of(each, ranges), tuple(ranges), True))
        found = JOINS[name]([Joined.whole(t, t.whole.shape, t.whole.dtype) for t in targets])
        assert isinstance(found, Joined)
        with patch.object(os, "pwritev", write):
            _write(tmp_path / "file", {"x": found}, places)
    assert sum(written) == expected.nbytes
    assert torch.equal(load_file(tmp_path / "file")["x"], expected)


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
