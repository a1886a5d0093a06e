"""Blocks with packed projections rotate as a whole, and their shards are those of DTensors."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring import ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.attention import AttentionRule
from gyre_trainer.layers.mlp import MLPRule
from gyre_trainer.rotate import (
    RotationPolicy,
    rotate,
    rotate_all,
)
from gyre_trainer.rotation.rule import Rule
from torch import Tensor, nn

from tests.distributed.comparing import apart
from tests.distributed.conftest import StartRanks
from tests.distributed.models.packed import (
    EXACT,
    FOUND,
    RECOMPUTED,
    ROWS,
    SIZES,
    Packed,
    PackedGate,
    on_meta,
    part,
    rotated,
    rules_in,
    small,
)
from tests.distributed.training import whole

DEEP = pytest.mark.models


def outcome(model: Any, rows: Tensor) -> dict[str, Tensor]:
    output = model(input_ids=rows, labels=rows)
    output.loss.backward()
    grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": output.loss.detach(), **grads}


def distances(
    policy: RotationPolicy, replicate: int, frozen: str, families: tuple[str, ...] = tuple(SIZES)
) -> dict[str, float]:
    """How far losses and gradients of each family are from one process's."""
    # The compiler asks for the gradient of every tensor; errors of ranks include that warning.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    found = {}
    for family in families:
        models = small(family), rotated(family, policy, replicate)
        for model in models:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not frozen or frozen not in name)
        expected, parts = outcome(models[0], ROWS), outcome(models[1], part())
        dist.all_reduce(parts["loss"])
        parts["loss"] /= dist.get_world_size()
        assert parts.keys() == expected.keys()
        found[family] = max(apart(parts[name], expected[name]) for name in expected)
    return found


@pytest.mark.parametrize(
    ("num_ranks", "policy", "replicate", "frozen"),
    [
        (2, EXACT, 1, ""),
        (3, EXACT, 1, ""),
        (2, RECOMPUTED, 1, ""),
        (3, RECOMPUTED, 1, ""),
        (4, EXACT, 2, ""),
        (3, EXACT, 1, "c_attn"),
        (2, RotationPolicy(compute_dtype=torch.float32), 1, ""),
        (3, RotationPolicy(compute_dtype=torch.float32, grad_dtype=torch.float32), 1, ""),
        pytest.param(4, EXACT, 1, "", marks=DEEP),
        pytest.param(4, RECOMPUTED, 1, "", marks=DEEP),
        pytest.param(3, EXACT, 1, "down_proj", marks=DEEP),
        pytest.param(2, RotationPolicy(compiler="aot_eager"), 1, "", marks=DEEP),
    ],
)
def test_packed_blocks_train_exactly(
    ranks: StartRanks, num_ranks: int, policy: RotationPolicy, replicate: int, frozen: str
) -> None:
    for found in ranks(num_ranks).run(distances, policy, replicate, frozen):
        assert max(found.values()) <= 1e-6, found


def test_heads_that_are_read_from_attributes_train_exactly(ranks: StartRanks) -> None:
    for found in ranks(2).run(distances, EXACT, 1, "", ("OPT", "StableLm")):
        assert max(found.values()) <= 1e-6, found


def found_by_default(policy: RotationPolicy) -> dict[str, dict[str, str]]:
    """The rules by the last parts of their paths, of each family."""
    mesh = make_mesh("cpu")
    return {
        family: rules_in(rotate_all(on_meta(family), mesh=mesh, policy=policy)) for family in FOUND
    }


def test_packed_layers_are_parts_of_blocks_where_these_are_recomputed(ranks: StartRanks) -> None:
    group = ranks(2)
    found = group.run(found_by_default, RECOMPUTED)[0]
    assert all(rules.items() <= found[family].items() for family, rules in FOUND.items()), found
    kept = group.run(found_by_default, EXACT)[0]
    assert kept["OPT"] == found["OPT"]
    assert kept["StableLm"] == found["StableLm"]
    assert kept["GPT2"]["mlp"] == "MLPRule"
    assert kept["GPT2"]["c_attn"] == "TransposedLinearRule"
    assert kept["Phi3"]["qkv_proj"] == kept["Phi3"]["gate_up_proj"] == "LinearRule"


def blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [PackedGate().double(), Packed(head_by_head=False).double()]


RULES: list[Rule] = [
    MLPRule(ups=("both",), down="down", num_packed=2),
    AttentionRule(2, inputs=("qkv",), output="o", packed=True),
]


def bytes_of_a_step() -> list[tuple[int, int]]:
    """Bytes that this rank sends for each block: counted, and those of slices and their rows."""
    found, mesh = [], make_mesh("cpu")
    ring = ring_of(mesh)
    for block, rule in zip(blocks(), RULES, strict=True):
        rotate(block, mesh=mesh, rule=rule, verify=False)
        block(torch.ones(2, 3, 6).double()).sum().backward()  # checks its rule, once
        before = ring.bytes_sent
        block(torch.ones(2, 3, 6).double()).sum().backward()
        layout: Any = block.rotation.layout
        numel = [layout.numel(index) for index in range(2)]
        other = 1 - ring.rank
        moved = 0  # of the own shard of the packed parameters, what the other rank's slice has
        for cut in layout.cuts:
            first, last = layout.at_rest.bounds(cut, ring.rank)
            each = sum(
                max(0, min(stop, last) - max(start, first))
                for start, stop in layout.ranges(cut, other)
            )
            moved += each * (cut.shape[1] if len(cut.shape) == 2 else 1)
        back = 0  # of the own slice, what the other rank's shard has
        for cut in layout.cuts:
            first, last = layout.at_rest.bounds(cut, other)
            each = sum(
                max(0, min(stop, last) - max(start, first))
                for start, stop in layout.ranges(cut, ring.rank)
            )
            back += each * (cut.shape[1] if len(cut.shape) == 2 else 1)
        # forward and backward: the own slice and one number; then the other slice's gradient
        expected = 2 * (numel[ring.rank] + moved + 1) + numel[other] + back
        found.append((ring.bytes_sent - before, 8 * expected))
    return found


def test_a_packed_block_sends_its_slices_and_once_more_the_rows_of_other_ranks(
    ranks: StartRanks,
) -> None:
    for found in ranks(2).run(bytes_of_a_step):
        assert all(counted == expected for counted, expected in found), found


@pytest.mark.parametrize(
    ("build", "rule", "words"),
    [
        (
            PackedGate,
            MLPRule(ups=("both",), down="down", num_packed=3),
            "PackedGate.both has 22 output features, but the rule needs 3 times the 11",
        ),
        (
            lambda: Packed(head_by_head=False),
            AttentionRule(4, inputs=("qkv",), output="o", packed=True),
            "Packed.qkv has 18 output features, which are not 6 of queries and those of keys and",
        ),
        (
            lambda: Packed(head_by_head=False),
            AttentionRule(2, inputs=("qkv",), output="o", packed=True, counts=("head_dim",)),
            "Packed.head_dim is 3, but the rule needs a whole number there that 2 divides",
        ),
        (
            lambda: Packed(head_by_head=False),
            AttentionRule(2, inputs=("qkv",), output="o", packed=True, counts=("config.heads",)),
            "Packed.config.heads is None",
        ),
    ],
)
def test_a_packed_rule_that_does_not_fit_is_refused(
    build: Callable[[], nn.Module], rule: Rule, words: str
) -> None:
    with pytest.raises(RotationError, match=words):
        rule.cuts(build(), 2)
