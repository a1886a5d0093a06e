"""How a module with a list of experts is watched: rows of tokens, and weights of outputs."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gyre_trainer.rotation.backward.recomputation import SharedInput, recomputed
from gyre_trainer.rotation.backward.weighted_outputs import Weighing, weighing

_PRODUCTS = frozenset(
    (
        *(torch.mul, torch.multiply, Tensor.mul, Tensor.multiply),
        *(Tensor.__mul__, Tensor.__rmul__),
    )
)
_INTEGERS = (torch.int64, torch.int32)


class WatchExperts(TorchFunctionMode):
    """A context: graphs keep neither the rows of tokens that experts get, nor what these return.

    Rows that are taken from a matrix of tokens are taken again in backward. What an expert returned
    is multiplied by its weights as [Note: Weighted outputs] says.
    """

    def __init__(self, now: Weighing) -> None:
        super().__init__()
        self._now = now
        self._sources: list[tuple[Tensor, int, SharedInput]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if weighing() is self._now and torch.is_grad_enabled() and len(args) == 2 and not kwargs:
            result = None
            if func in _PRODUCTS:
                result = self._now.weighted(*args)
            elif func is Tensor.__getitem__:
                result = self._rows(*args)
            if result is not None:
                return result
        return func(*args, **kwargs)

    def _rows(self, tokens: Tensor, index: Any) -> Tensor | None:
        """``tokens[index]``; None where that are not rows of a matrix."""
        leading = isinstance(index, tuple) and len(index) == 2 and index[0] is None
        rows = index[1] if leading else index
        if not (
            isinstance(rows, Tensor)
            and (rows.dtype, rows.ndim) in ((each, 1) for each in _INTEGERS)
            and tokens.ndim == 2
            and tokens.is_floating_point()
            and tokens.requires_grad
            and rows.device == tokens.device
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


def _taken(tokens: Tensor, rows: Tensor) -> Tensor:
    return tokens.index_select(0, rows)
