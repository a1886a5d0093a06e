"""Frozen linear layers in 8 and 4 bits: what they compute, what travels, what is refused."""

import warnings
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer import pretrained
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring import ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.mlp import MLPRule
from gyre_trainer.layers.quantized import Format, decode, encode
from gyre_trainer.rotate import linear_cross_entropy, quantize_frozen, rotate_all
from gyre_trainer.shards.layout import local_of
from torch import Tensor, nn

from tests.distributed.conftest import StartRanks
from tests.distributed.models.test_rotation_adapters import Outcome, adapted, llama, trained


def decoded(weight: Tensor, to: Format) -> Tensor:
    return decode(*encode(weight, to), weight.shape[1], to).to(weight.dtype)


def trained_on_the_ring(to: Format) -> Outcome:
    mesh, model = make_mesh("cpu"), adapted(llama(), "lora")
    rotate_all(model, mesh=mesh, find_blocks=False)
    quantize_frozen(model, to, mesh=mesh)
    return trained(deepcopy(model), dist.get_rank(), mesh.size())


@pytest.mark.parametrize(("num_ranks", "to"), [(2, "int8"), (3, "nf4")])
def test_it_trains_as_a_model_of_the_decoded_weights(
    ranks: StartRanks, num_ranks: int, to: Format
) -> None:
    alone, plain = llama(), trained(adapted(llama(), "lora"), 0, 1).losses
    for name, module in alone.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.weight.data = decoded(module.weight.detach(), to)
    expected = trained(adapted(alone, "lora"), 0, 1)
    found = ranks(num_ranks).run(trained_on_the_ring, to)
    means = [sum(of_step) / num_ranks for of_step in zip(*(o.losses for o in found), strict=True)]
    assert means == pytest.approx(expected.losses, rel=1e-6)
    assert means == pytest.approx(plain, rel={"int8": 1e-3, "nf4": 2e-2}[to])
    assert means != pytest.approx(plain, rel=1e-6)
    for outcome in found:
        for name, adapter in expected.parameters.items():
            torch.testing.assert_close(outcome.parameters[name], adapter, rtol=1e-4, atol=1e-5)


class Tower(nn.Module):
    """Two layers of 64 columns; with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.other(self.one(x))
        return output


def bytes_of_a_step(to: Format) -> tuple[int, int]:
    """Bytes at home, and sent in a forward and a backward."""
    torch.manual_seed(0)
    mesh = make_mesh("cpu")
    model = Tower().requires_grad_(False)
    rotate_all(model, mesh=mesh, find_blocks=False)
    assert quantize_frozen(model, to, mesh=mesh) == ["one", "other"]
    before = ring_of(mesh).bytes_sent
    model(torch.ones(2, 64, requires_grad=True)).sum().backward()
    storages = {local_of(each).untyped_storage()._cdata: each for each in model.parameters()}
    at_home = sum(local_of(each).untyped_storage().nbytes() for each in storages.values())
    return at_home, ring_of(mesh).bytes_sent - before


@pytest.mark.parametrize(("to", "row"), [("int8", 64 + 4 + 4), ("nf4", 32 + 4 + 4)])
def test_rows_rest_and_travel_in_that_many_bytes(ranks: StartRanks, to: Format, row: int) -> None:
    for at_home, sent in ranks(2).run(bytes_of_a_step, to):
        assert at_home == 2 * (32 * row + 16)  # and room behind it, so that a hop needs no copy
        assert sent == 2 * 2 * 32 * row  # of both layers, in forward and in backward


def refusals() -> list[str]:
    """What is said about weights that train or have no values, about the head, about files."""
    mesh, said = make_mesh("cpu"), []
    unknown: Any = "int3"

    def model(device: str = "cpu") -> Tower:
        with torch.device(device):
            built = Tower()
        rotate_all(built, mesh=mesh, find_blocks=False)
        return built

    frozen = model()
    frozen.requires_grad_(False)
    quantize_frozen(frozen, "int8", mesh=mesh, keep=["one"])
    for attempt in (
        partial(quantize_frozen, model(), "int8", mesh=mesh),
        partial(quantize_frozen, model("meta").requires_grad_(False), "nf4", mesh=mesh),
        partial(quantize_frozen, model(), unknown, mesh=mesh),
        partial(quantize_frozen, frozen, "int8", mesh=mesh, keep=["one"]),
        partial(pretrained.save_pretrained, frozen, "nowhere"),
        partial(linear_cross_entropy, frozen.other, torch.ones(2, 64), torch.ones(2).long()),
    ):
        try:
            attempt()
        except RotationError as error:
            said.append(str(error))
    return said


def test_what_cannot_be_quantized_is_refused(ranks: StartRanks) -> None:
    for said in ranks(2).run(refusals):
        trains, empty, unknown, again, saved, head = said
        assert "one.weight trains, and only frozen weights can be int8" in trains
        assert "one.weight is not finite; load or make weights" in empty
        assert "'int3' is no format of weights; known are int8, nf4" in unknown
        assert "no linear layer of" in again
        assert "other has quantized weights, which no file" in saved
        assert "the head has quantized weights" in head


def told_of_blocks() -> list[str]:
    mesh, model = make_mesh("cpu"), nn.ModuleList([Tower(), nn.Linear(64, 64)])
    rules: Any = {Tower: MLPRule(ups=("one",), down="other")}
    rotate_all(model.requires_grad_(False), mesh=mesh, sync_from=0, rules=rules)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert quantize_frozen(model, "int8", mesh=mesh) == ["1"]
    return [str(each.message) for each in seen]


def test_blocks_that_are_not_encoded_are_named(ranks: StartRanks) -> None:
    for (message,) in ranks(2).run(told_of_blocks):
        assert message.startswith("1 frozen blocks that rotate as a whole are not encoded, 0 the")
        assert "find_blocks=False" in message
