"""Frozen weights in few bits: how a rank keeps its rows of a linear layer, and how they travel.

Formats are those of torchao, in plain torch, by rows, so that each rank encodes its own rows alone:

* "int8": one byte for each weight, and a float32 scale for each row, its largest magnitude / 127.
  A weight is off by half a scale at most, 1/254 of the largest of its row.
* "nf4" (arXiv 2305.14314): half a byte for each weight, one of 16 quantiles of a normal
  distribution, and a float32 scale for each 64 weights of a row, their largest magnitude. A weight
  is off by 0.152 of the largest of its 64 at most. Scales are not quantized again.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from gyre_trainer.errors import RotationError
from gyre_trainer.shards.layout import Cut, Layout, as_parameter
from gyre_trainer.shards.sharded_parameters import ShardedParameters, find_from

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


class Encoding(NamedTuple):
    """How codes are decoded.

    Attributes:
        to: the format.
        levels: the 16 values of "nf4"; those of torchao are rounded to four digits.
    """

    to: Format
    levels: tuple[float, ...] = _NF4


def require_format(name: str) -> None:
    """Refuse the name of an unknown format.

    Raises:
        RotationError: names the known ones.
    """
    if name not in get_args(Format):
        raise RotationError(
            f"{name!r} is no format of weights; known are {', '.join(get_args(Format))}"
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


def decode(
    codes: Tensor,
    scales: Tensor,
    num_columns: int,
    to: Format,
    levels_of_nf4: tuple[float, ...] = _NF4,
) -> Tensor:
    """The weights, [R, num_columns] in float32."""
    if to == "int8":
        return codes.view(torch.int8) * scales
    levels = torch.tensor(levels_of_nf4, device=codes.device)
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
            sources: name and local tensor of each parameter. Those of larger entries lie first,
                so that all are aligned, whatever the number of rows.
        """
        self.ring, self.replica_gradients = plain.ring, None
        num_slices, rank = plain.layout.num_slices, plain.ring.rank
        whole, *_ = plain.layout.cuts
        sources = sorted(sources, key=lambda each: -each[1].element_size())
        num_rows = whole.shape[0]
        cuts = [Cut(name, (num_rows, _row_bytes(local)), 0) for name, local in sources]
        self.layout = Layout(tuple(cuts), num_slices)
        self.digests = [0] * len(cuts)
        self._kinds = [(local.dtype, local.shape) for _, local in sources]
        self.flat = torch.empty(
            self.layout.numel(rank), dtype=torch.uint8, device=plain.flat.device
        )
        mesh = _dtensor(plain.parameters[0]).device_mesh
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


def _row_bytes(local: Tensor) -> int:
    """Bytes of one index along the first dim."""
    return local[:1].new_empty((1, *local.shape[1:])).nbytes


def _dtensor(parameter: Any) -> DTensor:
    assert isinstance(parameter, DTensor)
    return parameter
