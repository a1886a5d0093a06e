"""The one ring of each mesh, and the transports that it is built with.

Neighbours of one host share memory on a CPU. All others send and receive in the process group.
"""

from contextlib import AbstractContextManager, nullcontext
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gyre_trainer.comm.hang_diagnosis import HangDiagnosis
from gyre_trainer.comm.ring import Ring
from gyre_trainer.comm.shared_memory.transport import SharedMemoryTransport
from gyre_trainer.comm.transport import ProcessGroupTransport

_RINGS: WeakValueDictionary[dist.ProcessGroup, Ring] = WeakValueDictionary()


def ring_of(mesh: DeviceMesh) -> Ring:
    """The one ring on a mesh of one axis. It lives as long as a caller holds it."""
    group = mesh.get_group()
    ring = _RINGS.get(group)
    if ring is None:
        diagnosis = HangDiagnosis(group)
        transports = (
            SharedMemoryTransport(group, diagnosis),
            ProcessGroupTransport(group, diagnosis),
        )
        ring = _RINGS[group] = Ring(group, transports, diagnosis)
    return ring


def collective(what: str) -> AbstractContextManager[object]:
    """A context for a collective of all ranks of the default group.

    If the collective fails, a `RingError` names the rank at fault. Without a ring on the default
    group the context does nothing.
    """
    ring = _RINGS.get(dist.distributed_c10d._get_default_group())
    return ring.hang_diagnosis.collective(what) if ring is not None else nullcontext()
