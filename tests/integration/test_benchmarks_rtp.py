"""The benchmarks of rotation that want a GPU, at toy size on a CPU: they run, and every row has its figures."""

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.model import GPTConfig

from benchmarks.rtp import gpu
from benchmarks.rtp.gpu import cross_entropy_table, slices_table

CPU = torch.device("cpu")
BLOCK = GPTConfig(64, 1, 32, 4, 4, 64, 16, norm="layer")


@pytest.fixture(autouse=True)
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_NUM_ROUNDS", 1)


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_slices_stand_beside_the_unsliced_block() -> None:
    heading, _, *rows = map(cells, slices_table(BLOCK, [32], (2, 4), CPU))
    assert [row[:2] for row in rows] == [["32", "2"], ["32", "4"]]
    assert all(len(row) == len(heading) for row in rows)
    assert all(float(row[2]) > 0 and float(row[3]) > 0 and row[4].endswith("%") for row in rows)
    assert not dist.is_initialized()


def test_the_rotated_head_stands_beside_chunks_and_all_logits() -> None:
    heading, _, *rows = map(cells, cross_entropy_table(16, 96, 32, 4, CPU))
    assert [row[0] for row in rows] == ["all logits", "chunked", "rotated, 4 ranks"]
    assert all(len(row) == len(heading) and float(row[2]) > 0 for row in rows)
    assert float(rows[1][2]) == 1
