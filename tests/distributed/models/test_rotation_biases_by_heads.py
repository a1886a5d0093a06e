"""Attention that is given, or makes, a tensor of all heads, such as a bias of T5, is a block."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.attention import AttentionRule
from gyre_trainer.rotate import RotationPolicy, rotate, rotate_all
from torch import Tensor, nn

from tests.distributed.comparing import Case, apart, distances
from tests.distributed.conftest import StartRanks
from tests.distributed.training import outcome

VOCABULARY = 31
CHANNELS, TIME = 4, 5
KEPT, RECOMPUTED = RotationPolicy(), RotationPolicy(recompute="block")
LAYERS = RotationPolicy(recompute="layer")
MODELS = pytest.mark.models


class Biased(nn.Module):
    """Attention that adds a bias of all heads, a given one or its own, and returns it."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.table = nn.Embedding(2 * TIME, num_heads)
        self.q, self.k, self.v = (nn.Linear(8, num_heads * CHANNELS) for _ in range(3))
        self.o = nn.Linear(num_heads * CHANNELS, 8)

    def forward(
        self, x: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, CHANNELS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        if bias is None:
            places = torch.arange(x.shape[1])
            bias = self.table(places - places[:, None] + TIME).permute(2, 0, 1).unsqueeze(0)
        weights = (q @ k.mT + bias).softmax(-1)
        y = weights @ v if scale is None else weights @ v * scale
        return self.o(y.transpose(1, 2).flatten(2)), bias, weights


class OfBatch(Biased):
    """Attention that takes a bias of all heads, or with three dims one of each row of the batch."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Any:  # type: ignore[override]
        if bias is not None and bias.ndim == 3:
            bias = bias.unsqueeze(1)
        output, _, weights = super().forward(x, bias)
        return output, weights


def of_batch(num_heads: int, shape: tuple[int, ...]) -> Case:
    """With as many heads as rows of a rank's batch."""
    module = OfBatch(num_heads)
    module.table.requires_grad_(False)  # no gradient comes to it
    rule = replace(rule_of(num_heads), by_heads=("bias",), batched=("bias",))
    args = torch.randn(12, TIME, 8), torch.randn(12, *shape, TIME, TIME)
    return Case(module, args, rule=rule, num_examined=2)


def rule_of(num_heads: int) -> AttentionRule:
    return AttentionRule(
        num_heads, counts=("num_heads",), by_heads=("bias", "scale"), tables=("table",)
    )


def given(num_heads: int, *, by_name: bool) -> Case:
    """A bias and a scale of all heads, by which each row of the batch is told apart."""
    x, bias = torch.randn(12, TIME, 8), torch.randn(12, num_heads, TIME, TIME)
    kwargs = {"scale": torch.randn(1, num_heads, 1, 1)} if by_name else {}
    module = Biased(num_heads)
    module.table.requires_grad_(False)  # else no gradient comes to it
    return Case(module, (x, bias), kwargs, rule=rule_of(num_heads), num_examined=2)


def own(num_heads: int) -> Case:
    return Case(Biased(num_heads), (torch.randn(12, TIME, 8),), rule=rule_of(num_heads))


def cases(num_ranks: int) -> dict[str, Callable[[], Case]]:
    """With heads that the ranks can share evenly, and with others."""
    found: dict[str, Callable[[], Case]] = {}
    for num_heads in (2 * num_ranks, 2 * num_ranks + 1):
        found[f"own, {num_heads}"] = partial(own, num_heads)
        found[f"given, {num_heads}"] = partial(given, num_heads, by_name=False)
        found[f"scaled, {num_heads}"] = partial(given, num_heads, by_name=True)
    rows = 12 // num_ranks
    found["of the batch"] = partial(of_batch, rows, ())
    found["of the batch and all heads"] = partial(of_batch, rows, (rows,))
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("policy", [KEPT, RECOMPUTED], ids=["kept", "recomputed"])
def test_each_slice_has_the_bias_of_its_heads(
    ranks: StartRanks, num_ranks: int, policy: RotationPolicy
) -> None:
    for found in ranks(num_ranks).run(distances, cases(num_ranks), policy):
        assert max(found.values()) <= 1e-12, found


def passed_and_refused() -> tuple[bool, str]:
    """Whether an argument that is returned is the caller's own, and what is said of a wrong one."""
    module = Biased(4)
    rotate(module, mesh=make_mesh("cpu"), rule=rule_of(4))
    x, bias = torch.randn(2, TIME, 8), torch.randn(1, 4, TIME, TIME)
    _, returned, _ = module(x, bias)
    with pytest.raises(RotationError) as refused:
        module(x, bias[:, :2])
    return returned is bias, str(refused.value)


def test_an_argument_that_is_returned_is_the_callers(ranks: StartRanks) -> None:
    for is_own, told in ranks(2).run(passed_and_refused):
        assert is_own
        assert "an attention of 4 heads is called with bias of shape (1, 2, 5, 5)" in told


OF_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 20,
    "num_layers": 2,
    "num_heads": 6,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "use_cache": False,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 6,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "T5": ("T5ForConditionalGeneration", OF_T5),
    "MT5": ("MT5ForConditionalGeneration", OF_T5),
    "UMT5": ("UMT5ForConditionalGeneration", OF_T5),
    "MPT": (
        "MptForCausalLM",
        {"vocab_size": VOCABULARY, "d_model": 24, "n_heads": 6, "n_layers": 2, "use_cache": False}
        | {"expansion_ratio": 2},
    ),
}
BOTH = {"SelfAttention", "EncDecAttention"}
ATTENTIONS = {family: {"attn"} if family == "MPT" else BOTH for family in FAMILIES}


def made(family: str, **sizes: Any) -> Any:
    """A tiny model in float64, but MPT in float32; its biases are not zero."""
    import transformers  # seconds, for these tests alone

    library: Any = transformers
    kind, keys = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(library, kind)(getattr(library, kind).config_class(**keys | sizes))
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model.float() if family == "MPT" else model.double()


def rotated(family: str, policy: RotationPolicy, **sizes: Any) -> Any:
    """A rotated model, all of whose attention is blocks."""
    model = made(family, **sizes)
    plan = rotate_all(model, mesh=make_mesh("cpu"), policy=policy)
    cut = [entry for entry in plan.entries if entry.how == "rotated"]
    blocks = {each.path.rpartition(".")[2] for each in cut if each.rule == "AttentionRule"}
    assert blocks == ATTENTIONS[family], blocks
    return model


@dataclass(frozen=True)
class Way:
    """How models of some families are rotated and trained."""

    policy: RotationPolicy = KEPT
    families: tuple[str, ...] = tuple(FAMILIES)
    num_heads: int = 6
    use_cache: bool = False

    def sizes(self, family: str) -> dict[str, int]:
        if family == "MPT":
            return {"n_heads": self.num_heads, "d_model": 4 * self.num_heads}
        return {"num_heads": self.num_heads, "use_cache": self.use_cache}


def off(way: Way) -> dict[str, float]:
    """How far losses and gradients of each family are from one process's."""
    # The compiler asks for the gradient of every tensor; errors of ranks include that warning.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    found = {}
    rows = torch.randint(1, VOCABULARY, (12, 5), generator=torch.Generator().manual_seed(1))
    mine = rows.chunk(dist.get_world_size())[dist.get_rank()]
    for family in way.families:
        expected = outcome(made(family, **way.sizes(family)), rows)
        model = rotated(family, way.policy, **way.sizes(family))
        parts = outcome(model, mine)
        dist.all_reduce(parts["loss"])
        parts["loss"] /= dist.get_world_size()
        assert parts.keys() == expected.keys()
        found[family] = max(apart(parts[name], expected[name]) for name in expected)
    return found


UNPACKED = ("T5", "UMT5")  # found where nothing is recomputed, too
COMPILED = RotationPolicy(recompute="block", compiler="aot_eager")


@pytest.mark.parametrize(
    ("num_ranks", "way"),
    [
        (2, Way(KEPT, UNPACKED)),
        (3, Way(RECOMPUTED)),
        (2, Way(RECOMPUTED, UNPACKED, use_cache=True)),  # the library's default
        *(
            pytest.param(*each, marks=MODELS)
            for each in (
                (2, Way(RECOMPUTED)),
                (3, Way(KEPT, UNPACKED)),
                (3, Way(KEPT, UNPACKED, use_cache=True)),
                (3, Way(LAYERS)),
                (2, Way(RECOMPUTED, num_heads=5)),
                (4, Way(RECOMPUTED, num_heads=5)),
                (2, Way(COMPILED, ("T5",))),
            )
        ),
    ],
)
def test_families_train_exactly(ranks: StartRanks, num_ranks: int, way: Way) -> None:
    for found in ranks(num_ranks).run(off, way):
        assert max(found.values()) <= 1e-5, found  # norms compute in float32
