"""Tiny models of `transformers` whose blocks have packed projections, for tests of these."""

from typing import Any

import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.layers.found.blocks import find_rule
from gyre_trainer.rotate import RotationPlan, RotationPolicy, rotate_all
from torch import Tensor

from tests.distributed.models.families import VOCABULARY, made

# Twelve and six heads can be shared by 2 and 3 ranks, 12 by 4, too; 37 by none.
SIZES: dict[str, dict[str, Any]] = {
    "Phi3": {"hidden_size": 48, "intermediate_size": 37}
    | {"num_attention_heads": 24, "num_key_value_heads": 12},
    "GPT2": {"n_embd": 24, "n_head": 12, "n_inner": 37},
}
# The parts of a layer that are blocks. The last two read how many heads there are from attributes.
FOUND = {
    "Phi3": {"self_attn": "AttentionRule", "mlp": "MLPRule"},
    "GPT2": {"attn": "AttentionRule", "mlp": "MLPRule"},
    "OPT": {"self_attn": "AttentionRule"},
    "StableLm": {"self_attn": "AttentionRule", "mlp": "MLPRule"},
}
EXACT = RotationPolicy()
RECOMPUTED = RotationPolicy(recompute=True)  # for it, blocks of packed layers are found by default
ROWS = torch.randint(1, VOCABULARY, (12, 5), generator=torch.Generator().manual_seed(1))


def small(family: str) -> Any:
    if family in SIZES:
        return made(family, **SIZES[family])
    import transformers  # seconds, for these tests alone

    library: Any = transformers
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "word_embed_proj_dim": 24}
    none = {"dropout": 0.0, "attention_dropout": 0.0, "use_cache": False, "pad_token_id": 0}
    config = getattr(library, f"{family}Config")(**sizes, **heads, **none)
    return getattr(library, f"{family}ForCausalLM")(config).double()


def on_meta(family: str) -> Any:
    like = small(family)
    with torch.device("meta"):
        return type(like)(like.config)


def rotated(family: str, policy: RotationPolicy = EXACT, replicate: int = 1) -> Any:
    """The model with all its blocks, which without recomputation only rules of their own give."""
    model = small(family)
    mesh = make_mesh("cpu", replicate=replicate)
    num_slices = dist.get_world_size() // replicate
    found = {
        path: find_rule(module, num_slices, regrouped=True)
        for path, module in model.named_modules()
    }
    rules: Any = {path: rule for path, rule in found.items() if rule is not None}
    plan = rotate_all(model, mesh=mesh, policy=policy, rules=rules)
    assert FOUND[family].items() <= rules_in(plan).items()
    return model


def rules_in(plan: RotationPlan) -> dict[str, str]:
    cut = [entry for entry in plan.entries if entry.how == "rotated"]
    return {entry.path.rpartition(".")[2]: entry.rule for entry in cut}


def part() -> Tensor:
    return ROWS.chunk(dist.get_world_size())[dist.get_rank()]
