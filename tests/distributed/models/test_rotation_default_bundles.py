"""By default small modules travel in bundles: what is done with a model is exact there, too.

Other tests of `models` run slice by slice; `make test-models` runs them in bundles once more.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer import pretrained
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.rotate import RotationPolicy, rotate_all
from gyre_trainer.rotation.rotated_module import RotatedModule
from torch import Tensor

from tests.distributed.comparing import apart
from tests.distributed.conftest import StartRanks
from tests.distributed.gloo_ranks import bundled_by_default
from tests.distributed.models import test_rotation_adapters as lora
from tests.distributed.models import test_rotation_caches as caches
from tests.distributed.models.families import VOCABULARY, made
from tests.distributed.models.test_rotation_compiled import begin
from tests.distributed.training import whole_parameters

BACKEND = "aot_eager"
NUM_STEPS = 2
# Three tokens, each with two experts: on every rank some of the eight have none.
EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 8},
    "Qwen3Moe": {"num_experts": 8},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"num_hidden_layers": 2},
    "GPT2": {},
    "T5": {},
    "Mamba": {},
    "GptOss": {},
    **EXPERTS,
}


def rotated(model: Any, policy: RotationPolicy | None = None) -> Any:
    rotate_all(model, mesh=make_mesh("cpu"), policy=policy or RotationPolicy())
    in_bundles = [each for each in model.modules() if isinstance(each, RotatedModule)]
    assert any(each.bundle for each in in_bundles)
    return model


def rows_of(step: int) -> Tensor:
    """Three tokens for each rank."""
    seeded = torch.Generator().manual_seed(step)
    return torch.randint(1, VOCABULARY, (dist.get_world_size(), 3), generator=seeded)


def mine(rows: Tensor) -> Tensor:
    return rows[dist.get_rank() :][:1]


def trained(model: Any, part: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The parameters after steps with the model's own loss, and logits in evaluation."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(NUM_STEPS):
        rows = part(rows_of(step))
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    rows = rows_of(0)
    with torch.no_grad():
        outputs = model.eval()(input_ids=part(rows), labels=part(rows))
    logits = outputs.logits if len(outputs.logits) == 1 else mine(outputs.logits)
    return {"logits": logits} | whole_parameters(model)


def off(model: Any, plain: Any) -> float:
    """How far a model that was trained on this rank's rows is from one of all rows."""
    expected, found = trained(plain, lambda rows: rows), trained(model, mine)
    assert expected.keys() == found.keys()
    return max(apart(found[name], expected[name]) for name in expected)


def off_with_adapters() -> float:
    plain = lora.trained(lora.adapted(lora.llama(), "lora"), 0, 1)[1]
    model = rotated(lora.adapted(lora.llama(), "lora"))
    found = lora.trained(model, dist.get_rank(), dist.get_world_size())[1]
    assert found.keys() == plain.keys()
    return max(apart(found[name], plain[name]) for name in plain)


def off_after_files(folder: Path) -> float:
    """How far a Llama is that was read from files, written to others, and read from these."""
    plain = made("Llama", num_hidden_layers=2).float()
    if dist.get_rank() == 0:
        plain.save_pretrained(folder / "source")
    dist.barrier()
    with torch.device("meta"):
        model = rotated(type(plain)(plain.config))
    pretrained.load(model, folder / "source")
    pretrained.save_pretrained(model, folder / "written")
    again = type(plain).from_pretrained(folder / "written")
    same = whole_parameters(plain)
    for each in (model, again):
        found = whole_parameters(each)
        assert all(torch.equal(found[name], same[name]) for name in same)
    with torch.no_grad():
        logits = [each.eval()(input_ids=rows_of(1)).logits for each in (model, plain)]
    return apart(*logits)


def off_in_all_that_is_done(folder: Path) -> dict[str, float]:
    """By what was done: how far it is from one process."""
    found = {
        family: off(rotated(made(family, **sizes)), made(family, **sizes))
        for family, sizes in FAMILIES.items()
    }
    found["adapters"] = off_with_adapters()
    found["files"] = off_after_files(folder)
    for text in caches.other_texts(["Llama"], ["the likeliest", "sampled"]):
        found[text] = 1.0
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_is_done_with_models_is_exact_in_bundles(
    ranks: StartRanks, num_ranks: int, tmp_path: Path
) -> None:
    for found in ranks(num_ranks).run(bundled_by_default, off_in_all_that_is_done, tmp_path):
        # the library computes losses, and norms in places, in float32
        assert {name: value for name, value in found.items() if not value <= 1e-5} == {}


def off_compiled() -> dict[str, float]:
    """By what is compiled: how far training and logits are from one process without a compiler."""
    slices = RotationPolicy(compiler=BACKEND)
    ways: dict[str, tuple[RotationPolicy | None, Callable[[Any], Any]]] = {
        "slices": (slices, lambda model: None),
        "the model": (None, lambda model: model.compile(backend=BACKEND)),
    }
    found = {}
    for name, (policy, compile_model) in ways.items():
        begin()
        model = rotated(made("Llama"), policy)
        compile_model(model)
        found[name] = off(model, made("Llama"))
    return found


@pytest.mark.models
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_is_compiled_is_exact_in_bundles(ranks: StartRanks, num_ranks: int) -> None:
    for found in ranks(num_ranks).run(bundled_by_default, off_compiled):
        assert {name: value for name, value in found.items() if not value <= 1e-5} == {}
