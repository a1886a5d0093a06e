"""Frozen linear layers that torchao or bitsandbytes has quantized: their codes rest and travel.

The codes and scales of such a layer become those of a layer that `quantize_frozen` has encoded. So
it computes with the very values that the library decodes. Scales that the library has quantized
again are decoded, as those of torchao's nf4 are. Neither library is imported.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gyre_trainer.errors import RotationError
from gyre_trainer.layers.encoded.quantized_linear import take_codes
from gyre_trainer.layers.linear import LinearRule
from gyre_trainer.rotation.wrap import RotationTarget, wrap
from gyre_trainer.shards.layout import slice_bounds
from gyre_trainer.shards.quantized import BLOCK, Encoding


class Codes(NamedTuple):
    """A quantized weight.

    Attributes:
        codes: [rows, bytes of a row] in uint8.
        scales: [rows, scales of a row] in float32.
        encoding: how they are decoded.
        dtype: of the weight that they stand for.
    """

    codes: Tensor
    scales: Tensor
    encoding: Encoding
    dtype: torch.dtype


def has_foreign_codes(module: nn.Module) -> bool:
    """Whether torchao or bitsandbytes has quantized a weight of the module, or of one inside."""
    return any(_library(each) for each in module.parameters())


def rotate_foreign(layer: Any, target: RotationTarget) -> bool:
    """Rotate a linear layer of foreign codes, and return whether it is one.

    Raises:
        RotationError: it trains, or its format is not known.
    """
    weight = layer._parameters.get("weight") if isinstance(layer, nn.Linear) else None
    if weight is None or not _library(weight):
        return False
    bias = layer._parameters.get("bias")
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        raise RotationError(
            f"a {type(layer).__name__} quantized by {_library(weight)} has parameters that require "
            "gradients; freeze the model (requires_grad_(False)), and train adapters"
        )
    found = _codes_of(weight, (layer.out_features, layer.in_features))
    layer.__class__ = nn.Linear
    shape = layer.out_features, layer.in_features
    empty = torch.empty(shape, dtype=found.dtype, device="meta")
    layer._parameters["weight"] = nn.Parameter(empty, requires_grad=False)
    wrap(layer, LinearRule(), target)
    sharded = layer.rotation.sharded
    start, stop = slice_bounds(shape[0], sharded.ring.rank, sharded.ring.size)
    take_codes(layer, found.codes[start:stop], found.scales[start:stop], found.encoding)
    return True


def _library(tensor: Tensor) -> str:
    """The library that has quantized a tensor; "" for none."""
    name = type(tensor).__module__.partition(".")[0]
    return name if name in ("torchao", "bitsandbytes") else ""


def _codes_of(weight: Any, shape: tuple[int, int]) -> Codes:
    """The codes of a weight of torchao or bitsandbytes.

    Raises:
        RotationError: they are of another format, or blocks go over the ends of rows.
    """
    kind = type(weight).__name__
    if kind == "Int8Tensor" and _is_symmetric_by_rows(weight, shape):
        scales = weight.scale.float().view(shape[0], 1)
        return Codes(weight.qdata.view(torch.uint8), scales, Encoding("int8"), weight.dtype)
    if kind == "NF4Tensor" and weight.block_size == BLOCK and shape[1] % BLOCK == 0:
        scales = weight.dequantize_scalers(
            weight.quantized_scalers, weight.quantization_factor, weight.scaler_block_size
        )
        return _nf4(weight.quantized_data, scales, weight.nf4, shape, weight.dtype)
    state: Any = getattr(weight, "quant_state", None)
    if kind == "Params4bit" and _is_nf4_by_rows(state, shape):
        scales = state.absmax
        if state.nested:
            raise RotationError(
                "bitsandbytes has quantized the scales of a weight, too; make the model with "
                "bnb_4bit_use_double_quant=False"
            )
        return _nf4(weight.data, scales, state.code, shape, state.dtype)
    raise RotationError(
        f"a weight of shape {shape} is a {kind} of {_library(weight)} in a format that does not "
        "rotate. Those that do are Int8Tensor with one scale for each row, and NF4Tensor and "
        f"Params4bit in nf4 with blocks of {BLOCK} that divide a row. Load the model without "
        "quantization, rotate it, and call quantize_frozen"
    )


def _nf4(
    codes: Tensor, scales: Tensor, levels: Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> Codes:
    rows = shape[0]
    encoding = Encoding("nf4", tuple(levels.float().tolist()))
    codes = codes.reshape(rows, shape[1] // 2)
    return Codes(codes, scales.float().view(rows, shape[1] // BLOCK), encoding, dtype)


def _is_symmetric_by_rows(weight: Any, shape: tuple[int, int]) -> bool:
    """Whether a row has one scale, zero is 0, and activations are not quantized."""
    zeros = weight.zero_point
    plain = weight.act_quant_kwargs is None and getattr(weight, "act_pre_scale", None) is None
    is_symmetric = zeros is None or not zeros.any().item()
    return plain and is_symmetric and weight.scale.numel() == shape[0]


def _is_nf4_by_rows(state: Any, shape: tuple[int, int]) -> bool:
    return (
        state is not None
        and state.quant_type == "nf4"
        and state.blocksize == BLOCK
        and shape[1] % BLOCK == 0
    )
