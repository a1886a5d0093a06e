"""A small twin of a block: the same code with narrow layers, on which a rule is tried."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gyre_trainer.layers.attention import AttentionRule
from gyre_trainer.layers.found.calls import (
    WIDTH,
    arguments_by_heads,
    batched_arguments,
    is_invented,
    optional_arguments,
    other_arguments,
    outputs_of,
    parameters_of,
    plain_arguments,
    required_sources,
    returned,
    with_values,
    without_hooks,
)
from gyre_trainer.layers.found.linears import is_projection
from gyre_trainer.layers.found.needed import mask_of_windows, needed_arguments, times_of
from gyre_trainer.layers.found.side_effects import ReadsOfValues, SideEffects
from gyre_trainer.layers.mlp import MLPRule
from gyre_trainer.layers.projections import (
    features_of,
    is_table,
    is_transposed_linear,
    owner_of,
)
from gyre_trainer.rotation.backward.deferred_grads import DeferredGrads
from gyre_trainer.rotation.backward.dropout_masks import MASKS_ARGUMENT
from gyre_trainer.rotation.backward.inner_checkpoints import WatchCheckpoints
from gyre_trainer.rotation.backward.slice_dropout import (
    Dropout,
    Masks,
    Place,
    Undropped,
    dropout_inside,
)
from gyre_trainer.rotation.rule import ModuleSlice, swapped
from gyre_trainer.shards.layout import Layout

# Attention takes its softmax in float32, even of float64.
_TOLERANCE = 1e-4

BlockRule = AttentionRule | MLPRule


@dataclass(frozen=True, slots=True)
class _Call:
    """Whether the twin is in training, and which argument it gets beside those of each call."""

    training: bool
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Twin:
    """A module of the same code with small layers, and arguments to call it with.

    Attributes:
        module: float64, with random values.
        rule: the rule on trial, with the arguments by heads that were found.
        layout: how the rule cuts the twin.
        arguments: by the names of the forward's parameters, of all calls.
        others: likewise, of which each is given in one call: attention with a mask, with a bias, or
            to another source may be other code than attention without, and an MLP may add a
            residual.
        expected: the whole module's outputs of each call, once known; None where it cannot be
            called like this.
        dropouts: what it drops out in each call, once known. Nothing is dropped meanwhile.
        has_invented: whether there are buffers with other values than the module's.
    """

    module: nn.Module
    rule: BlockRule
    layout: Layout
    arguments: dict[str, Any]
    others: dict[str, Tensor]
    expected: dict[_Call, list[Tensor] | None] = field(default_factory=dict)
    dropouts: dict[_Call, list[Dropout]] = field(default_factory=dict)
    has_invented: bool = False

    @classmethod
    def of(cls, module: nn.Module, rule: BlockRule, num_slices: int) -> "Twin":
        """A twin of ``module``, whose own parameters may be on `meta`."""
        tables = [each for each in module._parameters.values() if each is not None]
        # What `deepcopy` finds here it takes instead of a copy.
        instead: dict[int, Any] = {
            id(parameter): nn.Parameter(torch.randn(parameter.shape, dtype=torch.float64))
            for parameter in module.parameters()
            if parameter.ndim == 1 or any(each is parameter for each in tables)
        }
        for name, layer in module.named_children():
            if is_table(layer):
                table = torch.randn(layer.weight.shape, dtype=torch.float64)
                instead[id(layer.weight)] = nn.Parameter(table)
            if not is_projection(layer):
                continue
            inputs, outputs = _small(rule, name, layer, num_slices)
            shape = (inputs, outputs) if is_transposed_linear(layer) else (outputs, inputs)
            weight = torch.randn(shape, dtype=torch.float64) / inputs**0.5
            instead[id(layer.weight)] = nn.Parameter(weight)
            if layer.bias is not None:
                instead[id(layer.bias)] = nn.Parameter(torch.randn(outputs, dtype=torch.float64))
        instead |= {id(each): with_values(each) for each in module.buffers() if is_invented(each)}
        if hasattr(module, "config"):
            instead[id(module.config)] = module.config
        twin = without_hooks(deepcopy(module, instead))
        layout = Layout(tuple(rule.cuts(twin, num_slices)), num_slices)
        attends = isinstance(rule, AttentionRule)
        arguments = _of_attention(twin.eval()) if attends else plain_arguments(twin, attends=False)
        others = other_arguments(twin, arguments)
        others = {name: each for name, each in others.items() if arguments.get(name) is None}
        others = optional_arguments(twin, arguments, {*arguments, *others}) | others
        if attends:
            others |= mask_of_windows(twin, arguments, others)
        if isinstance(rule, AttentionRule) and rule.num_heads(layout.cuts):
            found = arguments_by_heads(twin.eval(), arguments, rule.num_heads(layout.cuts))
            batched = tuple(batched_arguments(twin, arguments, found))
            rule = replace(rule, by_heads=tuple(found), batched=batched)
            required = {each.name for each in parameters_of(twin) if each.default is each.empty}
            arguments |= {name: found.pop(name) for name in tuple(found) if name in required}
            others |= found
        has_invented = any(map(is_invented, module.buffers()))
        return cls(twin, rule, layout, arguments, others, has_invented=has_invented)

    def fitting(self) -> BlockRule | None:
        """The rule, if the slices' outputs make the module's, in both modes, with each argument.

        It knows whether the module drops out.
        """
        try:
            calls = self._calls()
            if not all(map(self._fits, calls)) or any(map(self._checkpoints, calls)):
                return None
        except Exception:  # foreign code, on a slice that it may not take
            return None
        return replace(self.rule, drops_out=any(self.dropouts.values()))

    def _calls(self) -> list[_Call]:
        """The calls that the module takes, in training and in evaluation.

        It may drop out in some of them alone.

        Raises:
            StopIteration: it takes none in training.
        """
        names = None, *self.others
        trained = (_Call(True, name) for name in names)
        evaluated = [_Call(False, name) for name in names]
        first = next(call for call in trained if self._whole(call) is not None)
        others = [*trained, *evaluated]
        return [first, *(call for call in others if self._whole(call) is not None)]

    def _checkpoints(self, call: _Call) -> bool:
        """Whether the forward calls torch's checkpoint."""
        arguments = tree_map_only(Tensor, _taking_grad, self._arguments(call))
        self.module.train(call.training)
        with torch.enable_grad(), WatchCheckpoints() as watch:
            output = self.module(**arguments)
        return watch.found(returned(output, arguments))

    def numbers_read(self) -> dict[str, int]:
        """The whole numbers that the forward reads, of the module and of its ``config``."""
        read: dict[str, int] = {}
        if not self.expected:  # it cannot be called like this
            return read
        try:
            calls = self._calls()
            self.module.eval()
            with reads_recorded(self.module) as names:
                for call in calls:
                    if call.training:
                        continue
                    self.module(**self._arguments(call))
        except Exception:  # foreign code, that may look at its class
            return read
        for name in names:
            owner, last = owner_of(self.module, name)
            value = getattr(owner, last, None)
            if type(value) is int and value > 0:
                read[name] = value
        return read

    def _arguments(self, call: _Call) -> dict[str, Any]:
        return self.arguments | ({} if call.name is None else {call.name: self.others[call.name]})

    def _whole(self, call: _Call) -> list[Tensor] | None:
        """The whole module's outputs; None where it cannot be called like this.

        Raises:
            TypeError: it keeps a tensor as an attribute, counts its calls, or writes to buffers,
                parameters or arguments. Others may read the tensor, which would be that of one
                slice, and slices would count as calls. Or what it does depends on values that are
                not its own (`has_invented`).
        """
        if call not in self.expected:
            self.module.train(call.training)
            arguments, undropped = self._arguments(call), Undropped()
            first, reads = SideEffects(self.module, arguments), ReadsOfValues()
            with self._dropping(undropped, call), reads:
                outputs = outputs_of(self.module, arguments)
            first.require_none_of_whole()
            if self.has_invented:
                reads.require_none()
            self.expected[call], self.dropouts[call] = outputs, undropped.seen
        return self.expected[call]

    def _dropping(self, undropped: Undropped, call: _Call) -> AbstractContextManager[object]:
        """A context in which the whole module drops nothing in training, and tells what it would.

        In evaluation it must not drop out at all.
        """
        if not (self.rule.drops_out and call.training):
            return nullcontext()
        weights = {cut.name: self.module.get_parameter(cut.name) for cut in self.layout.cuts}
        return dropout_inside(weights, self.rule.linear_in, undropped, self._arguments(call))

    def _fits(self, call: _Call) -> bool:
        """Whether they do in one call, and without random numbers but those of dropout."""
        self.module.train(call.training)
        state = torch.get_rng_state()
        expected = self._whole(call)
        assert expected is not None
        if not expected:  # it returns what it was given
            return False
        effects = SideEffects(self.module)
        reductions = [
            self.rule.output_reduction(position, self.layout, output.dtype)
            for position, output in enumerate(expected)
        ]
        dropouts = []
        for index in range(self.layout.num_slices):
            arguments, undropped = self._arguments_of(index, call), Undropped()
            masks = undropped if self.rule.drops_out and call.training else None
            outputs = returned(self._run(index, arguments, masks), arguments)
            dropouts.append(undropped.seen)
            for reduction, output in zip(reductions, outputs, strict=True):
                reduction.add(index, output)
        effects.require_none_of_more_calls()
        found = [reduction.result() for reduction in reductions]
        return (
            torch.equal(torch.get_rng_state(), state)
            and all(
                torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE)
                for one, other in zip(found, expected, strict=True)
            )
            and _are_parts(self.dropouts[call], dropouts)
        )

    def _arguments_of(self, index: int, call: _Call) -> dict[str, Any]:
        """The arguments that a slice is given."""
        arguments = self._arguments(call)
        for name in arguments.keys() & set(self.rule.cut_arguments):
            cut = self.rule.argument_cut(name, arguments[name].shape, self.layout)
            if cut is not None:
                arguments[name] = cut.part(arguments[name], index)
        return arguments

    def _run(self, index: int, arguments: dict[str, Any], masks: Masks | None) -> Any:
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
            return self.rule.run(current, **arguments, **{MASKS_ARGUMENT: masks})


def _of_attention(twin: nn.Module) -> dict[str, Any]:
    """The arguments of all calls of an attention, with as many tokens as it takes."""
    plain: dict[str, Any] = {}
    for time in times_of(twin):
        arguments = plain_arguments(twin, attends=True, time=time) | required_sources(twin)
        plain = plain or arguments
        needed = needed_arguments(twin, arguments)
        if needed is not None:
            return arguments | needed
    return plain


def _taking_grad(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _are_parts(whole: Sequence[Dropout], slices: Sequence[Sequence[Dropout]]) -> bool:
    """Whether slices drop out parts of what the whole module does inside, and else the same."""
    return all(
        len(whole) == len(each) and [one.place for one in whole] == [one.place for one in each]
        for each in slices
    ) and all(
        _is_divided(one, parts) if one.place is Place.INSIDE else {one} == set(parts)
        for one, *parts in zip(whole, *slices, strict=True)
    )


def _is_divided(whole: Dropout, parts: Sequence[Dropout]) -> bool:
    """Whether each entry of a tensor that is dropped out is in one of the slices' tensors."""
    shapes = [part.shape for part in parts]
    sums = [sum(sizes) for sizes in zip(*shapes, strict=True)]
    different = [
        dim
        for dim, sizes in enumerate(zip(*shapes, whole.shape, strict=True))
        if len(set(sizes)) > 1
    ]
    one_dim = len(different) == 1 and sums[different[0]] == whole.shape[different[0]]
    return len(parts) == 1 or (one_dim and {part.rate for part in parts} == {whole.rate})


def _small(rule: BlockRule, name: str, layer: nn.Module, num_slices: int) -> tuple[int, int]:
    """Input and output features of a layer of the twin."""
    if isinstance(rule, MLPRule):
        hidden = 2 * num_slices + 1
        return (hidden, WIDTH) if name == rule.down else (WIDTH, hidden * rule.num_packed)
    assert isinstance(rule, AttentionRule)
    inputs, outputs = features_of(layer)
    return (inputs, WIDTH) if name == rule.output else (WIDTH, outputs)


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
        # torch and `copy` look at the dictionary of every module, and conclude nothing from it
        if name != "__dict__" or not _is_of_all_modules(sys._getframe(1).f_globals["__name__"]):
            names[prefix + name] = None
        return base.__getattribute__(self, name)

    return type(cls.__name__, (cls,), {"__getattribute__": read})


def _is_of_all_modules(code: str) -> bool:
    """Whether the Python module ``code`` handles modules of any class."""
    return code in ("torch.nn.modules.module", "copy", "copyreg") or code.startswith("gyre_trainer")
