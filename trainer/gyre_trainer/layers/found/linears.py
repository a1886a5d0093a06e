"""Finds linear layers with a forward of their own, and tries each on a small twin."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gyre_trainer.layers.found.calls import without_hooks
from gyre_trainer.layers.found.side_effects import SideEffects
from gyre_trainer.layers.linear import LinearRule
from gyre_trainer.layers.projections import is_transposed_linear
from gyre_trainer.rotation.backward.deferred_grads import DeferredGrads
from gyre_trainer.rotation.rule import ModuleSlice, swapped
from gyre_trainer.shards.layout import Layout

_INPUTS, _OUTPUTS_OF_A_SLICE = 5, 3


def is_projection(module: nn.Module) -> bool:
    """Whether a block may have this layer: a linear one, whatever its class.

    Its weight is a parameter, and not computed from others by a hook.
    """
    if module._parameters.get("weight") is None:
        return False
    return (
        _is_plain(module)
        or is_transposed_linear(module)
        or _is_tried(module, 1, lambda twin, x: F.linear(x, twin.weight, twin.bias))
    )


def find_linear_rule(module: nn.Module, num_slices: int) -> LinearRule | None:
    """The rule by which a linear layer with a forward of its own rotates; None for any other.

    What its slices make must be, side by side, what a small twin makes, in training and in
    evaluation, and so must the gradients. Random numbers are drawn later as if none had been drawn
    here.
    """
    fits = _is_tried(module, num_slices, lambda twin, x: _by_slices(twin, x, num_slices))
    return LinearRule() if fits else None


def _is_plain(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _is_tried(
    module: nn.Module, num_slices: int, other: Callable[[nn.Linear, Tensor], Tensor]
) -> bool:
    """Whether it is a layer with a forward of its own that computes as the ``other`` way does."""
    if not isinstance(module, nn.Linear) or _is_plain(module):
        return False
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 2 or not weight.is_floating_point():
        return False
    if module._parameters.keys() != {"weight", "bias"} or any(module.children()):
        return False
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(0)  # no other device has the fork
        try:
            twin = _twin(module, _OUTPUTS_OF_A_SLICE * num_slices)
            return all(_are_alike(twin.train(mode), other) for mode in (True, False))
        except Exception:  # foreign code, that may take other arguments
            return False


def _twin(module: nn.Linear, num_outputs: int) -> nn.Linear:
    """A copy in float64 with few features, and random values in the place of tensors."""
    shapes = {"weight": (num_outputs, _INPUTS), "bias": (num_outputs,)}
    instead: dict[int, Any] = {
        id(tensor): nn.Parameter(torch.randn(shapes[name], dtype=torch.float64))
        for name, tensor in module.named_parameters()
    }
    for buffer in module.buffers():
        instead[id(buffer)] = torch.randn(buffer.shape, dtype=torch.float64)
    if hasattr(module, "config"):
        instead[id(module.config)] = module.config
    twin = without_hooks(deepcopy(module, instead))
    twin.in_features, twin.out_features = _INPUTS, num_outputs
    return twin


def _by_slices(twin: nn.Linear, x: Tensor, num_slices: int) -> Tensor:
    """The outputs of all slices, side by side."""
    rule = LinearRule()
    layout = Layout(tuple(rule.cuts(twin, num_slices)), num_slices)
    outputs = []
    for index in range(num_slices):
        bounds = layout.bounds_in(index)
        weights = {name: twin.get_parameter(name)[slice(*bounds[name])] for name in bounds}
        current = ModuleSlice(
            twin, twin.forward, weights, bounds, DeferredGrads({}), num_slices, layout.cuts
        )
        with swapped(twin, weights):
            outputs.append(rule.run(current, x))
    return torch.cat(outputs, -1)


def _are_alike(twin: nn.Linear, other: Callable[[nn.Linear, Tensor], Tensor]) -> bool:
    """Whether both give the same outputs and gradients, and draw no random numbers.

    Raises:
        TypeError: it writes to its tensors, or counts its calls.
    """
    x = torch.randn(2, 3, _INPUTS, dtype=torch.float64, requires_grad=True)
    state = torch.get_rng_state()
    first = SideEffects(twin, x)
    whole = twin(x)
    first.require_none_of_whole()
    more = SideEffects(twin)
    outputs = whole, other(twin, x)
    more.require_none_of_more_calls()
    if not torch.equal(torch.get_rng_state(), state):
        return False
    leaves, grad = (x, *twin.parameters()), torch.randn_like(outputs[0])
    one, two = ([output, *_grads(output, leaves, grad)] for output in outputs)
    return all(map(torch.allclose, one, two))


def _grads(output: Tensor, leaves: Sequence[Tensor], grad: Tensor) -> Sequence[Tensor]:
    return torch.autograd.grad(output, leaves, grad, materialize_grads=True)
