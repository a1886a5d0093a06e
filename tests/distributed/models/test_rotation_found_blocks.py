"""Attention and MLPs of models that nobody wrote rules for are found, tried, and rotate exactly."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.layers.attention import AttentionRule
from gyre_trainer.layers.experts.moe import ExpertsRule
from gyre_trainer.layers.found.blocks import find_rule
from gyre_trainer.layers.found.finder import BlockFinder
from gyre_trainer.layers.mlp import MLPRule
from gyre_trainer.rotate import rotate_all
from torch import Tensor, nn

from tests.distributed.conftest import StartRanks
from tests.distributed.refusals.test_rotation_mispaired import loss_of, rows, sparse
from tests.distributed.training import whole

DIM = 6
MODELS = [("Llama", "sdpa"), ("Llama", "eager"), ("Qwen2", "sdpa"), ("Qwen3", "eager")]


def made(family: str, attention: str) -> Any:
    """A tiny model in float64: with biases (Qwen2), and norms inside of attention (Qwen3)."""
    import transformers  # seconds, for these tests alone

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    if family == "Qwen3":
        heads["head_dim"] = 8
    library: Any = transformers
    config = getattr(library, f"{family}Config")(
        vocab_size=61, attn_implementation=attention, use_cache=False, **heads, **sizes
    )
    return getattr(library, f"{family}ForCausalLM")(config).double()


def tokens() -> Tensor:
    return torch.randint(61, (4, 7), generator=torch.Generator().manual_seed(1))


def outcome(model: Any, rows: Tensor) -> dict[str, Tensor]:
    """Loss, gradients, and the weights of attention where the model gives them."""
    output = model(input_ids=rows, labels=rows, output_attentions=_is_eager(model))
    output.loss.backward()
    found = {"loss": output.loss.detach()}
    found |= {name: whole(p.grad) for name, p in model.named_parameters()}
    if _is_eager(model):
        found["weights"] = torch.stack(output.attentions).detach()
    return found


def _is_eager(model: Any) -> bool:
    return bool(model.config._attn_implementation == "eager")


def rotated(family: str, attention: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The rule of each rotated module, and the outcome of this rank's rows."""
    model = made(family, attention)
    plan = rotate_all(model, mesh=make_mesh("cpu"), find_blocks=True)
    rules = {entry.path: entry.rule for entry in plan.entries if entry.how == "rotated"}
    return rules, outcome(model, tokens().chunk(dist.get_world_size())[dist.get_rank()])


@pytest.mark.parametrize(("family", "attention"), MODELS)
def test_blocks_of_transformers_are_found_and_exact(
    ranks: StartRanks, family: str, attention: str
) -> None:
    expected = outcome(made(family, attention), tokens())
    found = ranks(2).run(rotated, family, attention)
    for rank, (rules, parts) in enumerate(found):
        blocks = {f"model.layers.{n}" for n in range(2)}
        assert {path for path, rule in rules.items() if rule == "AttentionRule"} == {
            f"{block}.self_attn" for block in blocks
        }
        assert {path for path, rule in rules.items() if rule == "MLPRule"} == {
            f"{block}.mlp" for block in blocks
        }
        for name in expected.keys() - {"loss", "weights"}:
            torch.testing.assert_close(parts[name], expected[name], rtol=1e-4, atol=1e-7)
        if "weights" in expected:
            torch.testing.assert_close(
                parts["weights"], expected["weights"][:, 2 * rank : 2 * rank + 2]
            )
    mean = torch.stack([parts["loss"] for _, parts in found]).mean()
    torch.testing.assert_close(mean, expected["loss"], rtol=1e-6, atol=0)


def losses_of_experts() -> float:
    """The loss of this rank's three tokens, of which most experts get none."""
    model = sparse("Mixtral")
    rotate_all(model, mesh=make_mesh("cpu"), find_blocks=True)
    loss = loss_of(model, rows(2)[[dist.get_rank()]])
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def test_experts_are_blocks_though_ranks_use_different_ones(ranks: StartRanks) -> None:
    model = sparse("Mixtral")
    expected = [float(loss_of(model, rows(2)[[rank]]).detach()) for rank in range(2)]
    assert ranks(2).run(losses_of_experts) == pytest.approx(expected, rel=1e-6)


class Gated(nn.Module):
    """An MLP of equal widths, so that only the trial can tell which layer is the last."""

    def __init__(self, hidden: int = DIM, dropout: float = 0.0) -> None:
        super().__init__()
        self.c = nn.Linear(hidden, DIM)
        self.a, self.b = nn.Linear(DIM, hidden), nn.Linear(DIM, hidden)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.drop(self.c(F.silu(self.a(x)) * self.b(x)))
        return output


class Residual(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class AcrossTheWidth(Gated):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.c(self.a(x).softmax(-1) * self.b(x))
        return output


class Heads(nn.Module):
    """Attention of two heads by a loop; its forward may read the number of heads elsewhere."""

    def __init__(self, *, reads_weights: bool, config: object = None) -> None:
        super().__init__()
        self.config = config
        self.num_heads, self.head_dim, self.reads_weights = 2, 3, reads_weights
        self.o, self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        size = -1 if self.reads_weights else self.num_heads
        q, k, v = (
            layer(x).unflatten(-1, (size, self.head_dim)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        output: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return output


@dataclass(frozen=True)
class Frozen:
    num_heads: int


class HeadsOfATuple(Heads):
    """The forward reads the number of heads where no slice can have another one."""

    def __init__(self) -> None:
        super().__init__(reads_weights=True)
        self.sizes = (2, 3)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, self.sizes).transpose(1, 2) for layer in self.layers())
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        output: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return output

    def layers(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.q, self.k, self.v


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


class Stacked(nn.Module):
    """Experts whose numbers and scores are passed in an order of their own; six columns wide."""

    def __init__(self, *, residual: bool = False) -> None:
        super().__init__()
        self.residual = residual
        self.up, self.down = (nn.Parameter(torch.randn(5, *s)) for s in ((DIM, 8), (8, DIM)))
        self.down_shift = nn.Parameter(torch.randn(5, DIM))

    def forward(self, x: Tensor, by: Tensor, to: Tensor) -> Tensor:
        output = x.clone() if self.residual else torch.zeros_like(x)
        for expert, (up, down, shift) in enumerate(
            zip(self.up, self.down, self.down_shift, strict=True)
        ):
            y = (x @ up).relu() @ down + shift
            output = output + y * ((to == expert) * by).sum(-1, keepdim=True)
        return output


STACKED = ExpertsRule(
    ("up", "down", "down_shift"), "to", last=("down", "down_shift"), arguments=("x", "by", "to")
)


def test_experts_of_gpt_oss_are_found_at_full_width_on_meta() -> None:
    import transformers  # seconds, for these tests alone
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    with torch.device("meta"):  # 32 experts, 2880 wide inside and outside
        config = transformers.GptOssConfig(num_local_experts=32)
        experts = GptOssExperts(config)  # type: ignore[no-untyped-call]
    rule = find_rule(experts, 8)
    assert isinstance(rule, ExpertsRule)
    assert (rule.chosen, rule.scores) == ("router_indices", "routing_weights")
    assert rule.last == ("down_proj", "down_proj_bias")


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (Stacked, STACKED),
        (lambda: Stacked(residual=True), None),
        (Gated, MLPRule(ups=("a", "b"), down="c")),
        (lambda: Gated(hidden=11), MLPRule(ups=("a", "b"), down="c")),
        (lambda: Heads(reads_weights=True), AttentionRule(2, inputs=("q", "k", "v"), output="o")),
        (
            lambda: Heads(reads_weights=False),
            AttentionRule(2, inputs=("q", "k", "v"), output="o", counts=("num_heads",)),
        ),
        *(
            (
                partial(Heads, reads_weights=False, config=config),
                AttentionRule(2, inputs=("q", "k", "v"), output="o", counts=("num_heads",)),
            )
            for config in ({"num_heads": 2}, SimpleNamespace(num_heads=2), Frozen(2))
        ),
        (HeadsOfATuple, None),
        (lambda: Packed(head_by_head=True), AttentionRule(2, inputs=("qkv",), output="o")),
        (
            lambda: Packed(head_by_head=False),
            AttentionRule(2, inputs=("qkv",), output="o", packed=True),
        ),
        (PackedGate, MLPRule(ups=("both",), down="down", num_packed=2)),
        (lambda: PackedGate(in_turns=True), None),
        (lambda: Gated(dropout=0.1), MLPRule(("a", "b"), "c", drops_out=True)),
        (Residual, None),
        (AcrossTheWidth, None),
        (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)), MLPRule(("0",), "2")),
        (lambda: nn.Sequential(nn.Linear(4, 6), nn.Softmax(-1), nn.Linear(6, 4)), None),
        (lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5)), None),
    ],
)
def test_a_rule_is_found_where_the_slices_make_the_output(
    build: Callable[[], nn.Module], expected: object
) -> None:
    state = torch.get_rng_state()
    with torch.device("meta"):
        module = build()
    assert find_rule(module, 2, regrouped=True) == expected
    assert torch.equal(torch.get_rng_state(), state)


def test_rules_with_packed_parameters_are_found_on_request() -> None:
    assert find_rule(Packed(head_by_head=False), 2) is None
    assert find_rule(PackedGate(), 2) is None
    assert find_rule(Packed(head_by_head=True), 2) is not None


class Counted(Gated):
    """Counts the calls of all copies; some add their input."""

    calls: ClassVar[list[bool]] = []

    def __init__(self, *, residual: bool) -> None:
        super().__init__()
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(self.residual)
        return super().forward(x) + x * self.residual


def test_modules_that_are_alike_are_tried_once() -> None:
    kinds = [False, True, False, True, False]
    model = nn.ModuleList(Counted(residual=kind) for kind in kinds)
    finder, num_calls = BlockFinder(model, 2), []
    for module, residual in zip(model, kinds, strict=True):
        rule = finder.rule_of(module)
        assert (rule is None) is residual
        num_calls.append(len(Counted.calls))
    assert 0 < num_calls[0] < num_calls[1] == num_calls[4]
