"""Attention whose key/value heads the ranks cannot share evenly: slices have unequal parts."""

import warnings
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring import ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.attention import AttentionRule
from gyre_trainer.rotate import RotationPolicy, rotate, rotate_all
from torch import Tensor, nn

from tests.distributed.comparing import Case, apart, distances
from tests.distributed.conftest import StartRanks
from tests.distributed.models.families import VOCABULARY, made
from tests.distributed.training import outcome

RECOMPUTED = RotationPolicy(recompute="block")  # for it, such blocks are found by default
CHANNELS = 4
MODELS = pytest.mark.models


class Grouped(nn.Module):
    """Attention in float64 throughout, whose forward reads every number of heads."""

    qkv: nn.Linear
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear

    def __init__(self, num_heads: int, num_kv_heads: int, *, packed: bool = False) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_heads=num_heads)
        self.num_kv_heads, self.group = num_kv_heads, num_heads // num_kv_heads
        dim, kv_dim = num_heads * CHANNELS, num_kv_heads * CHANNELS
        self.packed = packed
        sizes = {"qkv": dim + 2 * kv_dim} if packed else {"q": dim, "k": kv_dim, "v": kv_dim}
        for name, size in sizes.items():
            setattr(self, name, nn.Linear(8, size))
        self.o = nn.Linear(dim, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        num_heads, num_kv_heads = self.config.num_heads, self.num_kv_heads
        parts: Any = (num_heads, num_kv_heads, num_kv_heads)
        if self.packed:
            made = self.qkv(x).split([each * CHANNELS for each in parts], dim=-1)
        else:
            made = self.q(x), self.k(x), self.v(x)
        q, k, v = (
            each.unflatten(-1, (count, CHANNELS)).transpose(1, 2)
            for each, count in zip(made, parts, strict=True)
        )
        k, v = (each.repeat_interleave(self.group, 1) for each in (k, v))
        weights = (q @ k.mT).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2)), weights


def rule_of(num_kv_heads: int, *, packed: bool = False) -> AttentionRule:
    return AttentionRule(
        num_kv_heads,
        inputs=("qkv",) if packed else ("q", "k", "v"),
        packed=packed,
        counts=("config.num_heads",),
        kv_counts=("num_kv_heads",),
        groups=("group",),
    )


# Query heads, key/value heads: of 8 and 2, a slice of four has queries of one head; of 6 and 2,
# that in the middle of three has queries of both; of 12 and 3, each of two has them of two,
# unevenly, so it has one head twice; 4 and 1 have one head for all. Of 5 and 5, 6 and 2 on four
# ranks, and 10 and 5, the first slices have a query head more.
HEADS = {
    2: ((4, 1), (12, 3), (5, 5)),
    3: ((6, 2), (12, 4), (5, 5)),
    4: ((8, 2), (12, 3), (12, 6), (5, 5), (6, 2), (10, 5)),
}


def cases(num_ranks: int) -> dict[str, Any]:
    return {
        f"{heads}, packed {packed}": partial(case, *heads, packed=packed)
        for heads in HEADS[num_ranks]
        for packed in (False, True)
    }


def case(num_heads: int, num_kv_heads: int, *, packed: bool) -> Case:
    x = torch.randn(12, 5, 8)
    rule = rule_of(num_kv_heads, packed=packed)
    return Case(Grouped(num_heads, num_kv_heads, packed=packed), (x,), rule=rule)


@pytest.mark.parametrize("num_ranks", HEADS)
@pytest.mark.parametrize("policy", [RotationPolicy(), RECOMPUTED], ids=["kept", "recomputed"])
def test_slices_that_share_heads_compute_what_the_module_does(
    ranks: StartRanks, num_ranks: int, policy: RotationPolicy
) -> None:
    for found in ranks(num_ranks).run(distances, cases(num_ranks), policy):
        assert found
        assert max(found.values()) <= 1e-12, found


FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 6},
    "Gemma2": {"head_dim": 6},
    "Phi3": {"hidden_size": 48},  # packed, and its forward reads all numbers of heads
}


def small(family: str, num_heads: int, num_kv_heads: int, **options: Any) -> Any:
    if family == "GPT2":  # packed, in columns
        return made(family, n_head=num_heads, n_embd=4 * num_heads, **options)
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    return made(family, **({"hidden_size": 48} | FAMILIES[family] | heads | options))


def rules_in(model: Any, policy: RotationPolicy, replicate: int = 1) -> dict[str, str]:
    """The rules of a model that is rotated by default, by the last parts of paths."""
    plan = rotate_all(model, mesh=make_mesh("cpu", replicate=replicate), policy=policy)
    cut = [entry for entry in plan.entries if entry.how == "rotated"]
    return {entry.path.rpartition(".")[2]: entry.rule for entry in cut}


@dataclass(frozen=True)
class Way:
    """How models of all families, or of some, are rotated and trained."""

    heads: tuple[int, int]
    policy: RotationPolicy = RECOMPUTED
    replicate: int = 1
    frozen: str = ""
    attention: str = "sdpa"
    families: tuple[str, ...] = tuple(FAMILIES)


def off(way: Way) -> dict[str, float]:
    """How far losses and gradients of each family are from one process's."""
    # The compiler asks for the gradient of every tensor; errors of ranks include that warning.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    found = {}
    rows = torch.randint(1, VOCABULARY, (12, 5), generator=torch.Generator().manual_seed(1))
    for family in way.families:
        models = [small(family, *way.heads, attn_implementation=way.attention) for _ in range(2)]
        for model in models:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not way.frozen or way.frozen not in name)
        rules = rules_in(models[1], way.policy, way.replicate)
        assert rules["attn" if family == "GPT2" else "self_attn"] == "AttentionRule"
        expected = outcome(models[0], rows)
        parts = outcome(models[1], rows.chunk(dist.get_world_size())[dist.get_rank()])
        dist.all_reduce(parts["loss"])
        parts["loss"] /= dist.get_world_size()
        assert parts.keys() == expected.keys()
        found[family] = max(apart(parts[name], expected[name]) for name in expected)
    return found


FEW = ("Llama", "Phi3")
ODD = ("GPT2", "Qwen3")
COMPILED = RotationPolicy(recompute="block", compiler="aot_eager")
HALF = RotationPolicy(recompute="block", compute_dtype=torch.float32, grad_dtype=torch.float32)


@pytest.mark.parametrize(
    ("num_ranks", "way"),
    [
        (3, Way((6, 2), attention="eager", families=FEW)),
        (4, Way((8, 2), families=FEW)),
        (4, Way((5, 5), families=ODD)),
        *(
            pytest.param(*each, marks=MODELS)
            for each in (
                (2, Way((4, 1))),
                (3, Way((6, 2))),
                (4, Way((8, 2))),
                (4, Way((8, 2), attention="eager")),
                (4, Way((4, 1), replicate=2)),
                (3, Way((6, 2), frozen="k_proj")),
                (2, Way((4, 1), policy=HALF)),
                (4, Way((8, 2), policy=COMPILED)),
                (2, Way((5, 5), families=ODD)),
                (3, Way((7, 7), families=ODD, attention="eager")),
                (4, Way((5, 5), families=ODD, replicate=2)),
                (3, Way((5, 5), families=ODD, policy=HALF)),
                (3, Way((10, 5), families=("Qwen3",))),
                (4, Way((6, 2), families=("Qwen3",))),
                (4, Way((5, 5), COMPILED, families=ODD)),
            )
        ),
    ],
)
def test_models_share_their_query_heads_where_they_are_recomputed(
    ranks: StartRanks, num_ranks: int, way: Way
) -> None:
    for found in ranks(num_ranks).run(off, way):
        assert max(found.values()) <= 1e-6, found


def bytes_of_a_step() -> tuple[int, int]:
    """Bytes that this rank sends in forward and backward: counted, and as the page says."""
    module = Grouped(8, 2).double()
    mesh = make_mesh("cpu")
    ring = ring_of(mesh)
    rotate(module, mesh=mesh, rule=rule_of(2), verify=False)
    x = torch.ones(2, 3, 8).double()
    module(x)[0].sum().backward()  # checks its rule, once
    before = ring.bytes_sent
    module(x)[0].sum().backward()
    rows = 2 * CHANNELS  # of a slice: one head of keys, and one of values
    numel = 2 * (2 * CHANNELS * 8) + rows * 8 + 2 * CHANNELS + rows + 2
    # What the other ranks need of this rank's quarter of k and v: half a head, which two slices
    # have; one of them may be its own. Gradients come back from both, halves of each to two ranks.
    half = rows // 2 * (8 + 1)
    regrouped = 2 * (half + 1) + half
    return ring.bytes_sent - before, 8 * (3 * 3 * numel + regrouped)


def test_a_slice_has_its_key_value_heads_and_no_others(ranks: StartRanks) -> None:
    for counted, expected in ranks(4).run(bytes_of_a_step):
        assert counted == expected


@pytest.mark.parametrize(
    ("num_heads", "rule", "words"),
    [
        (2, rule_of(2), "has 2 key/value heads and 2 query heads, which 4 ranks cannot share"),
        (8, rule_of(3), "has 3 key/value heads, which 4 ranks cannot share"),
        (8, replace(rule_of(2), groups=("o",)), "Grouped.o is None, but each of its 2 key/value"),
        (8, replace(rule_of(2), counts=("num_kv_heads",)), "Grouped.num_kv_heads is 2, but the"),
        (8, replace(rule_of(2), kv_counts=("training",)), "Grouped.training is None, but the rule"),
    ],
)
def test_heads_that_do_not_fit_are_refused(num_heads: int, rule: AttentionRule, words: str) -> None:
    with pytest.raises(RotationError, match=words):
        rule.cuts(Grouped(num_heads, 2), 4)
