"""Lists of experts that backward computes again: exactly, with little memory, few more bytes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.layers.recomputed_layers import RecomputedLayer
from gyre_trainer.rotate import RotationPolicy, rotate_all
from torch import Tensor, nn

from tests.distributed.comparing import apart
from tests.distributed.conftest import StartRanks
from tests.distributed.models.families import VOCABULARY
from tests.distributed.training import whole

library: Any = transformers
BLOCKS = RotationPolicy(recompute="block")
LAYERS = RotationPolicy(recompute="layer")
ALL_WAYS = {"kept": RotationPolicy(), "blocks": BLOCKS, "layers": LAYERS}
NUM_EXPERTS, NUM_LAYERS = 5, 2
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "num_hidden_layers": NUM_LAYERS,
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
# Shared experts come after the routed ones in Qwen2-MoE, GLM-4-MoE and DeepSeek. DeepSeek-V2 puts
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
Prepare = Callable[[Any, int], None]


def built(family: str, **sizes: Any) -> Any:
    """A tiny model."""
    torch.manual_seed(0)
    config = getattr(library, f"{family}Config")(**_COMMON | SIZES[family] | sizes)
    model = getattr(library, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model if family in IN_FLOAT32 else model.double()


def as_it_is(model: Any, rank: int) -> None:
    pass


def avoid(model: Any, rank: int) -> None:
    """Let tokens of even ranks choose neither the first nor the last expert."""
    for layer in model.model.layers:
        block = layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe
        block.gate.register_forward_hook(_to_others if rank % 2 == 0 else _as_they_are)


def _to_others(_router: nn.Module, _args: Any, found: Any) -> Any:
    if isinstance(found, tuple):
        chosen, weights = found
        return chosen.clamp(1, NUM_EXPERTS - 2), weights
    scores = found.clone()
    scores[..., [0, -1]] -= 1e3
    return scores


def _as_they_are(_router: nn.Module, _args: Any, found: Any) -> Any:
    return found if isinstance(found, tuple) else found.clone()


def outcome(model: Any, rows: Tensor, **options: Any) -> dict[str, Tensor]:
    output = model(input_ids=rows, labels=rows, **options)
    output.loss.backward()
    found = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": output.loss.detach(), **found}


def expected(
    family: str, prepare: Prepare, sizes: dict[str, Any], options: dict[str, Any]
) -> dict[str, Tensor]:
    """Mean loss and gradients of all ranks' parts, each in a plain model."""
    total: dict[str, Tensor] = {}
    for rank, rows in enumerate(parts()):
        model = built(family, **sizes)
        prepare(model, rank)
        torch.manual_seed(rank)
        for name, value in outcome(model, rows, **options).items():
            total[name] = total.get(name, 0) + value / dist.get_world_size()
    return total


def parts() -> tuple[Tensor, ...]:
    rows = torch.randint(1, VOCABULARY, (12, 5), generator=torch.Generator().manual_seed(1))
    return rows.chunk(dist.get_world_size())


def off(
    family: str,
    policy: RotationPolicy,
    prepare: Prepare,
    sizes: dict[str, Any],
    options: dict[str, Any],
    find_blocks: bool,
) -> tuple[float, int]:
    """How far loss and gradients of a second step are off; how many layers are computed again."""
    plain = expected(family, prepare, sizes, options)
    model, rank = built(family, **sizes), dist.get_rank()
    rotate_all(model, mesh=make_mesh("cpu"), policy=policy, find_blocks=find_blocks)
    prepare(model, rank)
    outcome(model, parts()[rank], **options)  # checks rules, and settles what is kept
    model.zero_grad()
    torch.manual_seed(rank)
    found = outcome(model, parts()[rank], **options)
    dist.all_reduce(found["loss"])
    found["loss"] /= dist.get_world_size()
    assert plain.keys() <= found.keys()
    assert not any(found[name].any() for name in found.keys() - plain.keys())  # no token's
    return (
        max(apart(found[name], plain[name]) for name in plain),
        sum(isinstance(each, RecomputedLayer) for each in model.modules()),
    )


def require_exact(
    ranks: Any,
    family: str,
    policy: RotationPolicy = LAYERS,
    prepare: Prepare = as_it_is,
    sizes: dict[str, Any] | None = None,
    find_blocks: bool = True,
    **options: Any,
) -> None:
    found = ranks.run(off, family, policy, prepare, sizes or {}, options, find_blocks)
    for distance, layers in found:
        assert distance <= (1e-4 if family in IN_FLOAT32 else 1e-6)  # routers are in float32
        all_layers = (sizes or _COMMON).get("num_hidden_layers", NUM_LAYERS)
        assert layers == (all_layers if policy.recompute == "layer" else 0)


@pytest.mark.parametrize("policy", [BLOCKS, LAYERS], ids=["blocks", "layers"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_experts_without_tokens_on_some_ranks(
    ranks: StartRanks, num_ranks: int, policy: RotationPolicy
) -> None:
    for family in ("Mixtral", "Qwen3Moe", "Glm4Moe"):
        require_exact(ranks(num_ranks), family, policy, avoid)


@pytest.mark.models
@pytest.mark.parametrize("prepare", [as_it_is, avoid])
@pytest.mark.parametrize("policy", ALL_WAYS.values(), ids=ALL_WAYS)
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_families_in_all_ways(
    ranks: StartRanks, num_ranks: int, policy: RotationPolicy, prepare: Prepare
) -> None:
    for family in SIZES:
        if family != "DeepseekV2" or prepare is as_it_is:  # it counts each expert once
            require_exact(ranks(num_ranks), family, policy, prepare)


NUM_TOKENS, WIDTH = 64, 32
