"""Activations that nobody keeps: the node of the graph that made one makes it once more.

A norm keeps its input for its own backward. Who reads its output, and wants it again in backward, need not keep that too.
What is kept lies in the graph as torch's own functions keep theirs, so `torch.utils.checkpoint` around it drops that as well.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

Compute = Callable[..., Tensor]


def recomputed(compute: Compute, *inputs: Tensor) -> Tensor:
    """``compute(*inputs)``, of which the graph keeps the inputs alone; `recipe_of` finds how it is made again.

    Args:
        compute: gives the same bits every time, and one tensor that is no view of an input.
        inputs: all that it depends on and that takes a gradient.
    """
    output: Tensor = _Recomputed.apply(compute, *inputs)  # type: ignore[no-untyped-call]
    if output.grad_fn is not None:
        output.grad_fn.version = output._version  # type: ignore[attr-defined]  # the node is the context of `_Recomputed`
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
        leaves = [x.detach().requires_grad_(needed) for x, needed in zip(_inputs(ctx), ctx.needs_input_grad[1:], strict=True)]
        ctx.inputs = None
        with torch.enable_grad(), ctx.autocast():
            edge = get_gradient_edge(ctx.compute(*leaves))  # without the output itself, which no gradient needs
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        grads = iter(torch.autograd.grad(edge, wanted, grad_output, allow_unused=True))
        return None, *(next(grads) if leaf.requires_grad else None for leaf in leaves)


def _inputs(node: Any) -> Sequence[Tensor]:
    """Of a `_Recomputed`; unpacked once for all who ask in one backward, since a checkpoint gives them out once."""
    if node.inputs is None:
        node.inputs = node.saved_tensors
    inputs: Sequence[Tensor] = node.inputs
    return inputs


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a tensor is made once more, in the backward of who reads it.

    Attributes:
        node: that made it, or what it is a view of.
        view: its size, stride and offset, and the stride of what it is a view of; None for no view.
    """

    node: Any
    view: tuple[Sequence[int], Sequence[int], int, Sequence[int]] | None = None

    @torch.no_grad()
    def make(self, made: dict[Any, Tensor]) -> Tensor:
        """The tensor, cut off the graph; ``made`` has what nodes gave to others who ask for it at the same time."""
        if self.node not in made:
            with self.node.autocast():
                made[self.node] = self.node.compute(*_inputs(self.node))
        whole = made[self.node]
        if self.view is None:
            return whole.detach()
        size, stride, offset, whole_stride = self.view
        assert whole.stride() == whole_stride
        return whole.as_strided(size, stride, offset)


def recipe_of(tensor: Tensor) -> Recipe | None:
    """That of what `recomputed` gave and of views of it; None for any other tensor, and where it was written to."""
    whole = tensor if tensor._base is None else tensor._base
    node: Any = whole.grad_fn
    if not isinstance(node, _Recomputed._backward_cls) or node.version != whole._version or tensor.dtype != whole.dtype:  # type: ignore[attr-defined]
        return None
    if whole is tensor:
        return Recipe(node)
    return Recipe(node, (tensor.size(), tensor.stride(), int(tensor.storage_offset()), whole.stride()))


def remembered(tensor: Tensor) -> tuple[Tensor, Recipe | None]:
    """The same tensor, and how backward has it again without its reader keeping it.

    Where nobody makes it again, a node before the reader's keeps it. None for a tensor that takes no gradient, since such a
    node would be nowhere in the graph.
    """
    recipe = recipe_of(tensor)
    if recipe is not None or not tensor.requires_grad:
        return tensor, recipe
    same = recomputed(_same, tensor)
    return same, Recipe(same.grad_fn)


def autocast_of_now(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Makes contexts in which autocast is as it is now; but it keeps no weights that it cast, since these are visitors'."""
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return partial(torch.autocast, device.type, dtype, enabled, cache_enabled=False)


def _same(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)
