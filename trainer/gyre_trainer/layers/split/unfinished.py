"""What the core of a split block returns: an output that only the block's last layer takes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from gyre_trainer.errors import RotationError


class Unfinished:
    """Stands in the place of a core's first tensor, from the core to the block's last layer.

    The slices of a block add up only behind the last layer, so what goes into that layer never
    exists. Whatever else uses this object is refused by name.
    """

    __slots__ = ("_block", "_content", "_records", "_version")

    def __init__(self, content: Tensor, block: object = None) -> None:
        """``content`` is for the last layer of ``block``."""
        self._content = content
        self._block = block
        self._records = torch.is_grad_enabled()
        self._version: int | None = None  # of the content, once it was taken

    def take(self, block: object = None) -> Tensor:
        """The content, for the last layer of the block alone; once more, a copy of it.

        Core and last layer are computed at once, so both have gradients, or none has.
        """
        if block is not self._block:
            _refuse("gives it to the last layer of another block")
        if torch.is_grad_enabled() is not self._records:
            _refuse("calls one of both under no_grad, and the other one with gradients")
        version = -1 if self._content.is_inference() else self._content._version
        if self._version is None:
            self._version = version
            return self._content
        if self._version != version:
            _refuse("writes to what the last layer returned, and then calls that layer once more")
        return self._content.clone()  # either may be written to

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python and its tools ask any object for
            raise AttributeError(name)
        _refuse(f"reads .{name}")

    def __add__(self, _other: object = None) -> NoReturn:
        """Refuse to compute."""
        _refuse("computes with it")

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = __add__
    __getitem__ = __neg__ = __iter__ = __bool__ = __len__ = __add__

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuse all functions of torch."""
        _refuse(f"gives it to {getattr(func, '__name__', func)}")


def _refuse(use: str) -> NoReturn:
    raise RotationError(
        "the input of a block's last layer does not exist, because the block rotates as a whole "
        f"with that layer, which is in another module; but something else {use}, such as a hook "
        "on the module before, or a call of that module alone. Let the layers rotate one by one "
        "(find_blocks=False, and no rule for the module)"
    )


def with_first(output: Any, change: Callable[[Tensor], Any]) -> Any:
    """A core's output with another first tensor.

    Raises:
        RotationError: it is no tensor, nor a tuple or list that begins with one.
    """
    if isinstance(output, Tensor):
        return change(output)
    if type(output) in (tuple, list) and output and isinstance(output[0], Tensor):
        return type(output)((change(output[0]), *output[1:]))
    raise RotationError(
        f"the core of a block returns {type(output).__name__}, but it must return a tensor, or a "
        "tuple or list that begins with one, for the block's last layer. Let its layers rotate one "
        "by one (find_blocks=False, and no rule for the module)."
    )
