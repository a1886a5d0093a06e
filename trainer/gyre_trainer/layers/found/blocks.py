"""Finds attention, MLPs and experts by their structure, and tries each finding before it is used.

A module with two or three linear layers may be an MLP, and one with four, or with two of which the
first makes queries, keys and values, an attention: the shapes of the layers say which could be the
last one, and a `config`, or the module's own attributes, how many key/value heads there are.
Nothing is concluded from names of classes. A small twin of the
module then shows whether its slices make its output.
"""

import inspect
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gyre_trainer.errors import RotationError
from gyre_trainer.layers.attention import AttentionRule
from gyre_trainer.layers.found.experts import find_experts_rule
from gyre_trainer.layers.mlp import MLPRule
from gyre_trainer.rotation.rule import Rule, swapped
from gyre_trainer.shards.layout import Layout

# The twin's width; its heads are as many and as wide as the module's.
_WIDTH = 8
_BATCH, _TIME = 2, 3
# Attention takes its softmax in float32, even of float64.
_TOLERANCE = 1e-4


def find_rule(module: nn.Module, num_slices: int) -> Rule | None:
    """The rule by which a module rotates as a whole; None where none was found.

    A rule is found where the outputs of a small twin, of the same code, are those of its slices, in
    training and in evaluation. Random numbers are drawn later as if none had been drawn here.
    """
    rules = [*_mlp_rules(module), *_attention_rules(module)] if _has_plain_layers(module) else []
    found = next((rule for rule in rules if _fits(module, rule, num_slices)), None)
    return found or find_experts_rule(module, num_slices)


def _has_plain_layers(module: nn.Module) -> bool:
    """Whether all matrices are those of linear layers directly inside, and nothing else is cut."""
    others = [child for child in module.children() if type(child) is not nn.Linear]
    inside = [parameter for child in others for parameter in child.parameters()]
    return not module._parameters and all(parameter.ndim <= 1 for parameter in inside)


def _linears(module: nn.Module) -> dict[str, nn.Linear]:
    return {name: child for name, child in module.named_children() if type(child) is nn.Linear}


def _mlp_rules(module: nn.Module) -> Iterator[Rule]:
    linears = _linears(module)
    if len(linears) not in (2, 3):
        return
    for down, last in linears.items():
        ups = {name: linear for name, linear in linears.items() if name != down}
        shape = last.in_features, last.out_features
        if all(tuple(up.weight.shape) == shape for up in ups.values()):
            yield MLPRule(ups=tuple(ups), down=down)


def _attention_rules(module: nn.Module) -> Iterator[Rule]:
    linears = _linears(module)
    for num_kv_heads, (output, last) in product(_head_counts(module), reversed(linears.items())):
        inputs = {name: linear for name, linear in linears.items() if name != output}
        widths = sorted(linear.out_features for linear in inputs.values())
        if (
            all(linear.in_features == last.out_features for linear in inputs.values())
            and _are_heads(widths, last.in_features)
            and widths[0] % num_kv_heads == 0
        ):
            yield AttentionRule(num_kv_heads, inputs=tuple(inputs), output=output)


def _are_heads(widths: list[int], num_channels: int) -> bool:
    """Whether layers of these widths may make keys, values and queries of ``num_channels``.

    One layer may make them all, if it has the rows of each head together; the trial shows that.
    """
    match widths:
        case [packed]:
            return packed > num_channels
        case [keys, values, queries]:
            return keys == values and queries == num_channels
    return False


def _head_counts(module: nn.Module) -> list[int]:
    """How many key/value heads there may be, the likeliest first."""
    names = "num_key_value_heads", "num_kv_heads", "num_attention_heads", "num_heads"
    owners = module, getattr(module, "config", None)
    found = (getattr(owner, name, None) for name, owner in product(names, owners))
    return list(dict.fromkeys(each for each in found if isinstance(each, int)))


def _fits(module: nn.Module, rule: Rule, num_slices: int) -> bool:
    """Whether the slices of a small twin make its output."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        try:
            twin = _Twin.of(module, rule, num_slices)
            return all(twin.fits(training=training) for training in (True, False))
        except RotationError:  # such as dropout, or heads that the ranks cannot share
            return False
        except Exception:  # foreign code, called with arguments that it may not take
            return False


@dataclass(frozen=True, slots=True)
class _Twin:
    """A module of the same code with small layers, and arguments to call it with.

    Attributes:
        module: float64, with random values.
        rule: the rule on trial.
        layout: how the rule cuts the twin.
        arguments: by the names of the forward's parameters.
    """

    module: nn.Module
    rule: Rule
    layout: Layout
    arguments: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module, rule: Rule, num_slices: int) -> "_Twin":
        """A twin of ``module``, whose own parameters may be on `meta`."""
        # What `deepcopy` finds here it takes instead of a copy.
        instead: dict[int, Any] = {
            id(parameter): nn.Parameter(torch.randn(parameter.shape, dtype=torch.float64))
            for parameter in module.parameters()
            if parameter.ndim == 1
        }
        for name, linear in _linears(module).items():
            rows, columns = _small(rule, name, linear, num_slices)
            weight = torch.randn(rows, columns, dtype=torch.float64) / columns**0.5
            instead[id(linear.weight)] = nn.Parameter(weight)
            if linear.bias is not None:
                instead[id(linear.bias)] = nn.Parameter(torch.randn(rows, dtype=torch.float64))
        if hasattr(module, "config"):
            instead[id(module.config)] = module.config
        twin = deepcopy(module, instead)
        layout = Layout(tuple(rule.cuts(twin, num_slices)), num_slices)
        return cls(twin, rule, layout, _arguments(twin, rule))

    def fits(self, *, training: bool) -> bool:
        """Whether the slices' outputs make the module's, and without random numbers."""
        self.module.train(training)
        state = torch.get_rng_state()
        expected = _outputs(self.module(**self.arguments))
        reductions = [
            self.rule.output_reduction(position, self.layout, output.dtype)
            for position, output in enumerate(expected)
        ]
        for index in range(self.layout.num_slices):
            with swapped(self.module, self._weights(index)):
                outputs = _outputs(self.module(**self.arguments))
            for reduction, output in zip(reductions, outputs, strict=True):
                reduction.add(index, output)
        found = [reduction.result() for reduction in reductions]
        return torch.equal(torch.get_rng_state(), state) and all(
            torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE)
            for one, other in zip(found, expected, strict=True)
        )

    def _weights(self, index: int) -> dict[str, Tensor]:
        weights = {}
        for cut in self.layout.cuts:
            start, stop = self.layout.bounds(cut, index)
            part = self.module.get_parameter(cut.name).narrow(cut.dim, start, stop - start)
            weights[cut.name] = F.pad(part, (start, cut.shape[0] - stop)) if cut.padded else part
        return weights


def _small(rule: Rule, name: str, linear: nn.Linear, num_slices: int) -> tuple[int, int]:
    """Rows and columns of a layer's weight in the twin."""
    if isinstance(rule, MLPRule):
        hidden = 2 * num_slices + 1
        return (_WIDTH, hidden) if name == rule.down else (hidden, _WIDTH)
    assert isinstance(rule, AttentionRule)
    if name == rule.output:
        return _WIDTH, linear.in_features
    return linear.out_features, _WIDTH


def _arguments(twin: nn.Module, rule: Rule) -> dict[str, Any]:
    """Arguments for the forward: activations first; rotary positions, and no mask, by their names.

    Raises:
        TypeError: the forward requires something else.
    """
    first, *others = inspect.signature(twin.forward).parameters.values()
    arguments: dict[str, Any] = {
        first.name: torch.randn(_BATCH, _TIME, _WIDTH, dtype=torch.float64)
    }
    for parameter in others:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name == "position_embeddings" and isinstance(rule, AttentionRule):
            angles = torch.randn(_BATCH, _TIME, _head_dim(twin), dtype=torch.float64)
            arguments[parameter.name] = angles.cos(), angles.sin()
        elif parameter.name == "attention_mask":
            arguments[parameter.name] = None
        elif parameter.default is parameter.empty:
            raise TypeError(parameter.name)
    return arguments


def _head_dim(module: nn.Module) -> int:
    """The channels of a head that have rotary positions."""
    head_dim: int = getattr(module, "head_dim", None) or module.head_size  # type: ignore[assignment]
    return int(head_dim * getattr(getattr(module, "config", None), "partial_rotary_factor", 1.0))


def _outputs(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
