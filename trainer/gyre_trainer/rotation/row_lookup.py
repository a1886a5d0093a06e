"""One call of an embedding whose rows are sent, instead of slices that go round the ring.

See [Note: Rows of an embedding] in `gyre_trainer.shards.row_exchange`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gyre_trainer.comm.spans import path_of, span
from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.backward.deferred_grads import DeferredGrads
from gyre_trainer.rotation.call import cast
from gyre_trainer.rotation.rotation import Rotation
from gyre_trainer.rotation.rule import ModuleSlice, RowsRule, parameter_at, swapped
from gyre_trainer.shards.local_shards import local_of, spec_of, with_spec
from gyre_trainer.shards.row_exchange import RowExchange, wanted_rows


def sends_rows(rotation: Rotation) -> bool:
    """Whether the module's rows are sent. It is so on all ranks or on none."""
    is_encoded = not rotation.sharded.flat.is_floating_point()
    return isinstance(rotation.rule, RowsRule) and rotation.sharded.ring.size > 1 and not is_encoded


def run_by_rows(rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The module's output; backward leaves an averaged gradient on the sharded parameter."""
    rule, sharded, module = rotation.rule, rotation.sharded, rotation.module
    assert isinstance(rule, RowsRule)
    (tokens,) = (*args, *kwargs.values())
    (cut,) = rotation.layout.cuts
    parameter = parameter_at(module, cut.name)
    sharded.require_here(parameter, cut.name)
    if torch.is_grad_enabled() and sharded.replica_gradients is not None:
        sharded.replica_gradients.before_training(path_of(module))
    wanted = wanted_rows(rotation.layout, tokens, rule.padding_idx)
    exchange = RowExchange(sharded.ring, rotation.layout, wanted, rotation.number)
    rows: Tensor = _Rows.apply(rotation, exchange, parameter)  # type: ignore[no-untyped-call]
    others = {
        name: cast(local_of(parameter_at(module, name)), rotation.policy.compute_dtype)
        for name in rotation.replicated
    }
    bounds = {cut.name: (0, len(rows))}
    with swapped(module, {cut.name: rows} | others), span(f"{path_of(module)} forward: of rows"):
        current = ModuleSlice(
            module, rotation.forward, {cut.name: rows}, bounds, DeferredGrads({}), 1, (cut,)
        )
        output = rule.of_rows(current, exchange.wanted.places, exchange.wanted.padding)
    return output.to(rotation.outer_dtype(()))


class _Rows(torch.autograd.Function):
    """From the parameter of which this rank has a shard to the rows of its tokens."""

    @staticmethod
    def forward(ctx: Any, rotation: Rotation, exchange: RowExchange, parameter: Tensor) -> Tensor:
        ctx.rotation, ctx.exchange, ctx.spec = rotation, exchange, spec_of(parameter)
        sharded = rotation.sharded
        ctx.version = sharded.version
        with span(f"{path_of(rotation.module)} forward: fetching rows"):
            (shard,) = sharded.views(sharded.flat)
            return exchange.fetch(shard.detach(), rotation.travelling_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[None, None, Tensor]:
        rotation, sharded = ctx.rotation, ctx.rotation.sharded
        if sharded.version != ctx.version:
            raise RotationError(
                f"parameters of {rotation.name} changed between forward and backward"
            )
        own, wanted = sharded.flat.dtype, rotation.policy.grad_dtype or sharded.flat.dtype
        if wanted.itemsize < grads.dtype.itemsize:
            grads = grads.to(wanted)
        with span(f"{path_of(rotation.module)} backward: sending gradients of rows"):
            total = sharded.flat.new_zeros(
                sharded.flat.numel(), dtype=torch.promote_types(own, wanted)
            )
            (shard,) = sharded.views(total)
            ctx.exchange.add_up(grads.contiguous(), shard)
        (grad,) = sharded.views(total.to(own))
        return None, None, grad if ctx.spec is None else with_spec(grad, ctx.spec)
