"""Finds out whether a module's own forward calls torch's checkpoint, or saves tensors like it.

What a checkpoint computes again in backward, it computes outside of what a slice is computed in:
without the slice's weights, its numbers of heads and its masks. So such a module does not rotate as
a whole; its layers rotate one by one, and a checkpoint around these is exact.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction


class WatchCheckpoints(TorchFunctionMode):
    """A context for a forward that takes gradients and that no backward follows.

    Where a checkpoint has pushed hooks for saved tensors, what an operator saves does not come to
    the hooks of this context. The reentrant kind pushes none, but is a node of the graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._is_packed = False
        self._found = False

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.__exit__(*error)

    def found(self, outputs: Sequence[Tensor]) -> bool:
        """Whether the forward that returned ``outputs`` has called a checkpoint."""
        return self._found or _has_reentrant(outputs)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if torch.is_grad_enabled() and not self._found:
            self._is_packed = False
            torch.ones(1, requires_grad=True).exp()  # saves what it returns
            self._found = not self._is_packed
        return func(*args, **kwargs or {})

    def _pack(self, tensor: Tensor) -> Tensor:
        self._is_packed = True
        return tensor.detach()


def _has_reentrant(outputs: Sequence[Tensor]) -> bool:
    left = [output.grad_fn for output in outputs]
    seen: set[Any] = set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, CheckpointFunction._backward_cls):
            return True
        seen.add(node)
        left += [each for each, _ in node.next_functions]
    return False
