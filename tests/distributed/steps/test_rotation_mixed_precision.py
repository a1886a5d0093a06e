"""Half precision between modules too, float32 at home, and steps of float16 that all ranks skip."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.rotate import RotationPolicy, rotate_all
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.distributed.conftest import StartRanks
from tests.distributed.training import whole_parameters

NUM_STEPS, BATCH = 12, 8


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds, for these tests alone

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    make: Any = LlamaForCausalLM
    config: Any = LlamaConfig
    return make(config(**sizes, **heads, num_hidden_layers=2, use_cache=False))


def batch(step: int) -> Tensor:
    return torch.randint(64, (BATCH, 12), generator=torch.Generator().manual_seed(step))


def train(model: Any, num_parts: int = 1, part: int = 0, *, autocast: bool = False) -> list[float]:
    """The losses of some steps on one part of each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for step in range(NUM_STEPS):
        tokens = batch(step).chunk(num_parts)[part]
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def trained(policy: RotationPolicy) -> tuple[list[float], set[torch.dtype], set[torch.dtype]]:
    """Losses of all ranks' parts; dtypes between blocks; dtypes of parameters and gradients."""
    model = llama()
    rotate_all(model, mesh=make_mesh("cpu"), policy=policy)
    between: set[torch.dtype] = set()
    for name, module in model.model.named_modules():
        if name.endswith(("embed_tokens", "mlp", "self_attn", "norm", "layers.0", "layers.1")):
            module.register_forward_hook(lambda _module, _args, output: _note(between, output))
    losses = torch.tensor(train(model, dist.get_world_size(), dist.get_rank()))
    dist.all_reduce(losses)
    model(input_ids=batch(0), labels=batch(0)).loss.backward()
    at_home = {each.dtype for p in model.parameters() for each in (p, p.grad)}
    return (losses / dist.get_world_size()).tolist(), between, at_home


def _note(dtypes: set[torch.dtype], output: Any) -> None:
    dtypes.add((output if isinstance(output, Tensor) else output[0]).dtype)


@pytest.mark.parametrize("recompute", [False, True])
def test_losses_in_bfloat16_are_as_near_to_float32_as_autocasts(
    ranks: StartRanks, recompute: bool
) -> None:
    exact, rounded = train(llama()), train(llama(), autocast=True)
    policy = RotationPolicy(
        compute_dtype=torch.bfloat16, recompute="block" if recompute else "none"
    )
    for found, between, at_home in ranks(2).run(trained, policy):
        assert between == {torch.bfloat16}
        assert at_home == {torch.float32}
        assert _apart(found, exact) <= 1.5 * _apart(rounded, exact)


def _apart(one: list[float], other: list[float]) -> float:
    return float((torch.tensor(one) - torch.tensor(other)).square().mean().sqrt())


def scaled_steps() -> tuple[list[float], list[bool]]:
    """The scale after each of three steps, and whether this rank's parameters changed in each.

    In the second step one shard of one rank has an infinite gradient. The first parameter of the
    optimizer is a norm's, which is replicated.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 4))
    rotate_all(model, mesh=make_mesh("cpu"), policy=RotationPolicy(compute_dtype=torch.float16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    scales, changed = [], []
    for step in range(3):
        before = whole_parameters(model)
        output = model(torch.randn(5, 8))
        assert output.dtype == torch.float16
        scaler.scale(output.float().square().mean()).backward()
        if step == 1 and dist.get_rank() == 1:
            grad = model[3].weight.grad
            assert isinstance(grad, DTensor)
            grad.to_local()[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        after = whole_parameters(model)
        changed.append(any(not torch.equal(before[name], after[name]) for name in after))
    assert all(bool(each.isfinite().all()) for each in whole_parameters(model).values())
    return scales, changed


def test_a_step_of_float16_whose_gradients_overflow_is_skipped_on_every_rank(
    ranks: StartRanks,
) -> None:
    for found in ranks(2).run(scaled_steps):
        assert found == ([1024.0, 512.0, 512.0], [True, False, True])
