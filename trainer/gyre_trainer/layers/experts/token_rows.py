"""How a module with a list of experts is watched: rows of tokens, weights and sums of outputs."""

from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from gyre_trainer.rotation.backward.recomputation import SharedInput, recomputed
from gyre_trainer.rotation.backward.weighted_outputs import Weighing, weighing

_PRODUCTS = frozenset(
    (
        *(torch.mul, torch.multiply, Tensor.mul, Tensor.multiply),
        *(Tensor.__mul__, Tensor.__rmul__),
    )
)
_WATCH_GRADIENTS = (Tensor.register_hook, Tensor.retain_grad)
_INTEGERS = (torch.int64, torch.int32)


class WatchExperts(TorchFunctionMode):
    """A context: graphs keep neither the rows of tokens that experts get, nor what these return.

    Rows that are taken from a matrix of tokens are taken again in backward. What an expert returned
    is multiplied by its weights as [Note: Weighted outputs] says. A sum keeps nothing of the rows
    that are added to it; torch's would, for their shape.
    """

    def __init__(self, now: Weighing) -> None:
        super().__init__()
        self._now = now
        self._sources: list[tuple[Tensor, int, SharedInput]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if weighing() is not self._now:
            return func(*args, **kwargs)
        if func in _WATCH_GRADIENTS:
            self._now.require_not_weighted(args[0])
        result = None
        is_plain = torch.is_grad_enabled() and not kwargs
        if is_plain and len(args) == 2 and func in _PRODUCTS:
            result = self._now.weighted(*args)
        if result is None and getattr(func, "__name__", "") != "__get__":  # of an attribute
            self._now.used(tree_leaves((args, kwargs)))
        if is_plain and len(args) == 2 and func is Tensor.__getitem__:
            result = self._rows(*args)
        elif is_plain and len(args) == 4 and func is Tensor.index_add_:
            result = _added(*args)
        return func(*args, **kwargs) if result is None else result

    def _rows(self, tokens: Tensor, index: Any) -> Tensor | None:
        """``tokens[index]``; None where that are not the rows of one expert."""
        leading = isinstance(index, tuple) and len(index) == 2 and index[0] is None
        rows = index[1] if leading else index
        if not (
            isinstance(rows, Tensor)
            and (rows.dtype, rows.ndim) in ((each, 1) for each in _INTEGERS)
            and tokens.ndim == 2
            and tokens.is_floating_point()
            and tokens.requires_grad
            and tokens._version == 0  # what was written to may be again, before backward needs it
            and rows.device == tokens.device
            and len(rows) <= len(tokens)  # more are of all experts; each would take them all again
        ):
            return None
        taken = recomputed(_taken, tokens, rows, shared=self._shared(tokens))
        return taken.unsqueeze(0) if leading else taken

    def _shared(self, tokens: Tensor) -> SharedInput:
        for known, version, shared in self._sources:
            if known is tokens and known._version == version:
                return shared
        self._sources.append((tokens, tokens._version, SharedInput(tokens)))
        return self._sources[-1][-1]


def _added(total: Tensor, dim: Any, rows: Any, source: Any) -> Tensor | None:
    """``total.index_add_(dim, rows, source)``; None where autograd sees more in it."""
    is_own = total._base is None and (total.grad_fn is not None or not total.requires_grad)
    if not (
        is_own
        and dim == 0
        and isinstance(source, Tensor)
        and source.requires_grad
        and (source.dtype, source.ndim) == (total.dtype, total.ndim)
    ):
        return None
    with DisableTorchFunction():
        result: Tensor = _RowsAdded.apply(total, rows, source)  # type: ignore[no-untyped-call]
    return result


class _RowsAdded(torch.autograd.Function):
    """A matrix to which rows are added in place."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, rows: Tensor, source: Tensor) -> Tensor:
        ctx.mark_dirty(total)
        ctx.save_for_backward(rows)
        return total.index_add_(0, rows, source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return grad, None, grad.index_select(0, rows)


def _taken(tokens: Tensor, rows: Tensor) -> Tensor:
    return tokens.index_select(0, torch.where(rows < 0, rows + len(tokens), rows))
