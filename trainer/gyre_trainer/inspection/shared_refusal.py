"""All ranks of a ring learn at once that one of them refuses a module.

A rank that refuses alone goes on without the module's hops. The others would wait for these until
the timeout, if its process lives on. The ring stays usable.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from gyre_trainer.comm.mesh import ring_group
from gyre_trainer.comm.ring_registry import ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.rotation import Rotation


@contextmanager
def refusing_together(rotation: Rotation) -> Iterator[None]:
    """A context for checks of a module; what one rank raises ends the checks of all. Collective.

    The checks themselves must not communicate.

    Raises:
        RotationError: another rank of the ring refuses the module; the message has its words.
    """
    try:
        yield
    except Exception as error:
        refuse_together(rotation, str(error))
        raise
    refuse_together(rotation, "")


def refuse_together(rotation: Rotation, reason: str) -> None:
    """Return where no rank has a reason, and on those that have one. Collective.

    Args:
        rotation: of the module.
        reason: why this rank refuses it; "" where it does not.

    Raises:
        RotationError: on the ranks without a reason, where another one has one.
    """
    flat = rotation.sharded.flat
    if isinstance(flat, FakeTensor):
        return
    parameter = rotation.sharded.parameters[0]
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    group, ring = ring_group(mesh), ring_of(mesh)
    refusing = torch.tensor([ring.rank + 1 if reason else 0], device=flat.device)
    with ring.hang_diagnosis.collective("comparing what ranks say of a rotated module"):
        dist.all_reduce(refusing, dist.ReduceOp.MAX, group=group)
        if not refusing.item():
            return
        source = dist.get_global_rank(group, int(refusing.item()) - 1)
        words = [reason]
        dist.broadcast_object_list(words, src=source, group=group, device=flat.device)
    if not reason:
        raise RotationError(f"rank {source} refuses {rotation.name}: {words[0]}")
