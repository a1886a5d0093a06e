"""A small twin of a block: the same code with narrow layers, on which a rule is tried."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gyre_trainer.layers.attention import AttentionRule
from gyre_trainer.layers.mlp import MLPRule
from gyre_trainer.layers.projections import (
    features_of,
    is_projection,
    is_transposed_linear,
    owner_of,
)
from gyre_trainer.rotation.backward.deferred_grads import DeferredGrads
from gyre_trainer.rotation.backward.module_attributes import tensor_among, written_by
from gyre_trainer.rotation.call import may_be_returned
from gyre_trainer.rotation.rule import ModuleSlice, Rule, swapped
from gyre_trainer.shards.layout import Layout

# The twin's width; its heads are as many and as wide as the module's.
_WIDTH = 8
_BATCH, _TIME = 2, 3
# Attention takes its softmax in float32, even of float64.
_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class _Call:
    """Whether the twin is in training, and whether it gets a mask.

    Attributes:
        training: whether it is.
        masked: whether it does.
        given: the name of another argument that it gets, a number for each pair of positions and
            each head; empty for none.
    """

    training: bool
    masked: bool
    given: str = ""


# Attention with a mask may be other code than attention without.
_CALLS = _Call(True, False), _Call(False, False), _Call(False, True)
_MASK = "attention_mask"
# Numbers for each head that no model gives in training: with them, slices are refused by name.
_OF_HEADS = "head_mask"
_HEAD_COUNTS = "num_attention_heads", "num_heads", "n_heads", "n_head"


@dataclass(frozen=True, slots=True)
class Twin:
    """A module of the same code with small layers, and arguments to call it with.

    Attributes:
        module: float64, with random values.
        rule: the rule on trial.
        layout: how the rule cuts the twin.
        arguments: by the names of the forward's parameters, without a mask.
        expected: the whole module's outputs of each call, once known; None where it takes no mask.
    """

    module: nn.Module
    rule: Rule
    layout: Layout
    arguments: dict[str, Any]
    expected: dict[_Call, list[Tensor] | None] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module, rule: Rule, num_slices: int) -> "Twin":
        """A twin of ``module``, whose own parameters may be on `meta`."""
        # What `deepcopy` finds here it takes instead of a copy.
        instead: dict[int, Any] = {
            id(parameter): nn.Parameter(torch.randn(parameter.shape, dtype=torch.float64))
            for parameter in module.parameters()
            if parameter.ndim == 1
        }
        for name, layer in module.named_children():
            if not is_projection(layer):
                continue
            inputs, outputs = _small(rule, name, layer, num_slices)
            shape = (inputs, outputs) if is_transposed_linear(layer) else (outputs, inputs)
            weight = torch.randn(shape, dtype=torch.float64) / inputs**0.5
            instead[id(layer.weight)] = nn.Parameter(weight)
            if layer.bias is not None:
                instead[id(layer.bias)] = nn.Parameter(torch.randn(outputs, dtype=torch.float64))
        if hasattr(module, "config"):
            instead[id(module.config)] = module.config
        twin = deepcopy(module, instead)
        layout = Layout(tuple(rule.cuts(twin, num_slices)), num_slices)
        return cls(twin, rule, layout, _arguments(twin, rule))

    def fits(self) -> bool:
        """Whether the slices' outputs make the module's, in both modes and with a mask."""
        try:
            return all(self._fits(call) for call in (*_CALLS, *self._given_calls()))
        except Exception:  # foreign code, on a slice that it may not take
            return False

    def numbers_read(self) -> dict[str, int]:
        """The whole numbers that the forward reads, of the module and of its ``config``."""
        read: dict[str, int] = {}
        if not self.expected:  # it cannot be called like this
            return read
        try:
            with reads_recorded(self.module) as names:
                for call in _CALLS[1:]:
                    if self._is_possible(call):
                        self.module(**self._arguments(call))
        except Exception:  # foreign code, that may look at its class
            return read
        for name in names:
            owner, last = owner_of(self.module, name)
            value = getattr(owner, last, None)
            if type(value) is int and value > 0:
                read[name] = value
        return read

    def _given_calls(self) -> Iterator[_Call]:
        """Calls with what may be for all heads, as a bias by positions that the model makes."""
        if isinstance(self.rule, AttentionRule):
            for parameter in inspect.signature(self.module.forward).parameters.values():
                name, is_optional = parameter.name, parameter.default is None
                if is_optional and name not in self.arguments and not name.endswith(_OF_HEADS):
                    yield _Call(False, False, name)

    def _arguments(self, call: _Call) -> dict[str, Any]:
        if call.given:
            owners = (self.module, getattr(self.module, "config", None))
            counts = [getattr(owner, name, None) for name in _HEAD_COUNTS for owner in owners]
            num_heads = next((each for each in counts if type(each) is int), 1)
            bias = torch.linspace(-1, 1, num_heads * _TIME * _TIME, dtype=torch.float64)
            return self.arguments | {call.given: bias.view(1, num_heads, _TIME, _TIME)}
        if not call.masked:
            return self.arguments
        mask = torch.linspace(-1, 1, _TIME * _TIME, dtype=torch.float64).view(1, 1, _TIME, _TIME)
        return self.arguments | {_MASK: mask.expand(_BATCH, -1, -1, -1)}

    def _is_possible(self, call: _Call) -> bool:
        if call.given:
            return self._whole(call) is not None
        return not call.masked or (_MASK in self.arguments and self._whole(call) is not None)

    def _whole(self, call: _Call) -> list[Tensor] | None:
        """The whole module's outputs; None where it takes no such mask, or no such argument."""
        if call not in self.expected:
            self.module.train(call.training)
            written = written_by(self.module)
            try:
                self.expected[call] = _outputs(self.module(**self._arguments(call)))
                # others may read it, and it would be that of one slice
                if (name := tensor_among(written())) is not None:
                    raise TypeError(f"keeps a tensor as {name}")
            except Exception:  # foreign code, with an argument of another form than it takes
                if not (call.masked or call.given):
                    raise
                self.expected[call] = None
        return self.expected[call]

    def _fits(self, call: _Call) -> bool:
        """Whether they do in one call, and without random numbers."""
        if not self._is_possible(call):
            return True
        self.module.train(call.training)
        state = torch.get_rng_state()
        expected = self._whole(call)
        assert expected is not None
        reductions = [
            self.rule.output_reduction(position, self.layout, output.dtype)
            for position, output in enumerate(expected)
        ]
        for index in range(self.layout.num_slices):
            outputs = _outputs(self._run(index, self._arguments(call)))
            for reduction, output in zip(reductions, outputs, strict=True):
                reduction.add(index, output)
        found = [reduction.result() for reduction in reductions]
        return torch.equal(torch.get_rng_state(), state) and all(
            torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE)
            for one, other in zip(found, expected, strict=True)
        )

    def _run(self, index: int, arguments: dict[str, Any]) -> Any:
        weights, bounds = {}, {}
        for cut in self.layout.cuts:
            start, stop = bounds[cut.name] = self.layout.bounds(cut, index)
            whole, ranges = self.module.get_parameter(cut.name), self.layout.ranges(cut, index)
            part = torch.cat([whole.narrow(cut.dim, a, b - a) for a, b in ranges], cut.dim)
            weights[cut.name] = F.pad(part, (start, cut.shape[0] - stop)) if cut.padded else part
        module, layout = self.module, self.layout
        current = ModuleSlice(
            module,
            module.forward,
            weights,
            bounds,
            DeferredGrads({}),
            layout.num_slices,
            layout.cuts,
        )
        with swapped(module, weights):
            return self.rule.run(current, **arguments)


def _small(rule: Rule, name: str, layer: nn.Module, num_slices: int) -> tuple[int, int]:
    """Input and output features of a layer of the twin."""
    if isinstance(rule, MLPRule):
        hidden = 2 * num_slices + 1
        return (hidden, _WIDTH) if name == rule.down else (_WIDTH, hidden * rule.num_packed)
    assert isinstance(rule, AttentionRule)
    inputs, outputs = features_of(layer)
    return (inputs, _WIDTH) if name == rule.output else (_WIDTH, outputs)


@contextmanager
def reads_recorded(module: nn.Module) -> Iterator[list[str]]:
    """A context that records the attributes that are read: the module's, and those of its config.

    Yields:
        Names such as "num_heads" and "config.num_heads", each once, complete after the context.
    """
    names: dict[str, None] = {}
    before = dict(vars(module))
    cls = type(module)
    found: list[str] = []
    try:
        module.__class__ = _recording(cls, "", names)
        if "config" in before:
            vars(module)["config"] = copy(before["config"])
            # a dictionary, a frozen dataclass or None takes no other class, and has no counts
            with suppress(TypeError, AttributeError):
                module.config.__class__ = _recording(type(before["config"]), "config.", names)
        yield found
    finally:
        module.__class__ = cls
        vars(module).update(before)
        found += names


def _recording(cls: type, prefix: str, names: dict[str, None]) -> type:
    """A subclass whose objects add the names of attributes that are read to ``names``."""
    base: Any = cls

    def read(self: Any, name: str) -> Any:
        names[prefix + name] = None
        return base.__getattribute__(self, name)

    return type(cls.__name__, (cls,), {"__getattribute__": read})


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
        elif parameter.name == _MASK:
            arguments[parameter.name] = None
        elif parameter.default is parameter.empty:
            raise TypeError(parameter.name)
    return arguments


def _head_dim(module: nn.Module) -> int:
    """The channels of a head that have rotary positions."""
    head_dim: int = getattr(module, "head_dim", None) or module.head_size  # type: ignore[assignment]
    return int(head_dim * getattr(getattr(module, "config", None), "partial_rotary_factor", 1.0))


def _outputs(output: Any) -> list[Tensor]:
    """The tensors of an output.

    Raises:
        TypeError: there is none, or there may be others inside of an object.
    """
    leaves = tree_leaves(output)
    odd = next((leaf for leaf in leaves if not may_be_returned(leaf)), None)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if odd is not None or not tensors:
        raise TypeError(f"returns {type(output if odd is None else odd).__name__}")
    return tensors
