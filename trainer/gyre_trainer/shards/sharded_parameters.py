"""What a rank keeps of a rotated module: its own slice of every parameter, in one flat buffer that travels as it is.

A slice's buffer holds the slice's part of each parameter, contiguous, one after the other. The owner's DTensor parameters are
views of its buffer, so what the optimizer writes is what is sent next, without packing.
"""

import weakref
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.utils.weak import WeakIdKeyDictionary

from gyre_trainer.comm.ring import Ring, ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.shards.layout import Layout


class Home:
    """The slice that this rank owns. Rotation reads it and never writes to it.

    Attributes:
        layout: of all slices.
        flat: the own slice.
        parameters: DTensors in the order of the cuts, each a view of ``flat``.
    """

    def __init__(self, sources: Sequence[nn.Parameter], layout: Layout, mesh: DeviceMesh) -> None:
        """Copies this rank's slice of ``sources``; where they are on `meta` it is filled with NaN until it is materialised."""
        self.layout = layout
        self.ring: Ring = ring_of(mesh)
        rank = self.ring.rank
        device = torch.device(mesh.device_type) if sources[0].is_meta else sources[0].device
        self.flat = torch.full((layout.numel(rank),), torch.nan, dtype=sources[0].dtype, device=device)
        self.parameters: list[nn.Parameter] = []
        for source, cut, part in zip(sources, layout.cuts, layout.views(self.flat, rank), strict=True):
            start, stop = layout.bounds(cut, rank)
            if not source.is_meta:
                part.copy_(source.detach().narrow(cut.dim, start, stop - start))
            self.parameters.append(as_parameter(part, mesh, Shard(cut.dim), source))

    @property
    def version(self) -> int:
        """Grows with every write to a parameter."""
        return sum(parameter._version for parameter in self.parameters)

    def local(self, parameter: Tensor, name: str) -> Tensor:
        """The local tensor of one of the parameters; a gradient that reaches it reaches the parameter.

        Raises:
            RotationError: the parameter no longer lies here.
        """
        local = local_of(parameter)
        if not same_storage(local, self.flat):
            raise RotationError(
                f"parameter {name} no longer lies in its rotated slice; "
                "move or convert a model before it is rotated, and load states by copying (load_state_dict without assign)"
            )
        return local


def local_of(parameter: Tensor) -> Tensor:
    """This rank's part of a DTensor; another tensor as it is. A gradient that reaches the part reaches the DTensor."""
    if not isinstance(parameter, DTensor):
        return parameter
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return parameter._local_tensor
    local: Tensor = _Local.apply(parameter)  # type: ignore[no-untyped-call]
    return local


class _Local(torch.autograd.Function):
    """`DTensor.to_local`, but that the gradient is cut as the parameter is, which need not be worked out in each backward."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec = parameter._spec
        ctx.set_materialize_grads(False)
        return parameter._local_tensor.view_as(parameter._local_tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else DTensor(grad.contiguous(), ctx.spec, requires_grad=False)  # type: ignore[no-untyped-call]


def as_parameter(local: Tensor, mesh: DeviceMesh, placement: Placement, whole: nn.Parameter) -> nn.Parameter:
    """A DTensor parameter over ``local`` that stands for ``whole``."""
    strides = tuple(prod(whole.shape[dim + 1 :]) for dim in range(whole.dim()))
    tensor = DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=strides)
    return nn.Parameter(tensor, requires_grad=whole.requires_grad)


def same_storage(one: Tensor, other: Tensor) -> bool:
    """Whether both are views of one memory."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def has_sole_storage(tensor: Tensor) -> bool:
    """Whether no other tensor lies in this one's memory, be it a view or one that a graph keeps."""
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) == 2)  # of the tensor, and of `storage`


_HOMES = WeakIdKeyDictionary()  # parameter → weak reference to its home, which lives as long as a module rotates it


def home_of(parameter: nn.Parameter) -> Home | None:
    """Where a parameter lives: found for the parameter that was cut and for the DTensor that took its place."""
    reference = _HOMES.get(parameter)  # type: ignore[no-untyped-call]
    home = reference() if reference is not None else None
    assert home is None or isinstance(home, Home)
    return home


def settle(sources: Sequence[nn.Parameter], layout: Layout, mesh: DeviceMesh) -> Home:
    """A new home for ``sources``, which `home_of` finds from now on."""
    home = Home(sources, layout, mesh)
    for parameter in (*sources, *home.parameters):
        _HOMES[parameter] = weakref.ref(home)
    return home
