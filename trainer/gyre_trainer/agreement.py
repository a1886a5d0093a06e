"""Ranks whose models differ are found out before they train."""

from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from gyre_trainer.errors import RotationError
from gyre_trainer.rotated import own_class


def require_agreement(model: nn.Module, mesh: DeviceMesh) -> None:
    """Return where every rank on the mesh has parameters of the same names, shapes, dtypes and cuts, in the same modules.

    Raises:
        RotationError: on every rank, with the first difference between the first rank and another.
    """
    here = _description(model)
    digest = int.from_bytes(blake2b("\n".join(here).encode(), digest_size=7).digest(), "little")
    extremes = torch.tensor([digest, -digest], device=mesh.device_type)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=mesh.get_group())
    if isinstance(extremes, FakeTensor) or extremes.sum().item() == 0:  # a dry run has no other ranks
        return
    all_here: list[list[str]] = [[]] * mesh.size()
    dist.all_gather_object(all_here, here, group=mesh.get_group())
    raise RotationError(_difference(all_here))


def _description(model: nn.Module) -> list[str]:
    """One line for each parameter."""
    lines = []
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            cut = f", cut {parameter.placements[0]}" if isinstance(parameter, DTensor) else ""
            state = "trains" if parameter.requires_grad else "is frozen"
            where = f"{path}.{name}".removeprefix(".")
            lines.append(f"{where} of {own_class(module).__name__} is {tuple(parameter.shape)} {parameter.dtype}, {state}{cut}")
    return lines


def _difference(descriptions: list[list[str]]) -> str:
    first = descriptions[0]
    for rank, other in enumerate(descriptions):
        longest = max(len(first), len(other))
        pairs = zip(*(each + ["there is no more parameter"] * (longest - len(each)) for each in (first, other)), strict=True)
        for one, another in pairs:
            if one != another:
                return f"ranks have different models: on rank 0 {one}, but on rank {rank} {another}"
    return "ranks have different models"
