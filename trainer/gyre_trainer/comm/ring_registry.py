"""The one ring of each mesh, and the transports that it is built with.

Neighbours of one host share memory on a CPU. All others send and receive in the process group.
"""

from contextlib import AbstractContextManager, nullcontext
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gyre_trainer.comm.hang_diagnosis import HangDiagnosis
from gyre_trainer.comm.identity import Modules
from gyre_trainer.comm.interpreter_exit import rest_at_exit
from gyre_trainer.comm.mesh import replica_group, ring_group
from gyre_trainer.comm.ring import Ring
from gyre_trainer.comm.shared_memory.transport import SharedMemoryTransport
from gyre_trainer.comm.transport import ProcessGroupTransport, group_of_processes

_RINGS: WeakValueDictionary[dist.ProcessGroup, Ring] = WeakValueDictionary()
# One rank's collector may free a ring later than another's; all count the modules on from there.
_MODULES: WeakKeyDictionary[dist.ProcessGroup, Modules] = WeakKeyDictionary()
# Made once for each group: to make one is a collective, and a ring may be made on one rank alone.
_WORDS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
# By the default group: a ring of a mesh that all its ranks are on.
_OF_ALL_RANKS: WeakValueDictionary[dist.ProcessGroup, Ring] = WeakValueDictionary()


def ring_of(mesh: DeviceMesh) -> Ring:
    """This rank's one ring on a mesh. It lives as long as a caller holds it."""
    group = ring_group(mesh)
    ring = _RINGS.get(group)
    if ring is None:
        rest_at_exit()
        replicas, modules = replica_group(mesh), _MODULES.setdefault(group, Modules())
        diagnosis = HangDiagnosis(group, None if replicas is None else mesh.mesh)
        words = _WORDS.get(group)
        if words is None:
            words = group_of_processes(group)
            if words is not group:  # which would keep itself alive
                _WORDS[group] = words
        transports = (
            SharedMemoryTransport(group, diagnosis),
            ProcessGroupTransport(group, diagnosis, words),
        )
        ring = _RINGS[group] = Ring(group, transports, diagnosis, modules, replicas)
        if mesh.size() == dist.get_world_size():
            _OF_ALL_RANKS[dist.distributed_c10d._get_default_group()] = ring
    return ring


def collective(what: str) -> AbstractContextManager[object]:
    """A context for a collective of all ranks of the default group.

    If the collective fails, a `RingError` names the rank at fault. Without a mesh of all ranks the
    context does nothing.
    """
    ring = _OF_ALL_RANKS.get(dist.distributed_c10d._get_default_group())
    return ring.hang_diagnosis.collective(what) if ring is not None else nullcontext()
