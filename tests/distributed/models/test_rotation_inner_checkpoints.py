"""A library's own checkpoint around each layer of a model that rotates."""

import warnings

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.rotate import RotationPolicy, rotate_all
from torch import Tensor, nn

from tests.distributed.comparing import apart
from tests.distributed.conftest import StartRanks
from tests.distributed.models.families import VOCABULARY, made
from tests.distributed.training import whole

POLICIES = {
    "plain": RotationPolicy(),
    "layers": RotationPolicy(recompute="layer"),
}


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def layers(family: str, reentrant: bool, policy: RotationPolicy) -> float:
    """How far the library's own checkpoint around each layer is from one process without any."""
    warnings.simplefilter("ignore")
    mesh, found = make_mesh("cpu"), []
    rows = torch.randint(1, VOCABULARY, (12, 5), generator=torch.Generator().manual_seed(1))
    sizes = {{"GPT2": "n_layer", "T5": "num_layers"}.get(family, "num_hidden_layers"): 2}
    for rotates in (False, True):
        model = made(family, **sizes).train()
        mine = rows
        if rotates:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            rotate_all(model, mesh=mesh, policy=policy)
            mine = rows.chunk(mesh.size())[dist.get_rank()]
        for _ in range(2):
            model.zero_grad()
            model(input_ids=mine, labels=mine).loss.backward()
        found.append(grads_of(model))
    assert found[0].keys() == found[1].keys()
    return max(apart(found[1][name], found[0][name]) for name in found[0])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("policy", ["plain", pytest.param("layers", marks=pytest.mark.models)])
@pytest.mark.parametrize(
    "family",
    ["Bert", *(pytest.param(each, marks=pytest.mark.models) for each in ("Llama", "GPT2", "T5"))],
)
def test_the_librarys_checkpoint_around_layers_is_exact(
    ranks: StartRanks, family: str, policy: str, reentrant: bool
) -> None:
    for off in ranks(2).run(layers, family, reentrant, POLICIES[policy]):
        assert off <= 1e-6  # some norms compute in float32
