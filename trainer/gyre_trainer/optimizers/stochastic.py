"""Parameters in bfloat16 without float32 copies: each update is rounded up or down by chance.

bfloat16 has 8 bits of mantissa, so a nearest rounding drops every update below 1/256 of a weight.
A stochastic rounding takes the nearer neighbour more often, so that a weight's expectation is the
exact update's (Gupta et al., arXiv 1502.02551; Zamirai et al., arXiv 2010.06192).
"""

import functools
import inspect
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from gyre_trainer.optimizers.shard import KeepsSavedDtypes, loss_of
from gyre_trainer.shards.layout import local_of, place_of

_NUM_DROPPED_BITS = 16  # of float32, next to bfloat16
_SEED, _COUNT = "rounding_seed", "num_rounded_steps"


def rounded(values: Tensor, noise: Tensor) -> Tensor:
    """Float32 values in bfloat16, rounded away from 0 or towards it.

    Args:
        values: float32. What is not finite stays as it is.
        noise: int32 of the same shape, each in [0, 2^16). Over all 2^16 numbers the mean of the
            results is the value, exactly.
    """
    bits = (values.view(torch.int32) + noise) >> _NUM_DROPPED_BITS << _NUM_DROPPED_BITS
    return torch.where(values.isfinite(), bits.view(torch.float32), values).bfloat16()


@functools.cache
def stochastically_rounded(kind: type[Optimizer]) -> Any:
    """A class like an optimizer's that rounds parameters in bfloat16 stochastically.

    It takes the arguments of ``kind`` and `rounding_seed`. A step takes one parameter after the
    other to float32 and back, so only one has a copy at a time; states are float32. Parameters of
    other dtypes are stepped as ever. Rounding depends on the seed, the step, the parameter and this
    rank's place in it, so a run that resumes continues with the same bits, and replicated
    parameters stay equal on all ranks.

    Args:
        kind: an optimizer class that computes each parameter's update by itself, such as
            `torch.optim.AdamW` or `gyre_trainer.rotate.Adafactor`.

    Example:
        rotate_all(model.bfloat16(), mesh=mesh)
        optimizer = stochastically_rounded(AdamW)(model.parameters(), lr=1e-4, rounding_seed=0)
    """
    own = {"step_of_kind": staticmethod(inspect.unwrap(kind.step))}  # without hooks
    return type(f"StochasticallyRounded{kind.__name__}", (_StochasticRounding, kind), own)


class _StochasticRounding(KeepsSavedDtypes):
    """Mixed in before an optimizer's class."""

    step_of_kind: Callable[[Optimizer], Any]

    def __init__(self, params: Any, *args: Any, rounding_seed: int = 0, **kwargs: Any) -> None:
        self._seed = rounding_seed
        super().__init__(params, *args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with what rounding needs to know in a checkpoint."""
        super().add_param_group({_SEED: self._seed, _COUNT: 0} | param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of the optimizer."""
        loss = loss_of(closure)
        groups = self.param_groups
        try:
            self.param_groups = [
                group | {"params": [p for p in group["params"] if p.dtype != torch.bfloat16]}
                for group in groups
            ]
            self.step_of_kind(self)
            for index, group in enumerate(groups):
                for position, parameter in enumerate(group["params"]):
                    if parameter.dtype == torch.bfloat16 and parameter.grad is not None:
                        self._step_alone(group, parameter, (index, position))
        finally:
            self.param_groups = groups
        for group in groups:
            group[_COUNT] += 1
        return loss

    def _step_alone(
        self, group: dict[str, Any], parameter: nn.Parameter, number: tuple[int, int]
    ) -> None:
        """Step one parameter by a copy in float32, whose states belong to the parameter."""
        assert parameter.grad is not None
        copy = nn.Parameter(parameter.detach().float())
        copy.grad = parameter.grad.float()
        if parameter in self.state:
            self.state[copy] = self.state.pop(parameter)
        self.param_groups = [group | {"params": [copy]}]
        self.step_of_kind(self)
        self.state[parameter] = self.state.pop(copy, {})
        local = local_of(copy.detach())
        noise = torch.randint(
            2**_NUM_DROPPED_BITS,
            local.shape,
            generator=_generator(local, group[_SEED], group[_COUNT], number, _start(parameter)),
            dtype=torch.int32,
            device=local.device,
        )
        local_of(parameter.detach()).copy_(rounded(local, noise))
        torch.autograd.graph.increment_version(parameter)  # writes to a shard do not raise it


def _generator(local: Tensor, *key: Any) -> torch.Generator:
    seed = int.from_bytes(
        blake2b(repr(key).encode(), digest_size=8).digest(), "little", signed=True
    )
    return torch.Generator(local.device).manual_seed(seed)


def _start(parameter: Tensor) -> int:
    """Where this rank's shard begins."""
    place = place_of(parameter) if isinstance(parameter, DTensor) else None
    return place.start if place else 0
