"""The ring of ranks as a device mesh of one axis."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gyre_trainer.errors import MeshError

ROTATE_AXIS = "rotate"


def make_mesh(device_type: str) -> DeviceMesh:
    """A mesh of one axis, `rotate`, over all ranks of the default process group.

    Args:
        device_type: the device of the parameters, "cpu" or "cuda". On "cuda", call
            `torch.cuda.set_device` first.

    Raises:
        MeshError: the default process group does not exist yet.

    Example:
        torch.distributed.init_process_group("gloo")  # torchrun sets RANK and WORLD_SIZE
        mesh = make_mesh("cpu")
    """
    if not dist.is_initialized():
        raise MeshError(
            "there is no process group; call torch.distributed.init_process_group first "
            "(torchrun sets its variables)"
        )
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=(ROTATE_AXIS,))


def require_ring(mesh: DeviceMesh) -> None:
    """Refuse a mesh that is not one ring with this rank on it.

    Raises:
        MeshError: the mesh has another number of axes, or this rank is not on it.
    """
    if mesh.ndim != 1:
        raise MeshError(
            f"rotation needs a mesh of one axis, but {mesh} has {mesh.ndim}; "
            f"pass one axis of it, such as mesh[{ROTATE_AXIS!r}]"
        )
    if mesh.get_coordinate() is None:
        raise MeshError(f"rank {dist.get_rank()} is not on {mesh}")
