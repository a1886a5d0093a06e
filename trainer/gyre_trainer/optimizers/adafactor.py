"""Adafactor on the shards of a rotated model.

Adafactor keeps means of squared gradients along the rows and along the columns of a matrix. One of
the two lies across the cut, and so do the norms that scale a step. These are sums of few numbers:
a rank sends about as many as a matrix has columns.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gyre_trainer.optimizers.shard import SumsOverRanks, loss_of, own_shard_of, shaped_like
from gyre_trainer.shards.layout import local_of


class Adafactor(torch.optim.Adafactor):
    """`torch.optim.Adafactor` for rotated models, which it refuses itself.

    It takes the same arguments and takes the same steps as torch's does in one process. Three
    all-reduces per step carry the sums of all parameters. ``foreach`` changes nothing.

    Raises:
        RotationError: at a step: a parameter is cut along more than one axis of its mesh.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: computes the loss and its gradients again; its result is returned.
        """
        loss = loss_of(closure)
        for group in self.param_groups:
            sums = SumsOverRanks()
            steps = [
                _Step(parameter, self._state_of(parameter), group, sums)
                for parameter in group["params"]
                if parameter.grad is not None
            ]
            for part in (_Step.add_squares, _Step.add_row_means, _Step.add_update):
                for step in steps:
                    part(step)
                sums.reduce()
            for step in steps:
                step.apply()
        return loss

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            if parameter.ndim > 1:
                state["row_var"] = shaped_like(parameter, -1, 1, parameter.dtype)
                state["col_var"] = shaped_like(parameter, -2, 1, parameter.dtype)
            else:
                state["variance"] = torch.zeros_like(parameter)
        state["step"] += 1
        return state


class _Step:
    """One parameter's step. Sums over ranks are formed between the parts, in this order."""

    def __init__(
        self,
        parameter: Tensor,
        state: dict[str, Tensor],
        options: dict[str, Any],
        sums: SumsOverRanks,
    ) -> None:
        assert parameter.grad is not None
        self._whole, self._sums, self._options = parameter, sums, options
        self._shard = own_shard_of(parameter)
        self._parameter = local_of(parameter)
        self._gradient = local_of(parameter.grad)
        if options["maximize"]:
            self._gradient = -self._gradient
        self._state = {name: local_of(each) for name, each in state.items()}
        num_steps = float(state["step"])
        self._weight = num_steps ** options["beta2_decay"]
        self._rate = min(float(options["lr"]), num_steps**-0.5)
        eps = options["eps"][0]
        self._eps = torch.finfo(parameter.dtype).eps if eps is None else eps

    def add_squares(self) -> None:
        """The squares of the parameter, and of the gradient along each row and each column."""
        self._parameter_square = self._sums.add(_square(self._parameter), self._shard.group)
        if self._whole.ndim > 1:
            self._row_squares = self._squares_along(-1)
            self._column_squares = self._squares_along(-2)

    def _squares_along(self, dim: int) -> Tensor:
        squares = torch.linalg.vector_norm(self._gradient, dim=dim, keepdim=True).square_()
        return self._sums.add(squares, self._shard.along(self._whole.ndim + dim))

    def add_row_means(self) -> None:
        """The running means, and the mean of those of the rows."""
        if self._whole.ndim > 1:
            rows, columns = self._state["row_var"], self._state["col_var"]
            rows.lerp_(self._row_squares.div_(self._whole.shape[-1]), self._weight)
            columns.lerp_(self._column_squares.div_(self._whole.shape[-2]), self._weight)
            total = rows.sum(dim=-2, keepdim=True)
            self._row_total = self._sums.add(total, self._shard.along(self._whole.ndim - 2))
        else:
            self._state["variance"].lerp_(self._gradient.square(), self._weight)

    def add_update(self) -> None:
        """The square of the update, which bounds the step."""
        self._update_square = self._sums.add(_square(self._update()), self._shard.group)

    def apply(self) -> None:
        """Change the parameter."""
        numel = self._whole.numel()
        scale = float(self._parameter_square / numel) ** 0.5
        bound = float(self._update_square / numel) ** 0.5 / self._options["d"]
        rate = max(self._options["eps"][1], scale) * self._rate / max(1.0, bound)
        self._parameter.mul_(1 - float(self._options["lr"]) * self._options["weight_decay"])
        self._parameter.add_(self._update(), alpha=-rate)
        torch.autograd.graph.increment_version(self._whole)  # writes to its shard do not raise it

    def _update(self) -> Tensor:
        """The gradient by the root of its variance; made twice, so that one exists at a time."""
        if self._whole.ndim > 1:
            mean = self._row_total / self._whole.shape[-2]
            variance = self._state["row_var"] @ self._state["col_var"]
            variance.div_(mean.clamp_(min=self._eps))
        else:
            variance = self._state["variance"].clone()
        return variance.clamp_(min=self._eps**2).rsqrt_().mul_(self._gradient)


def _square(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor)
    return norm.square_()
