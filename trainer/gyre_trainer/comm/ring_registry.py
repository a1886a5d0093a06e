"""The one ring of each mesh: its process groups, its transport, and its checks before a step.

Gloo's threads come to rest before the interpreter ends.

[Note: The end of a rank]

A thread that waits for the interpreter's lock when the interpreter ends is ended by it, in the
midst of a call (Python before 3.14). In torch's C++ that aborts the process: "terminate called
without an active exception". Two kinds of threads could come to that:

* Gyre's own. Each is told to stop, and joined, when its ring ends or the process does.
* Gloo's. One of them runs a collective, wakes the thread that waits for it, and lets go of the
  tensors after that. Those are Python's, too, so it takes the lock for it. On a busy machine the
  process may have come to its end by then. Joining them is left to the group's destructor, which
  `destroy_process_group` does not call while a mesh has the group, and each DTensor has its mesh.

So a rank lets go of the lock before its end, until all of gloo's threads sleep.
"""

import atexit
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gyre_trainer.comm.hang_diagnosis import HangDiagnosis
from gyre_trainer.comm.identity import Modules
from gyre_trainer.comm.mesh import replica_group, ring_group
from gyre_trainer.comm.ring import ProcessGroupTransport, Ring

_RINGS: WeakValueDictionary[dist.ProcessGroup, Ring] = WeakValueDictionary()
# One rank's collector may free a ring later than another's; all count the modules on from there.
_MODULES: WeakKeyDictionary[dist.ProcessGroup, Modules] = WeakKeyDictionary()
# Made once for each group: to make one is a collective, and a ring may be made on one rank alone.
_OF_HOPS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
# By the default group: a ring of a mesh that all its ranks are on.
_OF_ALL_RANKS: WeakValueDictionary[dist.ProcessGroup, Ring] = WeakValueDictionary()


def ring_of(mesh: DeviceMesh) -> Ring:
    """This rank's one ring on a mesh. It lives as long as a caller holds it."""
    group = ring_group(mesh)
    ring = _RINGS.get(group)
    if ring is None:
        rest_at_exit()
        _check_before_steps()
        replicas, modules = replica_group(mesh), _MODULES.setdefault(group, Modules())
        diagnosis = HangDiagnosis(group, modules, None if replicas is None else mesh.mesh)
        transport = ProcessGroupTransport(_hop_group(group, mesh.device_type), diagnosis)
        ring = _RINGS[group] = Ring(group, transport, diagnosis, modules, replicas)
        # NCCL keeps the host in no hop, so there its communicators are aborted at once
        diagnosis.end_waits_by(transport.give_up, hops_alone=mesh.device_type == "cpu")
        if mesh.size() == dist.get_world_size():
            _OF_ALL_RANKS[dist.distributed_c10d._get_default_group()] = ring
    return ring


def _hop_group(group: dist.ProcessGroup, device_type: str) -> dist.ProcessGroup:
    """The communicator of all hops of a ring.

    On a CPU it is the ring's own, where tags tell hops from all-reduces. NCCL knows no tags, so
    there hops have a communicator that carries nothing else. Collective where it is made.
    """
    if "nccl" not in dist.get_backend_config(group) or device_type == "cpu":
        return group
    of_hops = _OF_HOPS.get(group)
    if of_hops is None:
        ranks = dist.get_process_group_ranks(group)
        made = dist.new_group(
            ranks,
            timeout=group._get_backend(torch.device(device_type)).options._timeout,
            backend="nccl",
            use_local_synchronization=True,
            group_desc="gyre hops",
        )
        assert isinstance(made, dist.ProcessGroup)  # this rank is on it
        of_hops = _OF_HOPS[group] = made
    return of_hops


@cache
def _check_before_steps() -> None:
    """From now on, each step of an optimizer first reads the devices' checks."""
    register_optimizer_step_pre_hook(_read_checks)


def _read_checks(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
    for ring in tuple(_RINGS.values()):
        ring.read_checks()


def abort_all() -> None:
    """Abort the process groups of all rings, so that neither this rank nor another waits on."""
    for ring in tuple(_RINGS.values()):
        ring.give_up()


def collective(what: str) -> AbstractContextManager[object]:
    """A context for a collective of all ranks of the default group.

    If the collective fails, a `RingError` names the rank at fault. Without a mesh of all ranks the
    context does nothing.
    """
    ring = _OF_ALL_RANKS.get(dist.distributed_c10d._get_default_group())
    return ring.hang_diagnosis.collective(what) if ring is not None else nullcontext()


_TASKS = Path("/proc/self/task")
_GLOO = "pt_gloo_runloop"  # the name that torch gives to the threads that run collectives
# Where a collective waits for a rank that never comes, its thread sleeps too, so this is for a
# thread that finds no processor. Each further second may delay the exit of a process on such a
# machine.
_TIMEOUT_S = 5.0


@cache
def rest_at_exit() -> None:
    """From now on, the end of this process waits until gloo's threads sleep, for 5 s at most."""
    atexit.register(_rest)


def _rest() -> None:
    """Return when gloo's threads have slept for some milliseconds in which the lock was free.

    A thread that waits for the lock would have woken up: by the lock, or by its own interval.
    """
    interval_s = 2 * min(sys.getswitchinterval(), 0.005)
    before, deadline_s = dict[str, tuple[str, str]](), time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline_s:
        threads = _gloo_threads()
        if threads == before and all(state == "S" for state, _ in threads.values()):
            return
        before = threads
        time.sleep(interval_s)


def _gloo_threads() -> dict[str, tuple[str, str]]:
    """Of each of gloo's threads the state, and how often it has gone to sleep, by its number."""
    found = {}
    for task in _TASKS.iterdir():
        try:
            lines = (task / "status").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:  # it has ended
            continue
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if status.get("Name") == _GLOO:
            found[task.name] = status["State"][:1], status.get("voluntary_ctxt_switches", "")
    return found
