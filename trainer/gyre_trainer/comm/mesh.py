"""The ranks as a device mesh: one axis, the ring; or two, replicas of rings."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.weak import WeakIdKeyDictionary

from gyre_trainer.errors import MeshError
from gyre_trainer.torch_internals import without_dispatch

REPLICATE_AXIS, ROTATE_AXIS = "replicate", "rotate"

_UNNAMED = WeakIdKeyDictionary()  # by the mesh itself: equal ones may have other process groups


def make_mesh(device_type: str, *, replicate: int = 1) -> DeviceMesh:
    """A mesh over all ranks of the default process group.

    Its axis `rotate` is the ring. With more than one replica it has the axis `replicate` before
    that: each ring then has all parameters, and gradients are averaged over the rings, too. Ranks
    with successive numbers are on one ring.

    Args:
        device_type: the device of the parameters, "cpu" or "cuda". On "cuda", call
            `torch.cuda.set_device` first.
        replicate: the number of rings, which divides that of the ranks.

    Raises:
        MeshError: the default process group does not exist yet, or cannot be divided so.

    Example:
        torch.distributed.init_process_group("gloo")  # torchrun sets RANK and WORLD_SIZE
        mesh = make_mesh("cpu")
        of_two_rings = make_mesh("cpu", replicate=2)
    """
    if not dist.is_initialized():
        raise MeshError(
            "there is no process group; call torch.distributed.init_process_group first "
            "(torchrun sets its variables)"
        )
    num_ranks = dist.get_world_size()
    if replicate < 1 or num_ranks % replicate:
        raise MeshError(
            f"there are {num_ranks} ranks, which make_mesh(replicate={replicate}) cannot divide "
            "into rings of as many ranks"
        )
    if replicate == 1:
        return init_device_mesh(device_type, (num_ranks,), mesh_dim_names=(ROTATE_AXIS,))
    shape, names = (replicate, num_ranks // replicate), (REPLICATE_AXIS, ROTATE_AXIS)
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def require_ring(mesh: DeviceMesh) -> None:
    """Refuse a mesh that is no ring, or replicas of rings, with this rank on it.

    Raises:
        MeshError: the mesh is another one, or this rank is not on it.
    """
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 2 or ROTATE_AXIS in names[:-1]:
        raise MeshError(
            f"rotation needs a mesh of one axis, {ROTATE_AXIS!r}, or of two, {REPLICATE_AXIS!r} "
            f"and then {ROTATE_AXIS!r}, but {mesh} has others; make_mesh makes both"
        )
    if mesh.get_coordinate() is None:
        raise MeshError(f"rank {dist.get_rank()} is not on {mesh}")


def ring_axis(mesh: DeviceMesh) -> int:
    """The number of the axis that slices travel along."""
    return mesh.ndim - 1


def ring_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks of this rank's ring."""
    return mesh.get_group(ring_axis(mesh))


def replica_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The ranks with the same shards as this one, one of each ring; None for a single ring."""
    return mesh.get_group(0) if mesh.ndim == 2 and mesh.size(0) > 1 else None


def unnamed(mesh: DeviceMesh) -> DeviceMesh:
    """The same mesh without names for its axes; always the same object.

    peft takes a name that it does not know for tensor parallelism, whose modules compute with their
    shard alone.
    """
    if mesh.mesh_dim_names is None:
        return mesh
    found = _UNNAMED.get(mesh)  # type: ignore[no-untyped-call]
    if found is None:
        # A mesh reads the values of its tensor of ranks, which a fake tensor has not.
        with without_dispatch():
            # `from_group` wants names for several axes, but nothing here needs them.
            groups, names = mesh.get_all_groups(), mesh.mesh_dim_names
            found = DeviceMesh.from_group(groups, mesh.device_type, mesh.mesh, mesh_dim_names=names)
            found._mesh_dim_names = None
        _UNNAMED[mesh] = found
    assert isinstance(found, DeviceMesh)
    return found


def groups_of(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """The groups of all axes: a sum over each, one after the other, is a sum over all ranks."""
    replicas = replica_group(mesh)
    return [ring_group(mesh), *([] if replicas is None else [replicas])]
