"""Checks before training that all ranks have the same model.

Also here:

* All ranks of a ring learn at once that one of them refuses a module.

A rank that refuses alone goes on without the module's hops. The others would wait for these until
the timeout, if its process lives on. The ring stays usable.
"""

from hashlib import blake2b
from itertools import chain, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from gyre_trainer.comm.mesh import groups_of
from gyre_trainer.comm.ring import ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.rotated_module import RotatedModule, own_class
from gyre_trainer.rotation.rule import Rotation
from gyre_trainer.shards.layout import digest_of
from gyre_trainer.shards.sharded_parameters import sharded_parameters_of
from gyre_trainer.torch_internals import is_fake


def require_equal_models(model: nn.Module, mesh: DeviceMesh) -> None:
    """Return if every rank on the mesh has the same parameters, cut alike, under the same policies.

    Compared are names, shapes, dtypes, kinds of device, `requires_grad`, cuts, a digest of the
    values, and the policies of rotated modules. Collective.

    Raises:
        RotationError: on every rank, with the first difference between two ranks.
    """
    here = _described(model)
    text = "\n".join(chain(*here))
    digest = int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little")
    extremes = torch.tensor([digest, -digest], device=mesh.device_type)
    for group in groups_of(mesh):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    # A dry run has no other ranks.
    if is_fake(extremes) or extremes.sum().item() == 0:
        return
    everyone = [(dist.get_rank(), here)]
    for group in groups_of(mesh):
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, everyone, group=group)
        everyone = list(chain.from_iterable(gathered))
    first, descriptions = everyone[0]
    difference = next(
        f"on rank {first} {one}, but on rank {rank} {another}"
        for place, lines in enumerate(descriptions)
        for rank, others in everyone
        for one, another in zip_longest(lines, others[place], fillvalue=_NO_MORE)
        if one != another
    )
    advice = (
        "; give every rank the same values, or take those of one with sync_from=0"
        if "has values of digest" in difference
        else ""
    )
    raise RotationError(f"ranks have different models: {difference}{advice}")


def count_alike(mesh: DeviceMesh) -> None:
    """Let all ranks of a ring number the modules of the next model alike. Collective.

    A refusal, or a copy of a model that one rank made alone, leaves them with other numbers.
    """
    ring = ring_of(mesh)
    ring.modules.count = ring.largest(ring.modules.count, 0)


_NO_MORE = "there is no more parameter"


def _described(model: nn.Module) -> tuple[list[str], list[str], list[str]]:
    """Lines for parameters, for policies of rotated modules, and for values of parameters."""
    parameters, policies, values = [], [], []
    for path, module in model.named_modules():
        kind = own_class(module).__name__
        for name, parameter in module.named_parameters(recurse=False):
            cut = f", cut {parameter.placements[-1]}" if isinstance(parameter, DTensor) else ""
            state = "trains" if parameter.requires_grad else "is frozen"
            parameters.append(
                f"{path}.{name}".removeprefix(".")
                + f" of {kind} is {tuple(parameter.shape)} {parameter.dtype} "
                f"on {parameter.device.type}, {state}{cut}"
            )
        if isinstance(module, RotatedModule):
            policies.append(f"{path or kind} rotates with {module.rotation.policy}")
    for name, parameter in model.named_parameters():
        sharded = sharded_parameters_of(parameter)
        if sharded is not None:  # those of shards are of the whole
            pairs = zip(sharded.parameters, sharded.digests, strict=True)
            digest = next((digest for other, digest in pairs if other is parameter), 0)
        else:
            digest = 0 if isinstance(parameter, DTensor) else digest_of(parameter)
        values.append(f"{name} has values of digest {digest:012x}")
    return parameters, policies, values


def require_all_ranks(mesh: DeviceMesh, *, independent: bool) -> None:
    """Refuse a mesh of a part of the ranks, not meant to train apart.

    Nothing is sent between two such meshes, so each would train other weights.

    Raises:
        RotationError: the mesh has fewer ranks than the default process group.
    """
    num_ranks, size = dist.get_world_size(), mesh.size()
    if independent or size == num_ranks:
        return
    rings = "" if num_ranks % size else f", replicate={num_ranks // size}"
    raise RotationError(
        f"the mesh has {size} of {num_ranks} ranks, and nothing averages its gradients with those "
        f"of the others. Make one mesh of all ranks, such as make_mesh(device_type{rings}). Where "
        "it is to train apart, pass independent=True to rotate_all or rotate"
    )


def refuse_together(rotation: Rotation, reason: str, *, is_zero: bool) -> bool:
    """Return where no rank has a reason, and on those that have one. Collective.

    Args:
        rotation: of the module.
        reason: why this rank refuses it; "" where it does not.
        is_zero: whether this rank has compared zeros alone.

    Returns:
        Whether all ranks have compared zeros alone.

    Raises:
        RotationError: on the ranks without a reason, where another one has one.
    """
    ring = rotation.sharded.ring
    if not ring.transport.moves:  # a simulated group has no other ranks
        return is_zero and not reason
    everyone: list[Any] = [None] * ring.size
    with ring.hang_diagnosis.collective("comparing the ranks' checks of a rotated module"):
        own = dist.get_rank(), reason, is_zero
        dist.all_gather_object(everyone, own, group=ring.group)
    refusing = [(rank, why) for rank, why, _ in everyone if why]
    if refusing and not reason:
        rank, why = refusing[-1]
        raise RotationError(f"rank {rank} refuses {rotation.name}: {why}")
    return not refusing and all(zeros for *_, zeros in everyone)
