"""Experts that no rule fits are cut, and whole where their forward reads them: exact."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.rotate import ReadRule, rotate_all
from torch import Tensor, nn

from tests.distributed.comparing import apart
from tests.distributed.conftest import StartRanks
from tests.distributed.training import whole

SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
    "pad_token_id": 0,
}
TOY = {"hidden_size": 16, "intermediate_size": 20}
# Experts of more than a million parameters; nothing is computed with them.
WIDE = {"hidden_size": 128, "intermediate_size": 1024}
# Why no rule is found, in this order: experts are counted by an attribute, are given their tokens
# sorted, or have their weights in modules of their own (twice).
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe_text": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
    },
    "llama4_text": {
        "num_local_experts": 4,
        "head_dim": 4,
        "intermediate_size_mlp": 20,
        "interleave_moe_layer_step": 1,
        "attn_implementation": "eager",
    },
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "jetmoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 4},
}


def made(family: str, sizes: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModel  # seconds, for these tests alone

    library: Any = AutoModel
    own = dict(FAMILIES[family])
    if family.startswith("qwen3"):
        own["moe_intermediate_size"] = sizes["intermediate_size"]
    model = library.from_config(AutoConfig.for_model(family, **SIZES, **sizes, **own))
    return model.to(torch.float64)


def outcome(model: Any, rows: Tensor) -> tuple[float, dict[str, Tensor]]:
    """The loss, and the gradients of all parameters that have one."""
    features = model(input_ids=rows).last_hidden_state
    different = torch.arange(features[0].numel()).cos().view_as(features[0])
    loss = (features * different).mean()
    loss.backward()
    grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), grads


def toy(family: str) -> Any:
    model = made(family, TOY)
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def rotated(family: str) -> tuple[float, float, float, float]:
    """Loss alone, loss on the ring, how far gradients are apart, the share that rotates."""
    rows = torch.randint(1, 31, (4, 5), generator=torch.Generator().manual_seed(1))
    expected, grads = outcome(toy(family), rows)
    model, mesh = toy(family), make_mesh("cpu")
    stacked = [path for path, each in model.named_modules() if _is_stacked(each)]
    rules = dict.fromkeys(stacked, ReadRule())
    plan = rotate_all(model, mesh=mesh, find_blocks=True, rules=rules)
    loss, found = outcome(model, rows.chunk(mesh.size())[dist.get_rank()])
    mean = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(mean)
    assert found.keys() == grads.keys()
    sizes = {how: sum(e.numel for e in plan.entries if e.how == how) for how in HOW}
    off = max(apart(found[name], grads[name]) for name in grads)
    return expected, float(mean) / mesh.size(), off, sizes["rotated"] / sum(sizes.values())


def _is_stacked(module: nn.Module) -> bool:
    return any(each.ndim == 3 for each in module.parameters(recurse=False))


HOW = ("rotated", "replicated")


def share_of_wide(family: str) -> float:
    """The share that rotates of a wide model that has no values yet, without rules."""
    with torch.device("meta"):
        model = made(family, WIDE)
    plan = rotate_all(model, mesh=make_mesh("cpu"), find_blocks=True)
    sizes = {how: sum(e.numel for e in plan.entries if e.how == how) for how in HOW}
    return sizes["rotated"] / sum(sizes.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_without_a_rule_are_read_and_exact(family: str, ranks: StartRanks) -> None:
    for expected, loss, off, share in ranks(2).run(rotated, family):
        assert loss == pytest.approx(expected, abs=1e-12)
        assert off < 1e-12
        assert share > 0.9
    assert min(ranks(2).run(share_of_wide, family)) > 0.99
