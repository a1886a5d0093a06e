"""Models built on `meta` get the same weights at every number of ranks.

No rank ever holds more than its own part of them.
"""

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
import torch
from gyre_trainer.accounting.counters import Counters
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.inspection.rotation_plan import plan_of
from gyre_trainer.rotate import rotate_all
from gyre_trainer.shards.initialisation import materialize
from gyre_trainer.training.gpt import GPT, GPTConfig
from torch import nn

from tests.distributed.conftest import StartRanks
from tests.distributed.training import whole_parameters

SMALL = GPTConfig(
    vocab_size=301, num_layers=2, dim=36, num_heads=6, num_kv_heads=2, hidden_dim=300, max_seq_len=8
)
LARGE = replace(
    SMALL,
    vocab_size=16411,
    dim=640,
    num_heads=20,
    num_kv_heads=4,
    hidden_dim=1500,
    tie_embeddings=True,
)


def layers_of_all_kinds() -> nn.Module:
    return nn.ModuleDict(
        {
            "embedding": nn.Embedding(301, 40, padding_idx=7),
            "encoder": nn.TransformerEncoderLayer(40, 5, 130),
            "cross": nn.MultiheadAttention(40, 4, kdim=13, vdim=11),
            "conv": nn.Conv2d(6, 10, 3, groups=2),
            "norm": nn.GroupNorm(2, 10),
        }
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT": lambda: GPT(SMALL),
    "large GPT": lambda: GPT(LARGE),
    "layers of all kinds": layers_of_all_kinds,
}


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name]()


def rotated(model: nn.Module) -> nn.Module:
    """The rotated model with its weights."""
    if isinstance(model, GPT):
        rotate_all(model, mesh=make_mesh("cpu"))
    else:
        rotate_all(model, mesh=make_mesh("cpu"))
    materialize(model, seed=3)
    return model


def digest(model: nn.Module) -> str:
    """A digest of all weights and their names."""
    found = sha256()
    for name, parameter in sorted(whole_parameters(model).items()):
        found.update(name.encode())
        found.update(parameter.contiguous().numpy().tobytes())
    return found.hexdigest()


def rotated_digest(name: str) -> str:
    return digest(rotated(on_meta(name)))


def alone_digest(name: str) -> str:
    model = on_meta(name)
    materialize(model, seed=3)
    return digest(model)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_weights_are_those_of_one_process(ranks: StartRanks, num_ranks: int) -> None:
    for name in ("GPT", "layers of all kinds"):
        assert set(ranks(num_ranks).run(rotated_digest, name)) == {alone_digest(name)}


def peak_of_construction() -> tuple[int, int]:
    """The peak of live bytes while a model is rotated and materialised, and this rank's share."""
    # torch asks fake tensors once what becomes of DTensors of these shapes
    rotated(on_meta("large GPT"))
    model = on_meta("large GPT")
    with Counters() as live:
        rotated(model)
    return live.timeline().peak_bytes, plan_of(model).num_local_bytes


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_no_rank_holds_more_than_its_part_and_a_layer(ranks: StartRanks, num_ranks: int) -> None:
    with torch.device("meta"):
        sizes = [parameter.nbytes for parameter in GPT(LARGE).parameters()]
    for peak, own in ranks(num_ranks).run(peak_of_construction):
        assert sum(sizes) / num_ranks <= own * 1.001
        assert own <= peak <= 1.05 * own + max(sizes)


def told_of_random_numbers() -> list[str]:
    model: Any = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6))
    rotate_all(model, mesh=make_mesh("cpu"))
    found = []

    def draw(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_()

    for write in (
        lambda: nn.init.kaiming_uniform_(model[0].weight),
        lambda: model.apply(draw),
    ):
        with pytest.raises(RotationError) as refused:
            write()
        found.append(str(refused.value))
    nn.init.ones_(model[0].weight)
    return found


def test_random_numbers_in_shards_are_refused(ranks: StartRanks) -> None:
    for told in ranks(2).run(told_of_random_numbers):
        assert len(told) == 2
        assert all("Call materialize(model, seed=...)" in each for each in told)
