"""Lists of experts that backward computes again: exactly, with little memory, no more bytes."""

import gc
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from gyre_trainer.accounting.live_bytes import Category, LiveBytes
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring_registry import ring_of
from gyre_trainer.rotate import RotationPolicy, plan_of, rotate_all
from torch import Tensor, nn

from tests.distributed.comparing import apart
from tests.distributed.conftest import StartEither, StartRanks
from tests.distributed.models.families import VOCABULARY, made
from tests.distributed.training import whole

library: Any = transformers
WAYS = {
    "kept": RotationPolicy(),
    "blocks": RotationPolicy(recompute=True),
    "layers": RotationPolicy(recompute=True, recompute_layers=True),
}
NUM_EXPERTS, LAST = 5, 4
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts_per_tok": 2,
    "num_experts": NUM_EXPERTS,
    "num_local_experts": NUM_EXPERTS,
    "n_routed_experts": NUM_EXPERTS,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "use_cache": False,
    "pad_token_id": 0,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
}
# Shared experts come after the routed ones in Qwen2-MoE, GLM-4-MoE and DeepSeek; DeepSeek-V2 puts
# what experts returned side by side before it weighs them.
SIZES: dict[str, dict[str, Any]] = {
    "Mixtral": {},
    "Qwen3Moe": {},
    "Qwen2Moe": {"shared_expert_intermediate_size": 12},
    "Glm4Moe": {},
    "DeepseekV2": _LATENT | {"topk_method": "greedy"},
    "DeepseekV3": _LATENT,
}
IN_FLOAT32 = ("Glm4Moe", "DeepseekV3")  # the library's code mixes dtypes otherwise


def built(family: str, **sizes: Any) -> Any:
    """A tiny model."""
    torch.manual_seed(0)
    config = getattr(library, f"{family}Config")(**_COMMON | SIZES[family] | sizes)
    model = getattr(library, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model if family in IN_FLOAT32 else model.double()


class _Avoid:
    """A hook: the router gives some experts low scores."""

    def __init__(self, experts: list[int]) -> None:
        self._experts = experts

    def __call__(self, _router: nn.Module, _args: Any, scores: Any) -> Any:
        lowered = scores.clone()
        lowered[..., self._experts] -= 1e3
        return lowered


def outcome(model: Any, rows: Tensor, **options: Any) -> dict[str, Tensor]:
    output = model(input_ids=rows, labels=rows, **options)
    output.loss.backward()
    found = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": output.loss.detach(), **found}


def batch(num_rows: int = 12) -> Tensor:
    return torch.randint(1, VOCABULARY, (num_rows, 5), generator=torch.Generator().manual_seed(1))


def off(family: str, policy: RotationPolicy, sizes: dict[str, Any]) -> tuple[float, int]:
    """How far loss and gradients of a second step are from one process's; number of layers that
    are computed again."""
    mesh = make_mesh("cpu")
    rows = batch()
    expected = outcome(built(family, **sizes), rows)
    model = built(family, **sizes)
    rotate_all(model, mesh=mesh, policy=policy)
    part = rows.chunk(mesh.size())[dist.get_rank()]
    outcome(model, part)  # verified, and settled what is kept
    model.zero_grad()
    found = outcome(model, part)
    dist.all_reduce(found["loss"])
    found["loss"] /= mesh.size()
    assert found.keys() == expected.keys()
    return max(apart(found[n], expected[n]) for n in expected), len(plan_of(model).recomputed)


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_steps_are_exact(
    ranks_both_ways: StartEither, num_ranks: int, way: str, family: str
) -> None:
    for distance, layers in ranks_both_ways(num_ranks).run(off, family, WAYS[way], {}):
        assert distance <= (1e-4 if family in IN_FLOAT32 else 1e-6)  # routers compute in float32
        assert way != "layers" or layers == 2
