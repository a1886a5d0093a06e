"""Ranks that call different modules are told so at once; unused experts take part all the same."""

from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.identity import HopIdentity
from gyre_trainer.errors import RingError, RotationError
from gyre_trainer.rotate import ReadRule, rotate_all
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.distributed.conftest import StartRanks


class Reads(nn.Linear):
    """Reads its weight itself."""

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        return x @ self.weight


class Pair(nn.Module):
    def __init__(self, num_features: int) -> None:
        super().__init__()
        # each of 3 ranks has a shard
        self.one, self.other = nn.Linear(4, 6), nn.Linear(4, num_features)
        self.reads_one, self.reads_other = Reads(4, 4), Reads(4, 4)


def told_when_ranks_differ(num_features: int, works: str, when: str) -> str:
    torch.manual_seed(0)
    joins = works == "one work a batch"
    with patch.object(dist, "batch_isend_irecv", _as_one_work) if joins else nullcontext():
        mesh = DeviceMesh.from_group(
            dist.new_group(timeout=timedelta(seconds=60)), "cpu", mesh_dim_names=("rotate",)
        )
        pair = Pair(num_features)
        rotate_all(pair, mesh=mesh, rules={Reads: ReadRule()})
        text = _told(pair, when)
        dist.barrier()  # a rank that ends at once could be missed before the difference is seen
    return text


class _Joint:
    """One work for a whole batch, which is what NCCL returns."""

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


_BATCH = dist.batch_isend_irecv


def _as_one_work(operations: list[dist.P2POp]) -> list[_Joint]:
    return [_Joint(_BATCH(operations))]


def _told(pair: Pair, when: str) -> str:
    x, is_first = torch.ones(2, 4), dist.get_rank() == 0
    try:
        if when == "forward":
            (pair.other if is_first else pair.one)(x)
        elif when == "read":
            (pair.reads_other if is_first else pair.reads_one)(x)
        else:
            outputs = pair.one(x), pair.other(x)
            outputs[is_first].sum().backward()
    except RotationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("when", ["forward", "backward", "read"])
@pytest.mark.parametrize(
    ("num_ranks", "num_features", "works"),
    [
        (2, 6, "one work a tensor"),
        (3, 6, "one work a tensor"),
        (3, 6, "one work a batch"),
        (2, 15, "one work a tensor"),
        (3, 15, "one work a tensor"),
    ],
)
def test_ranks_that_call_different_modules_are_told_which(
    ranks: StartRanks, num_ranks: int, num_features: int, works: str, when: str
) -> None:
    told = ranks(num_ranks).run_to_the_end(told_when_ranks_differ, num_features, works, when)
    kind, when = ("reads_", "forward") if when == "read" else ("", when)
    step = f"({when}, step "  # 1, or 2 where two hops are under way
    others = [f"rank {rank} calls {kind}one {step}" for rank in range(1, num_ranks)]
    for rank, message in enumerate(told):
        assert message.startswith(f"rank {rank}: "), message
        assert f"rank 0 calls {kind}other {step}" in message
        assert any(other in message for other in others), message
        assert "weights" in message or "gradients" in message
    assert len({message.partition(": ")[2].partition(": ")[2] for message in told}) == 1


def evaluated_on_the_first_rank() -> str:
    text = ""
    mesh = DeviceMesh.from_group(
        dist.new_group(timeout=timedelta(seconds=10)), "cpu", mesh_dim_names=("rotate",)
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    rotate_all(model, mesh=mesh, min_numel=0)
    model(torch.ones(2, 4)).sum().backward()
    try:
        if dist.get_rank() == 0:
            with torch.no_grad():
                model(torch.ones(2, 4))
        model(torch.ones(2, 4)).sum().backward()
    except (RotationError, RingError) as error:
        text = str(error)
    dist.barrier()
    return text


def test_an_evaluation_on_one_rank_alone_names_the_command(ranks: StartRanks) -> None:
    for message in ranks(2).run_to_the_end(evaluated_on_the_first_rank):
        assert "call the model on all ranks, or use gyre-train eval" in message, message


@pytest.mark.parametrize("number", [0, 1, 77, 2**20 - 1])
def test_an_identity_fits_into_a_message(number: int) -> None:
    seen = set()
    for forward, gradients in ((True, False), (False, False), (False, True)):
        for round_, step in ((0, 1), (15, 1), (0, 9999)):
            hop = HopIdentity(number, forward, gradients, round_, step)
            assert HopIdentity.unpack(hop.pack()) == hop
            assert 0 < hop.pack() < 2**59
            seen.add(hop.pack())
    assert len(seen) == 9


def sparse(family: str, num_layers: int = 2) -> nn.Module:
    """A tiny model of mixed experts, in float64, of which a token takes two of eight."""
    from transformers import (  # seconds, for these tests alone
        MixtralConfig,
        MixtralForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    torch.manual_seed(0)
    common: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "use_cache": False,
    }
    make: Any = MixtralForCausalLM
    config: Any = MixtralConfig
    if family == "Mixtral":
        return make(config(**common, num_local_experts=8)).double()  # type: ignore[no-any-return]
    make, config = Qwen3MoeForCausalLM, Qwen3MoeConfig
    sizes = {"head_dim": 4, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return make(config(**common, **sizes)).double()  # type: ignore[no-any-return]


def rows(num_ranks: int) -> Tensor:
    return torch.randint(64, (num_ranks, 3), generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens).logits
    return logits.square().mean()


def trained_sparse(family: str, num_layers: int) -> dict[str, Any]:
    """Logits in evaluation, and two steps of training on three tokens of this rank."""
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("rotate",))  # type: ignore[arg-type]
    model = sparse(family, num_layers)
    rotate_all(model, mesh=mesh)
    tokens = rows(dist.get_world_size())[dist.get_rank() :][:1]
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens).logits
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    parameters = {
        name: p.full_tensor().detach() if isinstance(p, DTensor) else p.detach()
        for name, p in model.named_parameters()
    }
    return {"logits": logits, "parameters": parameters}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
@pytest.mark.parametrize("num_layers", [1, pytest.param(2, marks=pytest.mark.models)])
def test_experts_that_a_rank_does_not_use_take_part(
    ranks: StartRanks, family: str, num_ranks: int, num_layers: int
) -> None:
    model, tokens = sparse(family, num_layers), rows(num_ranks)
    with torch.no_grad():
        expected = [model.eval()(input_ids=tokens[[rank]]).logits for rank in range(num_ranks)]
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        losses = [loss_of(model, tokens[[rank]]) for rank in range(num_ranks)]
        (torch.stack(losses).mean()).backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():  # a rotated expert always has a gradient
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for rank, found in enumerate(ranks(num_ranks).run(trained_sparse, family, num_layers)):
        torch.testing.assert_close(found["logits"], expected[rank], rtol=1e-6, atol=1e-6)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                found["parameters"][name], parameter.detach(), rtol=1e-5, atol=1e-5
            )
