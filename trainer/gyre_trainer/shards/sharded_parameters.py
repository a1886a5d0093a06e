"""What a rank keeps of a rotated module: its own slice of every parameter, in one flat buffer.

The buffer holds the slice's shard of each parameter, contiguous, one after the other. The rank's
DTensor parameters are views of it, so the optimizer writes what the next hop sends, and nothing is
packed.
"""

import weakref
from collections.abc import Sequence
from hashlib import blake2b
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.utils.weak import WeakIdKeyDictionary

from gyre_trainer.comm.ring import Ring
from gyre_trainer.comm.ring_registry import ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.shards.layout import Layout

_DIGEST_COLUMNS = 61


class ShardedParameters:
    """The slice that this rank owns. A rotation reads it and never writes to it.

    Attributes:
        layout: the layout of the slices of all ranks.
        ring: the ring that the slices travel on.
        flat: the own slice.
        parameters: DTensors in the order of the cuts; the local tensor of each is a view of
            ``flat``.
        digests: of the values of the whole parameters, in the same order; 0 where they had none.
    """

    def __init__(self, sources: Sequence[nn.Parameter], layout: Layout, mesh: DeviceMesh) -> None:
        """Copy this rank's slice of ``sources``; fill it with NaN where they are on `meta`."""
        self.layout = layout
        self.ring: Ring = ring_of(mesh)
        rank = self.ring.rank
        self.digests = [digest_of(source) for source in sources]
        device = torch.device(mesh.device_type) if sources[0].is_meta else sources[0].device
        self.flat = torch.full(
            (layout.numel(rank),), torch.nan, dtype=sources[0].dtype, device=device
        )
        self.parameters: list[nn.Parameter] = []
        for source, cut, shard in zip(
            sources, layout.cuts, layout.views(self.flat, rank), strict=True
        ):
            start, stop = layout.bounds(cut, rank)
            if not source.is_meta:
                shard.copy_(source.detach().narrow(cut.dim, start, stop - start))
            self.parameters.append(as_parameter(shard, mesh, Shard(cut.dim), source))

    @property
    def version(self) -> int:
        """A number that grows with every write to a parameter."""
        return sum(parameter._version for parameter in self.parameters)

    def local(self, parameter: Tensor, name: str) -> Tensor:
        """The local shard of one of the parameters; a gradient of the shard reaches the parameter.

        Raises:
            RotationError: the parameter no longer lies in ``flat``.
        """
        local = local_of(parameter)
        if not same_storage(local, self.flat):
            raise RotationError(
                f"parameter {name} no longer lies in its rotated slice; "
                "move or convert a model before it is rotated, and load states by copying "
                "(load_state_dict without assign)"
            )
        return local


def digest_of(tensor: Tensor) -> int:
    """A number that is equal for equal bits, and different for nearly all others; 0 on `meta`.

    Every bit counts; entries are added up in a few columns, so it takes one pass over the memory.
    """
    if tensor.is_meta or isinstance(tensor, FakeTensor) or not tensor.numel():
        return 0
    whole = tensor.detach().contiguous().view(-1)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = whole.view(integers[whole.element_size()])
    num_rows = len(bits) // _DIGEST_COLUMNS
    rows, rest = bits[: num_rows * _DIGEST_COLUMNS], bits[num_rows * _DIGEST_COLUMNS :]
    sums = rows.view(num_rows, _DIGEST_COLUMNS).sum(0, dtype=torch.int64)
    numbers = torch.cat((sums, rest.to(torch.int64))).tolist()
    return int.from_bytes(blake2b(repr(numbers).encode(), digest_size=6).digest(), "little")


def local_of(parameter: Tensor) -> Tensor:
    """This rank's shard of a DTensor, or the tensor itself if it is plain.

    A gradient of the shard reaches the DTensor.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return parameter._local_tensor
    local: Tensor = _Local.apply(parameter)  # type: ignore[no-untyped-call]
    return local


class _Local(torch.autograd.Function):
    """`DTensor.to_local`, with a gradient that is cut as the parameter is.

    `to_local` would work the gradient's placement out in each backward.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec = parameter._spec
        ctx.set_materialize_grads(False)
        return parameter._local_tensor.view_as(parameter._local_tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else DTensor(grad.contiguous(), ctx.spec, requires_grad=False)  # type: ignore[no-untyped-call]


def as_parameter(
    local: Tensor, mesh: DeviceMesh, placement: Placement, whole: nn.Parameter
) -> nn.Parameter:
    """A DTensor parameter with the local tensor ``local`` and the shape and dtype of ``whole``."""
    strides = tuple(prod(whole.shape[dim + 1 :]) for dim in range(whole.dim()))
    tensor = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=whole.shape, stride=strides
    )
    return nn.Parameter(tensor, requires_grad=whole.requires_grad)


def same_storage(one: Tensor, other: Tensor) -> bool:
    """Whether both tensors are views of one storage."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def has_sole_storage(tensor: Tensor) -> bool:
    """Whether no other tensor uses this one's storage, not even one that a graph saved."""
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) == 2)  # the tensor's use, and `storage`


# From a parameter to a weak reference; what it refers to lives as long as a module rotates it.
_SHARDED = WeakIdKeyDictionary()


def sharded_parameters_of(parameter: nn.Parameter) -> ShardedParameters | None:
    """Where the shards of a parameter lie; None if it was not cut.

    The parameter that was cut and the DTensor that replaced it are both found.
    """
    reference = _SHARDED.get(parameter)  # type: ignore[no-untyped-call]
    sharded = reference() if reference is not None else None
    assert sharded is None or isinstance(sharded, ShardedParameters)
    return sharded


def shard_parameters(
    sources: Sequence[nn.Parameter], layout: Layout, mesh: DeviceMesh
) -> ShardedParameters:
    """Cut ``sources``; `sharded_parameters_of` finds the result from now on."""
    sharded = ShardedParameters(sources, layout, mesh)
    for parameter in (*sources, *sharded.parameters):
        _SHARDED[parameter] = weakref.ref(sharded)
    return sharded
