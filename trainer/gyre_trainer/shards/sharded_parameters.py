"""What a rank keeps of a rotated module: its own slice of every parameter, in one flat buffer.

The buffer holds the slice's shard of each parameter, contiguous, one after the other. The rank's
DTensor parameters are views of it, so the optimizer writes what the next hop sends, and nothing is
packed.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from copy import copy

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.weak import WeakIdKeyDictionary

from gyre_trainer.comm.ring import Ring
from gyre_trainer.comm.ring_registry import ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.shards.averages.replica_gradients import ReplicaGradients
from gyre_trainer.shards.layout import Layout
from gyre_trainer.shards.local_shards import (
    as_parameter,
    converted_to,
    digest_of,
    with_local,
)

# Torch counts the writes to a tensor from 0.
_MORE_THAN_ANY_COUNT = 2**40


class ShardedParameters:
    """The slice that this rank owns. A rotation reads it and never writes to it.

    Attributes:
        layout: how all ranks keep their slices.
        ring: the ring that the slices travel on.
        flat: the own slice.
        parameters: DTensors in the order of the cuts; the local tensor of each is a view of
            ``flat``.
        digests: of the values of the whole parameters, in the same order; 0 where they had none.
        replica_gradients: averages the gradients over the replicas of the ring; None for one ring.
    """

    _first_version = 0

    def __init__(self, sources: Sequence[nn.Parameter], layout: Layout, mesh: DeviceMesh) -> None:
        """Copy this rank's slice of ``sources``; fill it with NaN where they are on `meta`."""
        self.layout = layout = layout.at_rest
        self.ring: Ring = ring_of(mesh)
        rank = self.ring.rank
        self.digests = [digest_of(source) for source in sources]
        self.replica_gradients: ReplicaGradients | None = None
        device = torch.device(mesh.device_type) if sources[0].is_meta else sources[0].device
        self.flat = torch.full(
            (layout.numel(rank),), torch.nan, dtype=sources[0].dtype, device=device
        )
        self.parameters: list[nn.Parameter] = []
        for source, cut, shard in zip(sources, layout.cuts, self.views(self.flat), strict=True):
            start, stop = layout.bounds(cut, rank)
            if not source.is_meta:
                shard.copy_(source.detach().narrow(cut.dim, start, stop - start))
            self.parameters.append(as_parameter(shard, mesh, Shard(cut.dim), source))

    def views(self, flat: Tensor) -> list[Tensor]:
        """The own shards in a buffer like ``flat``, in the order of the cuts."""
        return self.layout.views(flat, self.ring.rank)

    @property
    def version(self) -> int:
        """A number that grows with every write to a parameter."""
        return self._first_version + sum(parameter._version for parameter in self.parameters)

    def note_rewritten(self) -> None:
        """Raise the version after a write that torch does not count, or with other parameters."""
        self._first_version += _MORE_THAN_ANY_COUNT

    def require_here(self, parameter: Tensor, name: str) -> None:
        """Require that it is one of the parameters, whose local shard lies in ``flat``.

        Raises:
            RotationError: it is not, or no longer does.
        """
        is_own = any(parameter is each for each in self.parameters)
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        if not (is_own and same_storage(local, self.flat)):
            raise RotationError(
                f"parameter {name} is no longer in its rotated slice. "
                "Move or convert a model before it is rotated, add adapters that repeat layers "
                "(layer_replication) before, and load states by copying (load_state_dict without "
                "assign)."
            )


def same_storage(one: Tensor, other: Tensor) -> bool:
    """Whether both tensors are views of one storage."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def has_sole_storage(tensor: Tensor) -> bool:
    """Whether no other tensor uses this one's storage, not even one that a graph saved."""
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) == 2)  # the tensor's use, and `storage`


# From a parameter to a weak reference; what it refers to lives as long as a module rotates it.
_SHARDED = WeakIdKeyDictionary()
_SUCCESSORS = WeakIdKeyDictionary()  # from a parameter that was cut to a weak reference, likewise


def sharded_parameters_of(parameter: nn.Parameter) -> ShardedParameters | None:
    """Where the shards of a parameter lie; None if it was not cut.

    The parameter that was cut and the DTensor that replaced it are both found.
    """
    reference = _SHARDED.get(parameter)  # type: ignore[no-untyped-call]
    sharded = reference() if reference is not None else None
    assert sharded is None or isinstance(sharded, ShardedParameters)
    return sharded


def lies_in_shards(tensor: Tensor) -> bool:
    """Whether a tensor's memory is that of a rank's shards; it takes a look at all modules."""
    found = {reference() for reference in _SHARDED.values()}  # type: ignore[no-untyped-call]
    addresses = {each.flat.untyped_storage().data_ptr() for each in found if each is not None}
    return bool(tensor.numel()) and tensor.untyped_storage().data_ptr() in addresses


def shard_parameters(
    sources: Sequence[nn.Parameter], layout: Layout, mesh: DeviceMesh
) -> ShardedParameters:
    """Cut ``sources``; `sharded_parameters_of` finds the result from now on."""
    sharded = ShardedParameters(sources, layout, mesh)
    find_from(sharded, (*sources, *sharded.parameters))
    note_successors(sources, sharded.parameters)
    return sharded


def note_successors(before: Sequence[nn.Parameter], after: Sequence[nn.Parameter]) -> None:
    """Let `successor_of` find the parameters that have replaced others."""
    for source, parameter in zip(before, after, strict=True):
        _SUCCESSORS[source] = weakref.ref(parameter)


def successor_of(source: nn.Parameter) -> nn.Parameter | None:
    """The parameter that has replaced this one when it was cut or converted; None if none has."""
    reference = _SUCCESSORS.get(source)  # type: ignore[no-untyped-call]
    parameter: nn.Parameter | None = reference() if reference is not None else None
    return parameter


def copy_sharded(sharded: ShardedParameters) -> ShardedParameters:
    """Other parameters with the same values, which travel on the same ring."""
    copied = copy(sharded)
    copied.flat = sharded.flat.clone()
    copied.parameters = [
        with_local(parameter, view)
        for parameter, view in zip(sharded.parameters, copied.views(copied.flat), strict=True)
        if isinstance(parameter, DTensor)
    ]
    find_from(copied, copied.parameters)
    return copied


@torch.no_grad()
def convert_sharded(sharded: ShardedParameters, fn: Callable[[Tensor], Tensor]) -> None:
    """Let ``fn`` convert the own slice; the parameters are others afterwards."""
    before = sharded.parameters
    sharded.flat = fn(sharded.flat)
    sharded.parameters = [
        converted_to(parameter, view)
        for parameter, view in zip(before, sharded.views(sharded.flat), strict=True)
        if isinstance(parameter, DTensor)
    ]
    note_successors(before, sharded.parameters)
    sharded.note_rewritten()
    find_from(sharded, sharded.parameters)


def note_rewritten(parameters: Iterable[nn.Parameter]) -> None:
    """Raise the versions of those that are sharded: all of their values are others."""
    for sharded in dict.fromkeys(map(sharded_parameters_of, parameters)):
        if sharded is not None:
            sharded.note_rewritten()


def find_from(sharded: ShardedParameters, parameters: Sequence[nn.Parameter]) -> None:
    """Let `sharded_parameters_of` find it, and average its gradients over the replicas."""
    if sharded.ring.replicas is not None:
        sharded.replica_gradients = ReplicaGradients(sharded.parameters, sharded.flat, sharded.ring)
    for parameter in parameters:
        _SHARDED[parameter] = weakref.ref(sharded)
