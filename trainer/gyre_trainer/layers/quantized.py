"""A frozen linear layer whose rows rest and travel in few bits, and are decoded on arrival."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gyre_trainer.errors import RotationError
from gyre_trainer.layers.linear import LinearRule
from gyre_trainer.rotation.rotated_module import RotatedModule
from gyre_trainer.rotation.rule import parameter_at
from gyre_trainer.shards.local_shards import local_of
from gyre_trainer.shards.quantized import (
    SCALE,
    Encoding,
    Format,
    QuantizedShards,
    decode,
    encode,
    typed,
)


def is_quantized(module: nn.Module) -> bool:
    """Whether the module's weights are encoded."""
    return isinstance(module, RotatedModule) and isinstance(
        module.rotation.sharded, QuantizedShards
    )


def num_weights(model: nn.Module) -> int:
    """The parameters of a model, those that are encoded included: weights, not their codes."""
    total = sum(parameter.numel() for parameter in model.parameters())
    for module in filter(is_quantized, model.modules()):
        layer: Any = module
        codes, scales = layer._parameters["weight"], layer._parameters[SCALE]
        total += layer.in_features * layer.out_features - codes.numel() - scales.numel()
    return int(total)


def quantize_linear(module: RotatedModule, path: str, to: Format) -> None:
    """Encode the rows of a frozen linear layer that this rank owns; the float weights are gone.

    Raises:
        RotationError: a weight trains, or is not finite.
    """
    layer: Any = module
    for name, parameter in layer._parameters.items():
        if parameter is not None and parameter.requires_grad:
            raise RotationError(
                f"{path}.{name} trains, and only frozen weights can be {to}. Freeze it "
                "(requires_grad_(False)) or name it in `keep`."
            )
    weight = local_of(layer.weight)
    if not weight.isfinite().all():
        raise RotationError(f"{path}.weight is not finite; load or make weights before quantizing")
    codes, scales = encode(weight, to)
    encoding = Encoding(to)
    bias = [] if layer.bias is None else [("bias", local_of(layer.bias))]
    plain = module.rotation
    sharded = QuantizedShards(plain.sharded, [*bias, (SCALE, scales), ("weight", codes)])
    for cut, parameter in zip(sharded.layout.cuts, sharded.parameters, strict=True):
        layer._parameters[cut.name] = parameter
    module.rotation = replace(
        plain,
        forward=partial(
            _forward, layer, encoding, None if layer.bias is None else layer.bias.dtype
        ),
        rule=QuantizedLinearRule(),
        layout=sharded.layout,
        sharded=sharded,
    )
    module._by_rule = {}


class QuantizedLinearRule(LinearRule):
    """For a linear layer of encoded rows, which do not travel in pieces."""

    divisible = False


def _forward(
    layer: nn.Module, encoding: Encoding, bias_dtype: torch.dtype | None, x: Tensor
) -> Tensor:
    """The features of the rows that stand in the layer now."""
    codes, scales = parameter_at(layer, "weight"), parameter_at(layer, SCALE)
    bias = None
    if bias_dtype is not None:
        bias = typed(parameter_at(layer, "bias"), bias_dtype).flatten().to(x.dtype)
    output: Tensor = _DecodedLinear.apply(x, codes, scales, bias, encoding)  # type: ignore[no-untyped-call]
    return output


class _DecodedLinear(torch.autograd.Function):
    """A linear layer that keeps codes for backward, and decodes them again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, encoding: Encoding
    ) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.encoding, ctx.num_columns = encoding, x.shape[-1]
        return F.linear(x, _decoded(ctx, codes, scales, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        codes, scales = ctx.saved_tensors
        weight = _decoded(ctx, codes, scales, grad.dtype)
        return grad @ weight, None, None, None, None


def _decoded(ctx: Any, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    scales = typed(scales, torch.float32)
    return decode(codes, scales, ctx.num_columns, *ctx.encoding).to(dtype)
