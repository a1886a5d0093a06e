"""Frozen linear layers in few bits: a rank's rows at home and on their way, decoded on arrival.

Formats are those of torchao, in plain torch, by rows, so that each rank encodes its own rows alone:

* "int8": one byte for each weight, and a float32 scale for each row, its largest magnitude / 127.
  A weight is off by half a scale at most, 1/254 of the largest of its row.
* "nf4" (arXiv 2305.14314): half a byte for each weight, one of 16 quantiles of a normal
  distribution, and a float32 scale for each 64 weights of a row, their largest magnitude. A weight
  is off by 0.152 of the largest of its 64 at most. Scales are not quantized again.
"""

import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import Shard

from gyre_trainer.comm.identity import with_room
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.linear import LinearRule
from gyre_trainer.rotation.rotated_module import RotatedModule
from gyre_trainer.rotation.rule import parameter_at
from gyre_trainer.shards.layout import Cut, Layout, as_parameter, local_of
from gyre_trainer.shards.sharded_parameters import ShardedParameters, find_from
from gyre_trainer.torch_internals import parameters_of

Format = Literal["int8", "nf4"]
SCALE = "weight_scale"

BLOCK = 64
# Appendix E of arXiv 2305.14314.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def encode(weight: Tensor, to: Format) -> tuple[Tensor, Tensor]:
    """Codes [R, bytes of a row] in uint8, and scales [R, scales of a row] in float32.

    Args:
        weight: finite, of shape [R, K].
        to: the format.
    """
    weight = weight.float()
    if to == "int8":
        scales = _not_zero(weight.abs().amax(1, keepdim=True) / 127)
        return (weight / scales).round_().to(torch.int8).view(torch.uint8), scales
    padded = F.pad(weight, (0, -weight.shape[1] % BLOCK))
    blocks = padded.view(len(padded), padded.shape[1] // BLOCK, BLOCK)
    scales = _not_zero(blocks.abs().amax(2))
    levels = torch.tensor(_NF4, device=weight.device)
    middles = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(blocks / scales.unsqueeze(2), middles, out_int32=True).flatten(1)
    return (codes[:, ::2] * 16 + codes[:, 1::2]).to(torch.uint8), scales


def decode(codes: Tensor, scales: Tensor, num_columns: int, to: Format) -> Tensor:
    """The weights, [R, num_columns] in float32."""
    if to == "int8":
        return codes.view(torch.int8) * scales
    levels = torch.tensor(_NF4, device=codes.device)
    pairs = torch.stack((codes >> 4, codes & 15), dim=2).int()
    blocks: Tensor = levels[pairs].view(*scales.shape, BLOCK) * scales.unsqueeze(2)
    return blocks.flatten(1)[:, :num_columns]


def _not_zero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales)


class QuantizedShards(ShardedParameters):
    """The rows of a frozen linear layer that this rank owns, encoded, in one buffer of bytes.

    The parameters are views of it: the scales, the bias in its own dtype, and the codes.
    """

    def __init__(self, plain: ShardedParameters, sources: Sequence[tuple[str, Tensor]]) -> None:
        """Encode in place of ``plain``.

        Args:
            plain: the layer's shards until now.
            sources: name and local tensor of each parameter. Those of larger entries are first,
                so that all are aligned, whatever the number of rows.
        """
        self.ring, self.watch = plain.ring, plain.watch
        num_slices, rank = plain.layout.num_slices, plain.ring.rank
        whole, *_ = plain.layout.cuts
        sources = sorted(sources, key=lambda each: -each[1].element_size())
        num_rows = whole.shape[0]
        row_bytes = [local.new_empty((1, *local.shape[1:])).nbytes for _, local in sources]
        cuts = [
            Cut(name, (num_rows, n), 0) for (name, _), n in zip(sources, row_bytes, strict=True)
        ]
        self.layout = Layout(tuple(cuts), num_slices)
        self.digests = [0] * len(cuts)
        self._kinds = [(local.dtype, local.shape) for _, local in sources]
        self.flat = with_room(self.layout.numel(rank), torch.uint8, plain.flat.device)
        first: Any = plain.parameters[0]
        mesh = first.device_mesh
        self.parameters = []
        for view, (_, local) in zip(self.views(self.flat), sources, strict=True):
            view.copy_(local)
            shape = torch.empty((num_rows, *local.shape[1:]), dtype=local.dtype, device="meta")
            like = nn.Parameter(shape, requires_grad=False)
            self.parameters.append(as_parameter(view, mesh, Shard(0), like))
        find_from(self, self.parameters)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The own shards in a buffer like ``flat``, in their own dtypes."""
        raw = self.layout.views(flat, self.ring.rank)
        return [
            bytes_.view(dtype).view(shape)
            for bytes_, (dtype, shape) in zip(raw, self._kinds, strict=True)
        ]


def typed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor that arrived as rows of bytes, in its dtype; one that is not of bytes, as it is."""
    return tensor.view(dtype) if tensor.dtype == torch.uint8 else tensor


def is_quantized(module: nn.Module) -> bool:
    """Whether the module's weights are encoded."""
    return isinstance(module, RotatedModule) and isinstance(
        module.rotation.sharded, QuantizedShards
    )


def num_weights(model: nn.Module) -> int:
    """The parameters of a model, encoded ones included: weights, not their codes."""
    total = sum(parameter.numel() for parameter in model.parameters())
    for module in filter(is_quantized, model.modules()):
        layer: Any = module
        codes, scales = parameters_of(layer)["weight"], parameters_of(layer)[SCALE]
        total += layer.in_features * layer.out_features - codes.numel() - scales.numel()
    return int(total)


def quantize_linear(module: RotatedModule, path: str, to: Format) -> None:
    """Encode the rows of a frozen linear layer that this rank owns; the float weights are gone.

    Raises:
        RotationError: a weight trains, or is not finite.
    """
    layer: Any = module
    for name, parameter in parameters_of(layer).items():
        if parameter is not None and parameter.requires_grad:
            raise RotationError(
                f"{path}.{name} trains, and only frozen weights can be {to}. Freeze it "
                "(requires_grad_(False)) or name it in `keep`."
            )
    weight = local_of(layer.weight)
    if not weight.isfinite().all():
        raise RotationError(f"{path}.weight is not finite; load or make weights before quantizing")
    codes, scales = encode(weight, to)
    bias = [] if layer.bias is None else [("bias", local_of(layer.bias))]
    plain = module.rotation
    sharded = QuantizedShards(plain.sharded, [*bias, (SCALE, scales), ("weight", codes)])
    for cut, parameter in zip(sharded.layout.cuts, sharded.parameters, strict=True):
        parameters_of(layer)[cut.name] = parameter
    module.rotation = replace(
        plain,
        forward=partial(_forward, layer, to, None if layer.bias is None else layer.bias.dtype),
        rule=QuantizedLinearRule(),
        layout=sharded.layout,
        sharded=sharded,
    )


class QuantizedLinearRule(LinearRule):
    """For a linear layer of encoded rows, which do not travel in pieces."""

    divisible = False


def _forward(layer: nn.Module, to: Format, bias_dtype: torch.dtype | None, x: Tensor) -> Tensor:
    """The features of the rows that stand in the layer now."""
    codes, scales = parameter_at(layer, "weight"), parameter_at(layer, SCALE)
    bias = None
    if bias_dtype is not None:
        bias = typed(parameter_at(layer, "bias"), bias_dtype).flatten().to(x.dtype)
    output: Tensor = _DecodedLinear.apply(x, codes, scales, bias, to)  # type: ignore[no-untyped-call]
    return output


class _DecodedLinear(torch.autograd.Function):
    """A linear layer that keeps codes for backward, and decodes them again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, to: Format
    ) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.to, ctx.num_columns = to, x.shape[-1]
        return F.linear(x, _decoded(ctx, codes, scales, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        codes, scales = ctx.saved_tensors
        weight = _decoded(ctx, codes, scales, grad.dtype)
        return grad @ weight, None, None, None, None


def _decoded(ctx: Any, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    scales = typed(scales, torch.float32)
    return decode(codes, scales, ctx.num_columns, ctx.to).to(dtype)


def encode_layers(model: nn.Module, to: Format, keep: Collection[str]) -> list[str]:
    """Encode the linear layers that rotate by themselves, as `quantize_frozen` says.

    Returns:
        Their paths.
    """
    if to not in get_args(Format):
        raise RotationError(
            f"{to!r} is no format of weights; known are {', '.join(get_args(Format))}"
        )
    rotated = {p: each for p, each in model.named_modules() if isinstance(each, RotatedModule)}
    uses = Counter(id(each.rotation.sharded) for each in rotated.values())
    chosen = {
        path: each
        for path, each in rotated.items()
        if type(each.rotation.rule) is LinearRule
        and uses[id(each.rotation.sharded)] == 1
        and path.removesuffix(".base_layer").rpartition(".")[2] not in keep
    }
    if not chosen:
        raise RotationError(
            f"no linear layer of {type(model).__name__} rotates by itself; rotate the model with "
            "find_blocks=False"
        )
    _warn_of_blocks(rotated)
    for path, each in chosen.items():
        quantize_linear(each, path, to)
    return list(chosen)


def _warn_of_blocks(rotated: Mapping[str, RotatedModule]) -> None:
    """Warn where frozen weights are not encoded because their block rotates as a whole."""
    blocks = []
    for path, each in rotated.items():
        names = [cut.name for cut in each.rotation.layout.cuts if len(cut.shape) > 1]
        frozen = not any(each.rotation.module.get_parameter(name).requires_grad for name in names)
        if len(names) > 1 and frozen:
            blocks.append(path)
    if blocks:
        warnings.warn(
            f"{len(blocks)} frozen blocks that rotate as a whole are not encoded, {blocks[0]} the "
            "first of them; rotate the model with find_blocks=False to encode their layers",
            stacklevel=4,
        )
