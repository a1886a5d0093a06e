"""A rotated model that is compiled as one graph computes what it does without a compiler."""

import gc
import shutil
import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo.utils
import torch.distributed as dist
import torch.nn.functional as F
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.mlp import MLP, MLPRule
from gyre_trainer.rotate import (
    RotationPolicy,
    compile_whole,
    rotate_all,
)
from gyre_trainer.rotation import graph_sites, pass_operator
from torch import Tensor, nn

from tests.distributed.comparing import apart
from tests.distributed.conftest import StartEither, StartRanks
from tests.distributed.models.families import VOCABULARY, made
from tests.distributed.training import (
    EVEN,
    Variant,
    batch,
    default_dtype,
    rotated_gpt,
    whole,
    whole_parameters,
)

BACKEND = "aot_eager"  # divides a graph into forward and backward, and needs no C++ compiler
NUM_STEPS = 3
WIDTH = 8


def mine(rows: Tensor) -> Tensor:
    return rows.chunk(dist.get_world_size())[dist.get_rank()]


def begin() -> None:
    """Forget all graphs, and ignore the compiler's own warnings."""
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def num_graphs() -> int:
    found: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return found


def num_kept() -> tuple[int, int]:
    """How many modules graphs know, and how many ring passes wait for backward."""
    gc.collect()
    return len(graph_sites._MODULES), len(pass_operator._PASSES)


class Trained(NamedTuple):
    """What the steps of one rank gave.

    Attributes:
        apart: the distance of parameters from one process's.
        evaluated: that of the logits in evaluation, without gradients.
        num_graphs: the number of graphs after each step, one of them after an evaluation.
        num_breaks: how often a graph was broken.
        with_cache: why a call with a cache of keys and values was refused.
    """

    apart: float
    evaluated: float
    num_graphs: list[int]
    num_breaks: int
    with_cache: str


def train_llama(policy: RotationPolicy, num_layers: int) -> Trained:
    """Train a Llama of the library on this rank, and in one process."""
    begin()
    model, alone = (made("Llama", num_hidden_layers=num_layers) for _ in range(2))
    rotate_all(model, mesh=make_mesh("cpu"), policy=policy)
    compile_whole(model, backend=BACKEND)
    both = [(each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in (model, alone)]
    found = []
    for step in range(NUM_STEPS + 1):
        if step == NUM_STEPS:
            logits = evaluated(model, mine)
            error = apart(logits, mine(evaluated(alone, lambda rows: rows)))
        for each, optimizer in both:
            rows = batch(step, VOCABULARY)[0]
            rows = mine(rows) if each is model else rows
            loss: Any = F.cross_entropy(each(input_ids=rows).logits.flatten(0, 1), rows.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(num_graphs())
    num_breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    with pytest.raises(RotationError) as refused:
        model(input_ids=rows, use_cache=True)
    after = whole_parameters(model)
    return Trained(
        max(apart(after[name], each) for name, each in whole_parameters(alone).items()),
        error,
        found,
        num_breaks,
        str(refused.value),
    )


def evaluated(model: Any, part: Callable[[Tensor], Tensor]) -> Tensor:
    """The second call in evaluation; the first one makes checks, without a compiler."""
    model.eval()
    with torch.no_grad():
        outputs = [model(input_ids=part(batch(0, VOCABULARY)[0])).logits for _ in range(2)]
    model.train()
    assert isinstance(outputs[1], Tensor)
    return outputs[1]


@pytest.mark.parametrize(
    ("recompute", "num_layers"),
    [
        (False, 1),
        pytest.param(False, 2, marks=pytest.mark.models),
        pytest.param(True, 2, marks=pytest.mark.models),
    ],
)
def test_one_graph_trains_as_one_process_and_compiles_once(
    ranks_both_ways: StartEither, recompute: bool, num_layers: int
) -> None:
    policy = RotationPolicy(recompute=recompute)
    for found in ranks_both_ways(2).run(train_llama, policy, num_layers):
        assert found.apart <= 1e-6  # its norms compute in float32
        assert found.evaluated <= 1e-6
        # the first step runs without a compiler; the second graph is that of the evaluation
        assert found.num_graphs == [0, 1, 1, 2]
        assert found.num_breaks == 0
        assert "DynamicCache" in found.with_cache
        assert "such as a cache (use_cache=False)" in found.with_cache


def gradients(model: nn.Module, but: str = " ") -> list[Tensor]:
    """The gradients of all parameters but those whose names begin with ``but``."""
    parameters = [p for name, p in model.named_parameters() if not name.startswith(but)]
    found = [whole(each.grad) for each in parameters if each.grad is not None]
    assert len(found) == len(parameters)
    model.zero_grad()
    return found


def two_forwards_of_a_gpt() -> tuple[float, list[tuple[int, int]]]:
    """How far gradients are from those without a compiler, and what was kept when.

    It is before there is a model, while backward is awaited, after it, after a forward without one,
    and when the model is gone.
    """
    begin()
    kept = [num_kept()]
    model = rotated_gpt(Variant(EVEN))
    plain = deepcopy(model)
    compile_whole(model, backend=BACKEND)
    parts = [mine(batch(step, EVEN.vocab_size)[0]) for step in range(2)]
    model(parts[0])  # without a compiler
    found = []
    for each in (model, plain):
        loss: Any = sum(each(part).square().mean() for part in parts)
        if each is model:
            kept.append(num_kept())
        loss.backward()
        found.append(gradients(each))
    kept.append(num_kept())
    unused = model(parts[0])
    del unused, loss
    kept.append(num_kept())
    del model, each
    kept.append(num_kept())
    return max(apart(*both) for both in zip(*found, strict=True)), kept


def test_each_forward_has_its_own_backward_and_nothing_outlives_a_model(
    ranks_both_ways: StartEither,
) -> None:
    for distance, kept in ranks_both_ways(2).run(two_forwards_of_a_gpt):
        assert distance == 0
        num_modules, num_passes = kept[1]
        assert num_modules > 0
        assert num_passes == 2 * num_modules
        assert kept == [(0, 0), kept[1], (num_modules, 0), (num_modules, 0), (0, 0)]


class Doubling(nn.Module):
    """Two linear layers with dropout between them; returns None, or twice the output, as well."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 12, bias=False)
        self.dropout = nn.Dropout(0.5)
        self.down = nn.Linear(12, WIDTH, bias=False)
        self.in_dict = False

    def forward(self, x: Tensor, mask: Tensor | None = None, *, doubles: bool = False) -> Any:
        y = self.down(self.dropout(self.up(x if mask is None else x * mask).relu()))
        twice = 2 * y if doubles else None
        return {"y": y, "twice": twice} if self.in_dict else (y, twice)


class Model(nn.Module):
    """A model with all that a graph may have, and with a module that is seldom called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = MLP(WIDTH, 12, bias=True)
        self.pair = Doubling()
        self.seldom = Doubling()
        self.head = nn.Linear(WIDTH, 5)

    def forward(
        self, x: Tensor, *, doubles: bool = False, seldom: bool = False, autocast: bool = False
    ) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            x = x + self.mlp(self.norm(x))
        mask = x.detach() > 0
        y, twice = self.pair(x, mask if seldom else None, doubles=doubles)
        if seldom:
            y = self.seldom(y)[0]
        output: Tensor = self.head(y if twice is None else y + twice)
        return output


RULES: Any = {Doubling: MLPRule(ups=("up",), down="down", dropouts=("dropout",))}


def both_models(policy: RotationPolicy | None = None) -> tuple[Model, Model]:
    """A model that is compiled as one graph, and its copy without a compiler, both called once."""
    begin()
    torch.manual_seed(0)
    model = Model()
    rotate_all(model, mesh=make_mesh("cpu"), rules=RULES, policy=policy or RotationPolicy())
    plain = deepcopy(model)
    compile_whole(model, backend=BACKEND)
    for each in (model, plain):
        each(torch.ones(3, WIDTH))
    return model, plain


def under_each_call() -> dict[str, float]:
    """By call: how far the output and gradients are from those without a compiler."""
    model, plain = both_models()
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    around = torch.autocast("cpu", torch.bfloat16)
    calls: dict[str, Callable[[Model], Tensor]] = {
        "with None": lambda each: each(x),
        "with a tensor": lambda each: each(x, doubles=True),
        "with autocast inside": lambda each: each(x, autocast=True),
        "with autocast around": lambda each: around(each.__call__)(x),
        "with None again": lambda each: each(x),
    }
    found, outputs = {}, {}
    for name, call in calls.items():
        found[name], outputs[name] = compared(model, plain, call)
    assert all(apart(outputs["with None"], outputs[name]) > 0 for name in list(calls)[1:4])
    assert num_graphs() == 4
    model, plain = both_models(RotationPolicy(compute_dtype=torch.bfloat16))
    found["in half precision"], _ = compared(model, plain, calls["with None"])
    assert num_graphs() == 1
    return found


def compared(model: Model, plain: Model, call: Callable[[Model], Tensor]) -> tuple[float, Tensor]:
    """How far the output and all gradients of two models are apart, and the output."""
    results = []
    for each in (model, plain):
        torch.manual_seed(3)  # of dropout
        output = call(each)
        (output.float() ** 2).mean().backward()  # type: ignore[no-untyped-call]
        results.append([output, *gradients(each, but="seldom")])
    return max(apart(*both) for both in zip(*results, strict=True)), output


def test_outputs_of_another_form_and_autocast_are_compiled_by_themselves(
    ranks_both_ways: StartEither,
) -> None:
    for found in ranks_both_ways(2).run(under_each_call):
        assert set(found.values()) == {0.0}, found


def refused_calls() -> list[str]:
    model, plain = both_models()
    x = torch.ones(3, WIDTH)
    messages = []

    def refuse(call: Callable[[], Any]) -> None:
        with pytest.raises(RotationError) as refused:
            call()
        messages.append(str(refused.value))

    model(x)
    refuse(lambda: model(x, seldom=True))
    loss: Any = model(x).sum()
    loss.backward(retain_graph=True)
    refuse(loss.backward)
    model.pair.in_dict = True
    refuse(lambda: model(x))
    model.pair.in_dict = False
    assert apart(model.eval()(x), plain.eval()(x)) == 0
    return messages


def outputs_of_a_copy() -> tuple[float, float]:
    """The largest outputs of a model and of its copy, whose parameters are zero."""
    model, _ = both_models()
    copied = deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    x = torch.ones(3, WIDTH)
    found = [float(each(x).abs().max()) for each in (model, copied, model)]
    assert num_graphs() == 2
    return found[2], found[1]


def test_graphs_tell_a_copy_from_its_model(ranks: StartRanks) -> None:
    for of_model, of_copy in ranks(2).run(outputs_of_a_copy):
        assert of_model > 0
        assert of_copy == 0


def test_calls_that_a_graph_does_not_fit_are_refused(ranks: StartRanks) -> None:
    for unchecked, again, other in ranks(2).run(refused_calls):
        assert "the rule of a RotatedDoubling was not checked" in unchecked
        assert (
            "call the model once so that it reaches all modules, before compile_whole" in unchecked
        )
        assert "ran before; it can run once after each forward" in again
        assert "RotatedDoubling returned another output than when its graph was compiled" in other
        assert "call torch._dynamo.reset()" in other


def gradients_by_the_inductor() -> float:
    """How far gradients of a small model are from those without a compiler."""
    begin()
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.LayerNorm(8), MLP(8, 12, bias=True), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8)
        )
        x = torch.randn(6, 8) + dist.get_rank()
    rotate_all(model, mesh=make_mesh("cpu"))
    compile_whole(model)
    found: list[list[Tensor]] = []
    for _ in range(2):  # without a compiler, and with it
        loss: Any = model(x).square().mean()
        loss.backward()
        found.append(gradients(model))
    return max(apart(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.skipif(not shutil.which("g++"), reason="the inductor needs a C++ compiler")
def test_the_inductor_reuses_no_memory_that_a_ring_pass_needs(ranks_both_ways: StartEither) -> None:
    for distance in ranks_both_ways(2).run(gradients_by_the_inductor):
        assert distance <= 1e-12
