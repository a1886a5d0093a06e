"""What the contexts of this package have in common: each sees every operator after it has run.

Each context costs Python for every operator, so what is counted in one step has one context.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from gyre_trainer.shards.stand_ins import StandIn


class Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that sees operators on plain tensors; wrappers come back as such."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and see what it did."""
        if func is torch.ops.prim.device.default:  # half of all operators on fake tensors
            return args[0].fake_device
        given = list(tensors_in((args, kwargs)))
        if any(isinstance(t, StandIn) or is_traceable_wrapper_subclass(t) for t in given):
            return NotImplemented
        result = func(*args, **kwargs or {})
        self.saw(func, args, kwargs or {}, given, result)
        return result

    def saw(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Sequence[Tensor],
        result: Any,
    ) -> None:
        """Take note of an operator that has run; ``given`` are the tensors among its arguments."""
        raise NotImplementedError


class Together(Dispatched):  # type: ignore[no-untyped-call]
    """A context in which several others see every operator, without being entered themselves."""

    def __init__(self, *others: Dispatched) -> None:
        super().__init__()
        self._others = others

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to keep the compiler out takes as long as some operators, and nothing is compiled."""
        return False

    def saw(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Sequence[Tensor],
        result: Any,
    ) -> None:
        """Let each of them see it."""
        for each in self._others:
            each.saw(func, args, kwargs, given, result)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts; far faster than torch's pytree."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list, dict)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(part)
