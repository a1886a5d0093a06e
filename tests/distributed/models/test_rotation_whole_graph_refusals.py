"""What cannot be in one graph is refused by name, before anything is compiled."""

from copy import deepcopy

import pytest
import torch
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.rotate import (
    RotationPolicy,
    compile_whole,
    quantize_frozen,
    rotate,
    rotate_all,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.conftest import StartRanks
from tests.distributed.models.test_rotation_whole_graph import begin

BACKEND = "aot_eager"  # needs no C++ compiler


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
    rotate_all(attends, mesh=mesh, policy=RotationPolicy(dropout="equal"))
    rotate_all(equal, mesh=mesh, policy=RotationPolicy(dropout="equal"))
    rotate_all(sliced, mesh=mesh, policy=RotationPolicy(compiler=BACKEND))
    rotate_all(few_bits, mesh=mesh, find_blocks=False)
    quantize_frozen(few_bits.requires_grad_(False), "int8", mesh=mesh)
    messages = []
    for model in (plain, twice, in_parts, attends, equal, sliced, few_bits):
        with pytest.raises(RotationError) as refused:
            compile_whole(model, backend=BACKEND)
        messages.append(str(refused.value))
    return messages


def test_what_cannot_be_in_a_graph_is_refused(ranks: StartRanks) -> None:
    for found in ranks(2).run(refused_models):
        plain, twice, in_parts, attends, equal, sliced, few_bits = found
        assert "is not rotated as a whole; first call rotate_all on it" in plain
        assert "is compiled as one graph already" in twice
        assert "0 was rotated by itself; rotate the model by rotate_all alone" in in_parts
        assert "0 draws equal dropout masks" in attends
        assert "1 is a Dropout that rotation runs by EqualDropout" in equal
        assert "0 is compiled slice by slice" in sliced
        assert "0 has weights of few bits" in few_bits


class Checkpoints(nn.Module):
    """Calls a layer that rotates, or a function, inside of a checkpoint."""

    def __init__(self, *, rotates: bool) -> None:
        super().__init__()
        self.layer, self.norm, self.rotates = nn.Linear(4, 4), nn.LayerNorm(4), rotates

    def forward(self, x: Tensor) -> Tensor:
        if self.rotates:
            return self.norm(checkpoint(self.layer, x, use_reentrant=False))  # type: ignore[no-any-return]
        return self.layer(checkpoint(torch.sin, self.norm(x), use_reentrant=False))  # type: ignore[no-any-return]


def told_of_checkpoints() -> list[str]:
    """What the second call in each mode ends in; a checkpoint of what does not rotate is exact."""
    begin()
    told = []
    for rotates in (True, False):
        torch.manual_seed(0)
        model = Checkpoints(rotates=rotates)
        rotate_all(model, mesh=make_mesh("cpu"))
        plain = deepcopy(model)
        compile_whole(model, backend=BACKEND)
        x = torch.randn(2, 4, requires_grad=True)
        for training in (True, False):
            model.train(training)(x)
            try:
                (grad,) = torch.autograd.grad(model(x).sin().sum(), x)
            except RotationError as error:
                told.append(str(error))
            else:
                (expected,) = torch.autograd.grad(plain(x).sin().sum(), x)
                told.append("exact" if torch.allclose(grad, expected) else "off")
    return told


def test_a_checkpoint_around_what_rotates_is_refused_by_name(ranks: StartRanks) -> None:
    for *refused, once, again in ranks(2).run(told_of_checkpoints):
        for text in refused:
            assert "Checkpoints cannot be called as one graph: layer is called inside of" in text
            assert "take RotationPolicy(recompute=True) in place of the checkpoint" in text
        assert len(refused) == 2
        assert (once, again) == ("exact", "exact")
