"""Functions of single logits that a loss by slices of the vocabulary can apply to its own slice.

Models cap or scale what their head returns: `30 * tanh(logits / 30)` in Gemma 2, `logits * scale`
in Cohere. Each such step is one of these functions. They are applied in place, in the dtype that
the loss is computed in, so what a model rounds to half precision in between is not rounded here.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor


class LogitFunction(Protocol):
    """An elementwise function, applied in place.

    Attributes:
        needs_output: whether its derivative is computed from its output.
    """

    needs_output: ClassVar[bool]

    def apply_(self, logits: Tensor) -> Tensor:
        """The function's output, in the memory of ``logits``."""
        ...

    def differentiate_(self, grad: Tensor, output: Tensor | None) -> Tensor:
        """The gradient of its input, in the memory of ``grad``, that of its output.

        ``output`` is None unless it is needed, and may be overwritten.
        """
        ...


@dataclass(frozen=True, slots=True)
class Multiplied:
    """Multiplication by a number."""

    factor: float
    needs_output: ClassVar[bool] = False

    def apply_(self, logits: Tensor) -> Tensor:
        """Multiply."""
        return logits.mul_(self.factor)

    def differentiate_(self, grad: Tensor, output: Tensor | None) -> Tensor:
        """Multiply."""
        return grad.mul_(self.factor)


@dataclass(frozen=True, slots=True)
class Divided:
    """Division by a number; multiplication by its inverse would round otherwise."""

    divisor: float
    needs_output: ClassVar[bool] = False

    def apply_(self, logits: Tensor) -> Tensor:
        """Divide."""
        return logits.div_(self.divisor)

    def differentiate_(self, grad: Tensor, output: Tensor | None) -> Tensor:
        """Divide."""
        return grad.div_(self.divisor)


@dataclass(frozen=True, slots=True)
class Tanh:
    """The hyperbolic tangent."""

    needs_output: ClassVar[bool] = True

    def apply_(self, logits: Tensor) -> Tensor:
        """Tanh."""
        return logits.tanh_()

    def differentiate_(self, grad: Tensor, output: Tensor | None) -> Tensor:
        """Multiply by one minus the output's square."""
        assert output is not None
        return grad.mul_(output.square_().neg_().add_(1))


@dataclass(frozen=True, slots=True)
class LogitChain:
    """Several functions, one after the other, and their gradient."""

    functions: tuple[LogitFunction, ...]

    @property
    def num_outputs(self) -> int:
        """How many tensors as large as the logits exist beside them until the gradient is known."""
        return sum(function.needs_output for function in self.functions)

    def apply_(self, logits: Tensor) -> Tensor:
        """The last function's output, in the memory of ``logits``."""
        for function in self.functions:
            logits = function.apply_(logits)
        return logits

    def record_(self, logits: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """The same, and what `differentiate_` needs."""
        outputs: list[Tensor | None] = []
        for function in self.functions:
            logits = function.apply_(logits)
            outputs.append(logits.clone() if function.needs_output else None)
        return logits, outputs

    def differentiate_(self, grad: Tensor, outputs: list[Tensor | None]) -> Tensor:
        """The gradient of the logits, in the memory of ``grad``."""
        for function in reversed(self.functions):
            grad = function.differentiate_(grad, outputs.pop())
        return grad
