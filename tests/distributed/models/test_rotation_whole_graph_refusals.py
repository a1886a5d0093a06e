"""What cannot be in one graph is refused by name, before anything is compiled."""

import pytest
import torch
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.rotate import (
    ReadRule,
    RotationPolicy,
    compile_whole,
    quantize_frozen,
    rotate,
    rotate_all,
)
from torch import Tensor, nn

from tests.distributed.conftest import StartRanks

BACKEND = "aot_eager"  # needs no C++ compiler


class TiesByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.table(tokens), self.table.weight)


def refused_models() -> list[str]:
    mesh = make_mesh("cpu")
    plain, twice, sliced, few_bits = (nn.Sequential(nn.Linear(4, 4)) for _ in range(4))
    in_parts = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    attends = nn.Sequential(nn.MultiheadAttention(4, 2))
    equal = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    rotate_all(twice, mesh=mesh)
    compile_whole(twice, backend=BACKEND)
    rotate(in_parts[0], mesh=mesh)
    rotate(in_parts, mesh=mesh)
    rotate_all(attends, mesh=mesh)
    rotate_all(equal, mesh=mesh, policy=RotationPolicy(dropout="equal"))
    rotate_all(sliced, mesh=mesh, policy=RotationPolicy(compiler=BACKEND))
    rotate_all(few_bits, mesh=mesh, find_blocks=False)
    quantize_frozen(few_bits.requires_grad_(False), "int8", mesh=mesh)
    reads = nn.Sequential(nn.Bilinear(4, 4, 4))
    rotate_all(reads, mesh=mesh, rules={"0": ReadRule()})
    messages = []
    for model in (plain, twice, in_parts, attends, equal, sliced, few_bits, reads):
        with pytest.raises(RotationError) as refused:
            compile_whole(model, backend=BACKEND)
        messages.append(str(refused.value))
    ties = nn.Sequential(TiesByHand())
    rotate_all(ties, mesh=mesh)
    compile_whole(ties, backend=BACKEND)
    ties(torch.ones(2, dtype=torch.int64))  # the first call is not compiled
    with pytest.raises(RotationError) as refused:
        ties(torch.ones(2, dtype=torch.int64))
    return [*messages, str(refused.value)]


def test_what_cannot_be_in_a_graph_is_refused(ranks: StartRanks) -> None:
    for found in ranks(2).run(refused_models):
        plain, twice, in_parts, attends, equal, sliced, few_bits, reads, ties = found
        assert "is not rotated as a whole; first call rotate_all on it" in plain
        assert "is compiled as one graph already" in twice
        assert "0 was rotated by itself; rotate the model by rotate_all alone" in in_parts
        assert "0 is a MultiheadAttention that runs in a way of its own" in attends
        assert "1 is a Dropout that runs in a way of its own (EqualDropout)" in equal
        assert "0 is compiled slice by slice" in sliced
        assert "0 has weights of few bits" in few_bits
        assert "0 reads parameters that are cut" in reads
        assert "its forward reads 0.table.weight, which is cut" in ties
