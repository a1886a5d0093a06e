"""What torch's methods for whole models do to modules with shards: `to`, `bfloat16`, `deepcopy`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Self, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gyre_trainer.errors import RotationError
from gyre_trainer.shards.local_shards import local_of, with_local
from gyre_trainer.shards.sharded_parameters import copy_sharded, sharded_parameters_of


class ShardedModule:
    """The base of what is mixed in before a module's class when it is rotated, or kept whole."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply ``fn`` to buffers and plain parameters, if it leaves the shards as they are.

        `Module.to` and the like call this.

        Raises:
            RotationError: it would move or convert the shards.
        """
        with _without_shards(cast("nn.Module", self)) as shards:
            for name, shard in shards.items():
                _require_unchanged(name, shard, fn)
            return super()._apply(fn, recurse)  # type: ignore[misc,no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A module with a copy of this rank's shards, on the same ring."""
        copy_shards(list(cast("nn.Module", self).parameters()), memo)
        return self._copy(memo)

    def _copy(self, memo: dict[int, Any], *without: str) -> Self:
        """A copy of the attributes but ``without``, once shards in them are in ``memo``."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        state = {name: value for name, value in vars(self).items() if name not in without}
        vars(copied).update(deepcopy(state, memo))
        return copied


def copy_shards(parameters: list[nn.Parameter], memo: dict[int, Any]) -> None:
    """Copy this rank's shards of all DTensors in ``parameters`` into ``memo``, each once."""
    for parameter in parameters:
        if not isinstance(parameter, DTensor) or id(parameter) in memo:
            continue
        sharded = sharded_parameters_of(parameter)
        if sharded is None:
            memo[id(parameter)] = with_local(parameter, parameter._local_tensor.clone())
        else:
            copied = memo[id(sharded)] = copy_sharded(sharded)
            for one, other in zip(sharded.parameters, copied.parameters, strict=True):
                memo[id(one)] = other


@contextmanager
def _without_shards(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """A context in which the module and those inside have no DTensors: yields shards by name."""
    taken = [
        (child, path, name, parameter)
        for path, child in module.named_modules()
        for name, parameter in child._parameters.items()
        if isinstance(parameter, DTensor)
    ]
    for child, _, name, _ in taken:
        child._parameters[name] = None
    try:
        yield {
            f"{type(module).__name__}.{path}.{name}".replace("..", "."): local_of(each.detach())
            for _, path, name, each in taken
        }
    finally:
        for child, _, name, parameter in taken:
            child._parameters[name] = parameter


def _require_unchanged(name: str, shard: Tensor, fn: Callable[[Tensor], Tensor]) -> None:
    result = fn(shard.view(-1)[:0])
    if (result.dtype, result.device) == (shard.dtype, shard.device):
        return
    raise RotationError(
        f"{name} is rotated as {shard.dtype} on {shard.device} and cannot become {result.dtype} on "
        f"{result.device}; move or convert a model before it is rotated, or compute in another "
        f"dtype by RotationPolicy(compute_dtype={result.dtype})"
    )
