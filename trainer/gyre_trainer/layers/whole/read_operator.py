"""A parameter that is cut and that a forward reads, as one operator of a compiled graph.

See [Note: Ring passes in one graph] in `gyre_trainer.rotation.pass_operator`. A graph has two more
operators: `gyre::whole_parameter`, which gathers a parameter before the forward begins, and
`gyre::whole_parameter_backward`, which gives each rank its shard of the gradient. The whole
parameter lives as long as the graph needs it: until backward, where that computes with it. Without
a compiler it would be gathered again.
"""

import weakref
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor

from gyre_trainer.rotation.pass_operator import order_operators
from gyre_trainer.shards.gathered import Gathered
from gyre_trainer.shards.local_shards import local_of

_numbers = count()
_GATHERED: "weakref.WeakValueDictionary[int, Gathered]" = weakref.WeakValueDictionary()


def number_in_graphs(gathered: Gathered) -> int:
    """A number by which graphs name a parameter that is read, as long as it lives."""
    known = next((number for number, each in _GATHERED.items() if each is gathered), None)
    if known is None:
        known = next(_numbers)
        _GATHERED[known] = gathered
    return known


def traced_read(number: int, parameter: Tensor) -> Tensor:
    """The whole parameter in a graph that is traced."""
    whole: Tensor = torch.ops.gyre.whole_parameter(local_of(parameter), number)
    return whole


@torch.library.custom_op("gyre::whole_parameter", mutates_args=())
def _whole_parameter(shard: Tensor, number: int) -> Tensor:
    return _own(_GATHERED[number].gathered_now(), shard)


@_whole_parameter.register_fake
def _(shard: Tensor, number: int) -> Tensor:
    gathered = _GATHERED[number]
    return shard.new_empty(gathered.parameter.shape, dtype=gathered.dtype)


@torch.library.custom_op("gyre::whole_parameter_backward", mutates_args=())
def _whole_parameter_backward(grad: Tensor, number: int) -> Tensor:
    return _own(_GATHERED[number].shard_of_gradient(grad), grad)


@_whole_parameter_backward.register_fake
def _(grad: Tensor, number: int) -> Tensor:
    parameter: Any = _GATHERED[number].parameter
    return grad.new_empty(parameter._local_tensor.shape, dtype=parameter.dtype)


def _own(result: Tensor, given: Tensor) -> Tensor:
    """The result in memory of its own, as an operator must return it."""
    shares = result.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    return result.clone() if shares else result.contiguous()


def _keep(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    _, ctx.number = inputs


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.ops.gyre.whole_parameter_backward(grad, ctx.number), None


_whole_parameter.register_autograd(_differentiate, setup_context=_keep)


@cache
def order_reads() -> None:
    """Mark these operators' effects as ordered, as those of ring passes."""
    order_operators()
    for operator in (_whole_parameter, _whole_parameter_backward):
        operator.register_effect(torch._library.effects.EffectType.ORDERED)
