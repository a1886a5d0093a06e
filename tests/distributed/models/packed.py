"""Tiny models of `transformers` whose blocks have packed projections, for tests of these."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.layers.known_blocks import KnownBlocks
from gyre_trainer.rotate import RotationPlan, RotationPolicy, rotate_all
from torch import Tensor, nn

from tests.distributed.models.families import VOCABULARY, made

DIM = 6


class PackedGate(nn.Module):
    """An MLP whose first layer makes gate and up: one after the other, or in turns."""

    def __init__(self, *, in_turns: bool = False) -> None:
        super().__init__()
        self.in_turns = in_turns
        self.down, self.both = nn.Linear(11, DIM), nn.Linear(DIM, 22)

    def forward(self, x: Tensor) -> Tensor:
        y = self.both(x)
        gate, up = (y[..., ::2], y[..., 1::2]) if self.in_turns else y.chunk(2, dim=-1)
        output: Tensor = self.down(F.silu(gate) * up)
        return output


class Packed(nn.Module):
    """Attention of two heads whose queries, keys and values one layer makes."""

    def __init__(self, *, head_by_head: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.head_by_head = 2, 3, head_by_head
        self.qkv, self.o = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x)
        if not self.head_by_head:  # all queries, then all keys, then all values
            y = y.unflatten(-1, (3, -1, self.head_dim)).transpose(-2, -3).flatten(-3)
        q, k, v = y.unflatten(-1, (-1, 3 * self.head_dim)).transpose(1, 2).chunk(3, dim=-1)
        output: Tensor = self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return output


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
RECOMPUTED = RotationPolicy(
    recompute="block"
)  # for it, blocks of packed layers are found by default
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
    blocks = KnownBlocks(model, num_slices, regrouped=True)
    found = {path: blocks.rule_of(module) for path, module in model.named_modules()}
    rules: Any = {path: rule for path, rule in found.items() if rule is not None}
    plan = rotate_all(model, mesh=mesh, policy=policy, rules=rules)
    assert FOUND[family].items() <= rules_in(plan).items()
    return model


def rules_in(plan: RotationPlan) -> dict[str, str]:
    cut = [entry for entry in plan.entries if entry.how == "rotated"]
    return {entry.path.rpartition(".")[2]: entry.rule for entry in cut}


def part() -> Tensor:
    return ROWS.chunk(dist.get_world_size())[dist.get_rank()]
