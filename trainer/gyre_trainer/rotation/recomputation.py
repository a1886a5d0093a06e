"""Activations that no graph keeps: the graph node that computed one computes it again in backward.

A norm keeps its input for its own backward. A module that reads the norm's output, and needs it
again in backward, can have it recomputed from that input. The inputs are saved as torch's own
functions save theirs, so `torch.utils.checkpoint` around them drops them as well.

Also here:

* Random numbers that a slice drew in forward, drawn again when backward computes it again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from gyre_trainer.rotation.rule import autocast_of_now
from gyre_trainer.torch_internals import base_of, version_of, without_dispatch


class Randomness:
    """The states of torch's generators before each slice; backward draws the same numbers again."""

    def __init__(self, device: torch.device) -> None:
        """``device`` is that of the parameters; the CPU's generator is replayed, too."""
        self._generators = generators_of(device)
        self._states: dict[int, list[Tensor]] = {}

    def record(self, index: int) -> None:
        """Note the states: slice ``index`` computes now for the first time."""
        self._states[index] = states_of(self._generators)

    @contextmanager
    def replaying(self, index: int) -> Iterator[None]:
        """A context in which slice ``index`` draws the same random numbers once more."""
        now = states_of(self._generators)
        _set_states(self._generators, self._states.pop(index))
        try:
            yield
        finally:
            _set_states(self._generators, now)


def generators_of(device: torch.device) -> list[torch.Generator]:
    """The generators that a module with parameters on ``device`` draws from; the CPU's is first."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators


def states_of(generators: Sequence[torch.Generator]) -> list[Tensor]:
    """The states of generators."""
    with without_dispatch():
        return [generator.get_state() for generator in generators]


def _set_states(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    with without_dispatch():
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


Compute = Callable[..., Tensor]
_VERSION = "version_of_recomputed"


def recomputed(compute: Compute, *inputs: Tensor) -> Tensor:
    """``compute(*inputs)``; the graph keeps its inputs alone. See `recomputation_of`.

    Args:
        compute: gives the same bits every time, and one tensor that is no view of an input.
        inputs: every tensor that the result depends on and that takes a gradient.
    """
    output: Tensor = _Recomputed.apply(compute, *inputs)  # type: ignore[no-untyped-call]
    if output.grad_fn is not None:
        setattr(output.grad_fn, _VERSION, version_of(output))  # the context of `_Recomputed`
    return output


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Compute, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.compute, ctx.inputs = compute, None
        ctx.autocast = autocast_of_now(inputs[0].device)
        return compute(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        inputs = _inputs(ctx)
        ctx.inputs = None
        leaves = [
            x.detach().requires_grad_(needed)
            for x, needed in zip(inputs, ctx.needs_input_grad[1:], strict=True)
        ]
        with torch.enable_grad(), ctx.autocast():
            edge = get_gradient_edge(ctx.compute(*leaves))  # releases the output itself
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        grads = iter(torch.autograd.grad(edge, wanted, grad_output, allow_unused=True))
        return None, *(next(grads) if leaf.requires_grad else None for leaf in leaves)


def _inputs(node: Any) -> Sequence[Tensor]:
    """The inputs of a `_Recomputed` node.

    They are unpacked once for all readers in one backward, because a checkpoint gives them out
    once.
    """
    if node.inputs is None:
        node.inputs = node.saved_tensors
    inputs: Sequence[Tensor] = node.inputs
    return inputs


@dataclass(frozen=True, slots=True)
class Recomputation:
    """How to compute a tensor again in the backward of a module that reads it.

    Attributes:
        node: the graph node that computed the tensor, or the tensor's base if it is a view.
        view: size, stride and offset of the view, and the stride of its base; None for no view.
    """

    node: Any
    view: tuple[Sequence[int], Sequence[int], int, Sequence[int]] | None = None

    @torch.no_grad()
    def compute_again(self, cache: dict[Any, Tensor]) -> Tensor:
        """The tensor, detached from the graph.

        ``cache`` has the results of nodes for other readers that ask at the same time.
        """
        if self.node not in cache:
            with self.node.autocast():
                cache[self.node] = self.node.compute(*_inputs(self.node))
        whole = cache[self.node].detach()
        if self.view is None:
            return whole
        size, stride, offset, whole_stride = self.view
        assert whole.stride() == whole_stride
        return whole.as_strided(size, stride, offset)


def recomputation_of(tensor: Tensor) -> Recomputation | None:
    """How to compute ``tensor`` again; None if `recomputed` did not make it, or if it changed.

    A view of such a result has a recomputation too.
    """
    whole = base_of(tensor)
    node: Any = whole.grad_fn
    if (
        getattr(node, _VERSION, None) != version_of(whole)  # another node has none
        or tensor.dtype != whole.dtype
    ):
        return None
    if whole is tensor:
        return Recomputation(node)
    return Recomputation(
        node, (tensor.size(), tensor.stride(), int(tensor.storage_offset()), whole.stride())
    )


def recomputable(tensor: Tensor) -> tuple[Tensor, Recomputation | None]:
    """The same tensor, and how backward gets it again without its reader keeping it.

    Where no node can compute it again, a node before the reader keeps it. The second item is None
    for a tensor that takes no gradient, since such a node would not be in the graph.
    """
    recomputation = recomputation_of(tensor)
    if recomputation is not None or not tensor.requires_grad:
        return tensor, recomputation
    same = recomputed(_same, tensor)
    return same, Recomputation(same.grad_fn)


def _same(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)
