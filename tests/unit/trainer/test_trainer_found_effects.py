"""What a module writes beside its output decides whether it rotates as a whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gyre_trainer.layers.attention import AttentionRule
from gyre_trainer.layers.embedding import OwnEmbeddingRule
from gyre_trainer.layers.experts.moe import Experts, ExpertsRule
from gyre_trainer.layers.found.blocks import find_rule
from gyre_trainer.layers.found.finder import BlockFinder, block_rules
from gyre_trainer.layers.linear import LinearRule
from gyre_trainer.layers.mlp import MLPRule
from torch import Tensor, nn

WIDTH, CHANNELS = 8, 4
_FOUND = MLPRule(ups=("up",), down="down")


class Perceptron(nn.Module):
    """An MLP that does something before it computes."""

    def __init__(self, before: Callable[[Any, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        self.before = before

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.before is not None:
            self.before(self, x)
        output: Tensor = self.down(F.gelu(self.up(x)))
        return output


class Adds(Perceptron):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        output = super().forward(x)
        return output if residual is None else output + residual


class Skips(Perceptron):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return super().forward(x) if self.training else x


class DropsInPlace(Perceptron):
    """Drops out its input in place, which the caller would see."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return super().forward(F.dropout(x, 0.1, self.training, inplace=True))


def counts(module: Any, x: Tensor) -> None:
    module.seen += 1


def averages(module: Any, x: Tensor) -> None:
    module.seen.mul_(0.9).add_(x.mean())


def clamps(module: Any, x: Tensor) -> None:
    module.down.weight.data.clamp_(-0.1, 0.1)


def rectifies(module: Any, x: Tensor) -> None:
    x.relu_()


def remembers(module: Any, x: Tensor) -> None:
    module.seen.fill_(len(module.up.weight))  # of a slice, fewer


def fills_once(module: Any, x: Tensor) -> None:
    module.seen = torch.full((), x.shape[-1])


def test_blocks_that_write_are_not_found() -> None:
    assert find_rule(Perceptron(), 2) == _FOUND
    assert find_rule(Perceptron(fills_once), 2) == _FOUND
    for writes in (counts, averages, clamps, rectifies, remembers):
        assert find_rule(Perceptron(writes), 2) is None, writes.__name__


@pytest.mark.parametrize("kind", [Adds, Skips, DropsInPlace])
def test_blocks_are_tried_in_each_way_that_they_can_be_called(kind: type[Perceptron]) -> None:
    assert find_rule(kind(), 2) is None


class Attention(nn.Module):
    """Reads its number of heads, and keeps the scores, as of one slice."""

    def __init__(self, *, keeps: bool = False) -> None:
        super().__init__()
        self.num_heads, self.keeps = 6, keeps
        self.q, self.k, self.v = (nn.Linear(WIDTH, 6 * CHANNELS) for _ in range(3))
        self.o = nn.Linear(6 * CHANNELS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).view(*x.shape[:2], self.num_heads, CHANNELS).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        if self.keeps:
            self.last = q.detach()
        rate = 0.1 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, None, rate, True)
        return self.o(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def test_attention_with_arguments_by_position_is_found_and_what_it_keeps_is_seen() -> None:
    rule = AttentionRule(6, ("q", "k", "v"), "o", counts=("num_heads",), drops_out=True)
    assert find_rule(Attention(), 2) == rule
    assert find_rule(Attention(keeps=True), 2) is None


class Scaled(nn.Linear):
    """A linear layer of a class of its own."""

    def __init__(self, before: Callable[[Any, Tensor], Any] | None = None) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        self.before, self.num_calls = before, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.before is not None:
            self.before(self, x)
        return 2 * F.linear(x, self.weight, self.bias)


def numbers(module: Any, x: Tensor) -> None:
    module.num_calls += 1


def shrinks(module: Any, x: Tensor) -> None:
    module.weight.data.clamp_(-0.1, 0.1)


def keeps(module: Any, x: Tensor) -> None:
    module.last = x.detach().mean()


def test_linear_layers_that_write_are_not_found() -> None:
    assert isinstance(find_rule(Scaled(), 2), LinearRule)
    for writes in (counts, averages, numbers, shrinks, keeps):
        assert find_rule(Scaled(writes), 2) is None, writes.__name__


class Counted(nn.Embedding):
    def __init__(self, *, counts: bool) -> None:
        super().__init__(20, WIDTH)
        self.register_buffer("usage", torch.zeros(20))
        self.counts = counts

    def forward(self, tokens: Tensor) -> Tensor:
        if self.counts:
            self.usage.index_add_(0, tokens.flatten(), torch.ones(tokens.numel()))  # type: ignore[operator]
        return 2 * super().forward(tokens)


def test_an_embedding_that_counts_its_tokens_is_not_found() -> None:
    assert find_rule(Counted(counts=False), 2) == OwnEmbeddingRule(20)
    assert find_rule(Counted(counts=True), 2) is None


class CountedExperts(Experts):
    def __init__(self, *, counts: bool) -> None:
        super().__init__(4, WIDTH, 12)
        self.register_buffer("seen", torch.zeros(()))
        self.counts = counts

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if self.counts:
            self.seen.add_((chosen < len(self.down)).sum())  # type: ignore[operator]
        return super().forward(x, chosen, weights)


def test_experts_that_count_their_tokens_are_not_found() -> None:
    assert isinstance(find_rule(CountedExperts(counts=False), 2), ExpertsRule)
    assert find_rule(CountedExperts(counts=True), 2) is None


def test_hooks_inside_of_a_block_get_what_the_layers_compute() -> None:
    """A layer of a block would give them a part; one of the block itself is called by no trial."""
    model = nn.Sequential(Perceptron(), Perceptron(), Perceptron())
    called: list[nn.Module] = []
    model[0].down.register_forward_hook(lambda module, *_: called.append(module))  # type: ignore[union-attr]
    model[1].up.register_full_backward_hook(lambda *_: None)  # type: ignore[union-attr]
    model[2].register_forward_hook(lambda module, args, output: called.append(module))
    assert block_rules(model, 2) == {"2": _FOUND}
    assert not called


def test_a_block_of_which_one_parameter_is_tied_is_not_found() -> None:
    """The layer at the other place would be cut in another way."""
    model = nn.ModuleDict({"one": Perceptron(), "other": Perceptron(), "third": Perceptron()})
    model["other"].up.weight = model["one"].up.weight  # type: ignore[union-attr]
    assert block_rules(model, 2) == {"third": _FOUND}


_calls: list[None] = []  # of all `Numbered`


class Numbered(Perceptron):
    """Knows its place in a list; the one at place 5 is no block if it reads that."""

    def __init__(self, place: int, *, reads: bool = False) -> None:
        super().__init__()
        self.place, self.reads = place, reads

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        _calls.append(None)
        return x if self.reads and self.place == 5 else super().forward(x)


def _found_in(modules: list[nn.Module]) -> list[bool]:
    finder = BlockFinder(nn.ModuleList(modules), 2)
    return [finder.rule_of(each) is not None for each in modules]


def test_layers_that_differ_in_a_number_that_is_not_read_are_tried_twice() -> None:
    calls: dict[int, int] = {}
    for number in (2, 8):
        _calls.clear()
        assert all(_found_in([Numbered(place) for place in range(number)]))
        calls[number] = len(_calls)
    assert calls[8] == calls[2]


def test_layers_that_read_their_number_are_tried_each() -> None:
    found = _found_in([Numbered(place, reads=True) for place in range(8)])
    assert found == [place != 5 for place in range(8)]
