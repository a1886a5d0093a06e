"""The ring of ranks: hops between neighbours, and the buffers that hops fill.

A hop sends one buffer to one neighbour while another buffer arrives from the other neighbour, in
one batch of the ring's transport. Every wait ends at the group's timeout, which
`init_process_group(timeout=...)` sets. On CUDA a wait holds up the current stream, not the process:
NCCL moves the buffers on its own stream, in the order of the hops. A hop owns its buffers
until it was waited for, also where an exception has lost sight of it.

`ProcessGroupTransport` is how a hop's tensors get from rank to rank. `Ring` is the one ring of a
mesh: its process groups, its transport, and its checks before a step.

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
import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from enum import IntEnum
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gyre_trainer.comm.hang_diagnosis import HangDiagnosis
from gyre_trainer.comm.identity import (
    BufferPool,
    Modules,
    StepChecks,
    copy_with_room,
    differ_in_trained,
    framed,
    number_in,
    span,
    with_room,
)
from gyre_trainer.comm.mesh import replica_group, ring_group
from gyre_trainer.errors import RingError, RotationError
from gyre_trainer.torch_internals import without_dispatch


class Stream(IntEnum):
    """What a buffer holds. The value is in its tag, so that two streams never mix."""

    WEIGHTS = 1
    GRADIENTS = 2


_NEVER_SENT_TAG = 32  # beyond those of `Stream`
# Tags of tensors are apart by this, one for each size up to the prime number, and from there again.
_SIZE_TAG = 64
_NUM_SIZE_TAGS = 16_777_213


Wait = Callable[[], object]
"""Returns when a tensor has arrived, or raises RuntimeError; on CUDA the current stream waits."""


class Leg(NamedTuple):
    """One half of a hop: a tensor that this rank sends to a neighbour or receives from one.

    Attributes:
        tensor: contiguous and not empty.
        offset: the other rank minus this rank, modulo the ring's size: 1 or -1 for a neighbour.
        arrives: whether the tensor is received.
        description: for messages, such as "rank 0: sending weights to rank 1".
    """

    tensor: Tensor
    offset: int
    arrives: bool
    description: str


class ProcessGroupTransport:
    """Sends and receives in a process group, which carries hops alone where it is of NCCL.

    NCCL makes transfers in the order in which they were started, on every rank. All-reduces have a
    communicator of their own, and start when no hop is in flight.

    Attributes:
        moves: whether it moves anything: a simulated process group does not.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.moves = dist.get_backend(group) != "fake"

    def start(self, legs: Sequence[Leg], stream: Stream) -> list[tuple[Wait, str]]:
        """Start the legs of one hop, as one batch of point-to-point operations.

        Returns:
            The waits with their descriptions, in the order in which they are to be called.

        Raises:
            RuntimeError: a leg could not be started.
        """
        # Sends come first. Gloo writes at once if the other side already waits, and holds a lock
        # meanwhile on which its own thread spins if the two share a core. That thread itself
        # writes later data without a reader.
        works = dist.batch_isend_irecv([self._operation(leg, stream) for leg in reversed(legs)])
        if len(works) != len(legs):  # NCCL returns one work for the whole batch
            return [(work.wait, _described(legs)) for work in works]
        waits = [work.wait for work in reversed(works)]
        return list(zip(waits, (leg.description for leg in legs), strict=True))

    def give_up(self) -> None:
        """End this rank's connections for good, so that waits of both ends fail.

        NCCL has a call for that. Gloo closes all of them where a wait passes its timeout
        (`UnboundBuffer::waitRecv`).
        """
        if not self.moves:
            return
        if "nccl" in dist.get_backend_config(self._group):
            self._group.abort()
            return
        # Of each rank: where one has closed its connection already, a wait for it fails without a
        # timeout, and closes no other connection, on which a third rank may wait.
        for step in range(1, dist.get_world_size(self._group)):
            other = (dist.get_rank(self._group) + step) % dist.get_world_size(self._group)
            with without_dispatch(), suppress(RuntimeError):
                work = dist.irecv(torch.zeros(1), None, self._group, _NEVER_SENT_TAG, other)
                if work is not None:
                    work.wait(timedelta(milliseconds=1))

    def _operation(self, leg: Leg, stream: Stream) -> dist.P2POp:
        """A transfer that meets one of the same size alone.

        Gloo ends the process if a tensor arrives that is larger than what waits for it. So tensors
        of different sizes never meet; the hang diagnosis says which modules they are of.
        """
        operation = dist.irecv if leg.arrives else dist.isend
        tag = stream + _SIZE_TAG * (leg.tensor.nbytes % _NUM_SIZE_TAGS)
        peer = (dist.get_rank(self._group) + leg.offset) % dist.get_world_size(self._group)
        return dist.P2POp(operation, leg.tensor, group=self._group, tag=tag, group_peer=peer)


def _described(legs: Sequence[Leg]) -> str:
    """Such as "rank 0: receiving weights from rank 2 and sending weights to rank 1"."""
    first, *others = (leg.description for leg in legs)
    return " and ".join([first, *(each.partition(": ")[2] for each in others)])


class Direction(IntEnum):
    """Where a buffer goes: the receiver's rank minus the sender's."""

    CLOCKWISE = 1
    COUNTER_CLOCKWISE = -1


class _Frame(NamedTuple):
    """A tensor as it travels: with the identity of its hop behind it.

    See [Note: The number behind a buffer] in `identity`.

    Attributes:
        flat: the caller's tensor.
        whole: tensor and identity: a view of the same memory, or of a copy.
        is_copy: whether it is a copy.
    """

    flat: Tensor
    whole: Tensor
    is_copy: bool

    @classmethod
    def leaving(cls, flat: Tensor, identity: int, *, is_busy: bool) -> "_Frame":
        """Frame an outgoing tensor; a copy of one that another hop still sends."""
        whole = None if is_busy else framed(flat)
        is_copy = whole is None
        if whole is None:
            whole = framed(copy_with_room(flat))
            assert whole is not None
        if whole.device.type == "cpu":
            _at_end(whole).value = identity
        else:
            number_in(whole).fill_(identity)
        return cls(flat, whole, is_copy)

    @classmethod
    def arriving(cls, flat: Tensor) -> "_Frame":
        """Frame an incoming tensor."""
        whole = framed(flat)
        if whole is not None:
            return cls(flat, whole, is_copy=False)
        whole = framed(with_room(flat.numel(), flat.dtype, flat.device))
        assert whole is not None
        return cls(flat, whole, is_copy=True)

    def arrived(self) -> None:
        """Fill the caller's tensor."""
        if self.is_copy:
            self.flat.copy_(self.whole[: self.flat.numel()])


def _at_end(frame: Tensor) -> ctypes.c_int64:
    """The number at the end of a frame on the CPU, without the time of operators of torch."""
    number = ctypes.c_int64
    return number.from_address(frame.data_ptr() + frame.nbytes - ctypes.sizeof(number))


# Tools that count or trace operators see these, of tensors without identities. They do nothing; the
# operators of the process group are hidden.
_OPERATORS = torch.library.Library("gyre", "DEF")  # type: ignore[no-untyped-call]
for _name in ("send", "recv"):
    _OPERATORS.define(f"{_name}(Tensor tensor) -> ()")  # type: ignore[no-untyped-call]
    _OPERATORS.impl(_name, lambda tensor: None, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


class Hop:
    """One buffer on its way to a neighbour, and another on its way to this rank.

    Attributes:
        identity: of the hop; the neighbour's must be the same.
        outgoing: the address of the outgoing tensor; 0 for none.
        waited_s: seconds that this process has waited for hops; on CUDA, only those of the host.
    """

    waited_s: ClassVar[float] = 0.0

    def __init__(
        self,
        waits: Sequence[tuple[Wait, str]],
        ring: "Ring",
        identity: int = 0,
        frames: Sequence[_Frame] = (),
        source: int = 0,
        outgoing: int = 0,
    ) -> None:
        """Take over a batch in flight.

        Args:
            waits: those for the transfers, with their descriptions.
            ring: keeps the hop until it was waited for.
            identity: see `Hop`, as for `outgoing`.
            frames: the incoming and then the outgoing one; without them nothing is compared.
            source: the rank that the first one is from.
            outgoing: see `Hop`.
        """
        self._waits = waits
        self._ring = ring
        self.identity = identity
        self.outgoing = outgoing
        self._frames = frames
        self._source = source
        self._failed: RingError | RotationError | None = None
        self._is_over = False
        if waits:
            ring.in_flight[self] = None

    def wait(self) -> None:
        """Return when both buffers have arrived; on CUDA, when the current stream waits for them.

        Raises:
            RingError: a neighbour is gone or too late; the message names the rank at fault.
            RotationError: the neighbour calls another module; the message names both. On CUDA it is
                raised before the optimizer's step.
        """
        if self._failed is not None:
            raise self._failed
        if self._is_over:
            return
        self._is_over, diagnosis = True, self._ring.hang_diagnosis
        what = " and ".join(what for _, what in self._waits)
        began_s = time.perf_counter()
        with diagnosis.waiting(what, self.identity):  # also for empty slices: ranks count alike
            for wait, what in self._waits:
                try:
                    with span(what):
                        wait()
                except (RuntimeError, OSError) as error:
                    self._fail(diagnosis.error(what, error), error)
            self._compare()
        Hop.waited_s += time.perf_counter() - began_s
        self._ring.in_flight.pop(self, None)
        self._waits = self._frames = ()

    def _compare(self) -> None:
        """Compare the identities of both ends, and fill the incoming tensor."""
        if not self._frames:
            return
        arrived, (_, what) = self._frames[0], self._waits[0]
        fail = partial(self._ring.refuse, what, self.identity, self._source)
        if arrived.whole.device.type != "cpu":
            self._ring.checks.require(number_in(arrived.whole), self.identity, fail)
        elif (theirs := _at_end(arrived.whole).value) != self.identity:
            try:
                fail(theirs)
            except RotationError as error:
                self._fail(error)
        arrived.arrived()

    def _fail(self, failure: RingError | RotationError, cause: Exception | None = None) -> NoReturn:
        """End the waits of all ranks, which find the same reason, and raise ``failure``."""
        self._failed = failure
        self._ring.transport.give_up()
        raise failure from cause


class Ring:
    """This rank among its neighbours.

    Args:
        group: the ranks of the ring, in the order in which they are neighbours.
        transport: the way to the neighbours.
        hang_diagnosis: the diagnosis of these ranks, and of those of all replicas.
        modules: those that rotate, or did, on the ranks of the ring.
        replicas: the ranks at this rank's place in all replicas of the ring; None for one ring.

    Attributes:
        rank: this rank's number on the ring, in [0, size).
        global_rank: its number in the default process group.
        size: the number of ranks on the ring.
        part: which part of the global batch this rank has, in [0, num_parts).
        num_parts: the number of ranks on all replicas of the ring.
        pool: the transient buffers of all modules that rotate on this ring.
        in_flight: the hops that were not waited for, in the order of their start.
        checks: identities and guards that the optimizer's step waits for.
        bytes_sent: bytes of weights and gradients that this rank has sent since the ring was made.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        transport: ProcessGroupTransport,
        hang_diagnosis: HangDiagnosis,
        modules: Modules,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank = dist.get_rank(group)
        self.global_rank = dist.get_rank()
        self.size = dist.get_world_size(group)
        self.replicas = replicas
        self.num_parts = self.size * (1 if replicas is None else dist.get_world_size(replicas))
        self.part = self.rank + self.size * (0 if replicas is None else dist.get_rank(replicas))
        self.bytes_sent = 0
        self.hang_diagnosis = hang_diagnosis
        self.modules = modules
        # The pool must not hold the ring: without a cycle, a ring ends with its last holder.
        self.pool = BufferPool()
        self.in_flight: dict[Hop, None] = {}
        self.checks = StepChecks()
        self.transport = transport
        self.group = group

    def __deepcopy__(self, memo: dict[int, object]) -> "Ring":
        """The ring itself: a copy of a model rotates on the same one."""
        return self

    def shift(
        self,
        outgoing: Tensor,
        incoming: Tensor,
        direction: Direction,
        stream: Stream,
        identity: int = 0,
    ) -> Hop:
        """Start to send ``outgoing`` one rank on, and to receive ``incoming`` from the other side.

        Both tensors are flat and contiguous, and belong to the hop until it was waited for. Empty
        tensors are not sent.

        Args:
            outgoing: the tensors to send.
            incoming: the buffers to fill.
            direction: where ``outgoing`` goes.
            stream: the content of both.
            identity: of this hop, as `HopIdentity.pack` gives it, equal on all ranks; 0 outside of
                modules.

        Raises:
            RingError: the hop could not be started.
            RotationError: another rank has found that ranks call different modules.
        """
        self.bytes_sent += outgoing.nbytes
        ends = (incoming, -direction, True), (outgoing, direction, False)
        legs = [
            Leg(tensor, offset, arrives, self._described(offset, stream, arrives=arrives))
            for tensor, offset, arrives in ends
            if tensor.numel()
        ]
        if not self.transport.moves:
            return Hop(self._start(legs, stream), self)
        for leg in legs:  # 3 us a hop
            (torch.ops.gyre.recv if leg.arrives else torch.ops.gyre.send)(leg.tensor)
        # a hop in flight may send this tensor with another identity behind it: one that was started
        # ahead for a backward, while the forward is computed again
        address = outgoing.data_ptr()
        is_busy = any(h.outgoing == address and h.identity != identity for h in self.in_flight)
        with without_dispatch():
            frames = [
                _Frame.arriving(leg.tensor)
                if leg.arrives
                else _Frame.leaving(leg.tensor, identity, is_busy=is_busy)
                for leg in legs
            ]
            framed_legs = [
                leg._replace(tensor=frame.whole) for leg, frame in zip(legs, frames, strict=True)
            ]
            waits = self._start(framed_legs, stream)
        compared = frames if waits and legs[0].arrives else ()
        return Hop(waits, self, identity, compared, self._global(-direction), address)

    def _start(self, legs: Sequence[Leg], stream: Stream) -> list[tuple[Wait, str]]:
        try:
            return self.transport.start(legs, stream) if legs else []
        except RuntimeError as error:
            failure = self.hang_diagnosis.error(_described(legs), error)
            self.transport.give_up()
            raise failure from error

    def largest(self, value: int, identity: int) -> int:
        """The largest value on the ring; collective. With gloo, no device is waited for.

        Raises:
            RingError: a rank is gone or too late.
            RotationError: another rank calls another module than the one of ``identity``.
        """
        if self.size == 1 or not self.transport.moves:
            return value
        backends = str(dist.get_backend_config(self.group))
        on_host = "nccl" not in backends or "gloo" in backends
        if not on_host:
            self.settle()
        with self.hang_diagnosis.collective("comparing sizes", identity), without_dispatch():
            largest = torch.tensor([value], device="cpu" if on_host else "cuda")
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
            return int(largest)

    def settle(self) -> None:
        """Wait for all hops in flight: before an all-reduce, whose communicator is another one.

        Raises:
            RingError, RotationError: as `Hop.wait`.
        """
        for hop in tuple(self.in_flight):
            hop.wait()

    def read_checks(self) -> None:
        """Wait until the device has compared this step's identities and guards, and read them.

        Raises:
            RotationError: ranks called different modules, or a guard refuses the step.
        """
        if self.checks.is_pending:
            with self.hang_diagnosis.collective("the device's checks of this step"):
                self.checks.read()

    def refuse(self, what: str, identity: int, source: int, theirs: int) -> NoReturn:
        """Refuse a hop whose other end has another identity, on all ranks.

        Raises:
            RotationError: names both ranks and both modules.
        """
        error = self.hang_diagnosis.mispaired(what, self._difference(identity, source, theirs))
        self.checks.forget()
        self.transport.give_up()
        raise error

    def _difference(self, identity: int, source: int, theirs: int) -> str:
        if differ_in_trained(identity, theirs):
            return (
                f"rank {self.global_rank} trains other parameters of "
                f"{self.modules.describe(identity)} than rank {source};"
                " freeze and unfreeze the same ones on all ranks (requires_grad_)"
            )
        return self.modules.difference(self.global_rank, identity, source, theirs)

    def _described(self, offset: int, stream: Stream, *, arrives: bool) -> str:
        verb, preposition = ("receiving", "from") if arrives else ("sending", "to")
        what = f"{verb} {stream.name.lower()} {preposition} rank {self._global(offset)}"
        return f"rank {self._global(0)}: {what}"

    def _global(self, offset: int) -> int:
        return dist.get_global_rank(self.group, (self.rank + offset) % self.size)


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
        transport = ProcessGroupTransport(_hop_group(group, mesh.device_type))
        ring = _RINGS[group] = Ring(group, transport, diagnosis, modules, replicas)
        # NCCL keeps the host in no hop, so there its communicators are aborted at once
        diagnosis.end_waits_by(transport.give_up, hops_alone=mesh.device_type == "cpu")
        if mesh.size() == dist.get_world_size():
            _OF_ALL_RANKS[_world()] = ring
    return ring


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


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
        ring.transport.give_up()


def collective(what: str) -> AbstractContextManager[object]:
    """A context for a collective of all ranks of the default group.

    If the collective fails, a `RingError` names the rank at fault. Without a mesh of all ranks the
    context does nothing.
    """
    ring = _OF_ALL_RANKS.get(_world())
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
