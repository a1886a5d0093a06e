"""The identity of a hop: neighbours compare it, so that a slice is never taken for another one.

Two ranks that call different modules of one shape would exchange weights without an error, and
compute with the wrong ones.

Also here:

* Transient buffers that slices and their gradients travel in, and the room behind them.
* Ranges in a profiler's trace for what a rotation does; without a profiler, one check each.
* Numbers that a device has and that a step must find as expected. A host that read each when it
  arrives would wait for the device, so they stay there until just before the optimizer's step,
  which would spread an error.

[Note: The number behind a buffer]

Eight bytes follow every tensor that travels: the identity of its hop. So a number comes in one
message with the values that it belongs to. Memory of this file has room for it behind its last
element. Behind a part of larger memory there may be values: `framed` says which tensors have room.
Others travel as a copy.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref
from zlib import crc32

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.profiler import record_function

from gyre_trainer.errors import RotationError
from gyre_trainer.torch_internals import profiler_enabled

_NUMBER_BYTES = 8
_ROOM_BYTES = 2 * _NUMBER_BYTES  # the number, where eight divide its address

# By storage: the first byte behind which a hop may write its number.
_ROOMS: WeakKeyDictionary[UntypedStorage, int] = WeakKeyDictionary()


def with_room(
    numel: int, dtype: torch.dtype, device: torch.device, *, is_scratch: bool = False
) -> Tensor:
    """A flat tensor, uninitialised, that travels without a copy.

    Args:
        numel: the number of its elements.
        dtype: of the tensor.
        device: of the tensor.
        is_scratch: whether a hop may also write behind a part of it, over other elements.
    """
    memory = torch.empty(numel + _ROOM_BYTES // dtype.itemsize, dtype=dtype, device=device)
    _ROOMS[memory.untyped_storage()] = 0 if is_scratch else numel * dtype.itemsize
    return memory[:numel]


def copy_with_room(flat: Tensor) -> Tensor:
    """A copy that travels without another copy."""
    return with_room(flat.numel(), flat.dtype, flat.device).copy_(flat)


def framed(flat: Tensor) -> Tensor | None:
    """A view of a flat tensor and of the number behind it; None where there is no room.

    The number is in the last eight bytes. Between it and the tensor are up to seven more.
    """
    first = _ROOMS.get(flat.untyped_storage())
    itemsize = flat.element_size()
    start = flat.storage_offset() * itemsize
    end = start + flat.numel() * itemsize
    if first is None or end < first:
        return None
    stop = -(-end // _NUMBER_BYTES) * _NUMBER_BYTES + _NUMBER_BYTES
    return flat.as_strided(((stop - start) // itemsize,), (1,))


def number_in(frame: Tensor) -> Tensor:
    """The number at the end of a frame: a view of one int64."""
    return frame[-(_NUMBER_BYTES // frame.element_size()) :].view(torch.int64)[0]


def current_stream(device: torch.device) -> object:
    """The stream of CUDA on which the caller's kernels run; None for a CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


class BufferPool:
    """Transient buffers of one ring, all as large as the largest that was asked for.

    Nothing is allocated once that size is known. Queued kernels may still use a buffer that was
    given back, so all buffers of a device are used on one stream.

    Attributes:
        largest_whole_numel: elements of the largest slice that cannot be divided. Larger slices
            that can be divided travel in pieces of about this size, so that they do not enlarge
            every buffer.
    """

    def __init__(self) -> None:
        self.largest_whole_numel = 0
        self._streams: dict[torch.device, object] = {}
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self._numel: dict[tuple[torch.dtype, torch.device], int] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer of at least ``numel`` elements, which belongs to the caller until `put`.

        Raises:
            RotationError: other buffers of this device were used on another stream.
        """
        self._require_stream(device)
        key = (dtype, device)
        if numel > self._numel.get(key, -1):
            self._numel[key], self._free[key] = max(numel, self.largest_whole_numel), []
        if self._free[key]:
            return self._free[key].pop()
        # an inference tensor could not carry gradients later
        with torch.inference_mode(mode=False):
            return self.allocate(self._numel[key], dtype, device)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A new buffer, with room behind any part of it."""
        return with_room(numel, dtype, device, is_scratch=True)

    def put(self, buffer: Tensor) -> None:
        """Give back a buffer of `take`. One that is smaller than buffers are now is dropped.

        Raises:
            RotationError: it was used on another stream.
        """
        self._require_stream(buffer.device)
        key = (buffer.dtype, buffer.device)
        if buffer.numel() == self._numel[key]:
            self._free[key].append(buffer)

    def _require_stream(self, device: torch.device) -> None:
        stream = current_stream(device)
        if self._streams.setdefault(device, stream) != stream:
            raise RotationError(
                f"{device}: rotated modules were called on one CUDA stream and now on another, "
                "but they share buffers. Call them, and backward, on one stream."
            )


_NOTHING = nullcontext()
_PATHS: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def name_modules(model: nn.Module) -> None:
    """Let the ranges of a profiler's trace name modules by their paths in ``model``.

    Without this call a range has the name of the module's class.

    Example:
        name_modules(model)
        with torch.profiler.profile() as profiler:
            model(x).sum().backward()  # ranges such as "blocks.0.mlp forward: slice 1, hop 1"
    """
    for path, module in model.named_modules():
        _PATHS[module] = path


def path_of(module: nn.Module) -> str:
    """The module's path in its model, or the name of its class where no path is known."""
    return _PATHS.get(module) or type(module).__name__


def slice_span(
    module: nn.Module, phase: str, index: int, hop: int
) -> AbstractContextManager[object]:
    """The range in which a rotated module computes with slice ``index``.

    The slice has made ``hop`` hops to reach this rank; 0 is the own slice.
    """
    if not profiler_enabled():
        return _NOTHING
    return record_function(f"{path_of(module)} {phase}: slice {index}, hop {hop}")


def span(what: str) -> AbstractContextManager[object]:
    """A range of that name."""
    return record_function(what) if profiler_enabled() else _NOTHING


# Bits of each part of a packed identity; larger numbers wrap round. 2^20 modules are more than
# any model has, and two passes of one module differ by their direction and stream.
_STEP_BITS, _ROUND_BITS, _NUMBER_BITS, _TRAINED_BITS = 14, 6, 20, 16


class HopIdentity(NamedTuple):
    """The identity of one hop.

    Attributes:
        number: the module's number in `Modules`, the same on every rank.
        forward: whether the module's forward goes on, not its backward.
        gradients: whether gradients travel, not weights.
        round_: the round of the ring pass.
        step: the hop's number in its round, from 1.
        trained: of which of the module's parameters gradients travel, as `digest_of_names` gives
            it; 0 for weights.
    """

    number: int
    forward: bool
    gradients: bool
    round_: int
    step: int
    trained: int = 0

    def pack(self) -> int:
        """A number in [1, 2^59); other hops, and those of other modules, have other numbers."""
        packed: int = self.trained % 2**_TRAINED_BITS
        packed = packed << _NUMBER_BITS | self.number % 2**_NUMBER_BITS
        packed = packed << _ROUND_BITS | self.round_ % 2**_ROUND_BITS
        packed = packed << _STEP_BITS | self.step % 2**_STEP_BITS
        flags = self.forward << 1 | self.gradients
        return (packed << 2 | flags) + 1

    @classmethod
    def unpack(cls, packed: int) -> "HopIdentity":
        """The hop of a number that `pack` gave."""
        rest, flags = divmod(packed - 1, 4)
        rest, step = divmod(rest, 2**_STEP_BITS)
        rest, round_ = divmod(rest, 2**_ROUND_BITS)
        trained, number = divmod(rest, 2**_NUMBER_BITS)
        return cls(number, bool(flags & 2), bool(flags & 1), round_, step, trained)


def digest_of_names(names: Iterable[str]) -> int:
    """A number in [0, 2^16) that differs for nearly all other names."""
    return crc32("\n".join(names).encode()) % (1 << _TRAINED_BITS)


def differ_in_trained(one: int, other: int) -> bool:
    """Whether two packed identities are of one hop, but of gradients of other parameters."""
    if not (one and other):
        return False
    hops = HopIdentity.unpack(one), HopIdentity.unpack(other)
    return one != other and len({hop._replace(trained=0) for hop in hops}) == 1


class Modules:
    """The modules that rotate on one ring, by numbers that are the same on every rank.

    The ranks rotate the same modules in the same order, so they count alike.

    Attributes:
        count: the number that the next module gets.
    """

    def __init__(self) -> None:
        self.count = 0
        self._modules: dict[int, ref[nn.Module]] = {}

    def add(self, module: nn.Module) -> int:
        """The number of a new module."""
        number, self.count = self.count, self.count + 1
        self._modules[number] = ref(module)
        return number

    def describe(self, packed: int) -> str:
        """Names the module and the part of its pass, such as "blocks.0.mlp (forward, step 1)"."""
        if not packed:
            return "something that is no module"
        hop = HopIdentity.unpack(packed)
        what = "forward" if hop.forward else "backward, gradients" if hop.gradients else "backward"
        part = f"{what}, step {hop.step} of round {hop.round_}"
        return f"{self._name(hop.number)} ({part})"

    def difference(self, rank: int, identity: int, other: int, theirs: int) -> str:
        """Says which modules two ranks call."""
        return (
            f"rank {rank} calls {self.describe(identity)}, "
            f"but rank {other} calls {self.describe(theirs)}; "
            "all ranks must call the same modules in the same order, also to evaluate: call the "
            "model on all ranks, or use gyre-train eval"
        )

    def _name(self, number: int) -> str:
        known = self._modules.get(number)
        module = None if known is None else known()
        return f"module {number}" if module is None else path_of(module)


# Numbers of a step: one for each hop and guard. Without an optimizer of torch that reads them, they
# are read at the largest capacity.
_FIRST_CAPACITY = 1_024
_LARGEST_CAPACITY = 2**16

Failure = Callable[[int], None]
"""Takes the number that was found, and raises."""


class StepChecks:
    """Compares numbers of a step: on a CPU at once, elsewhere when `read` is called."""

    def __init__(self) -> None:
        self._numbers: Tensor | None = None
        self._expected: list[tuple[int, Failure]] = []

    @property
    def is_pending(self) -> bool:
        """Whether there is anything to read."""
        return bool(self._expected)

    def require(self, number: Tensor, expected: int, fail: Failure) -> None:
        """Require that ``number``, a scalar, is ``expected``; else ``fail`` is called.

        The tensor may be written to afterwards.
        """
        if number.device.type != "cpu":
            self.note(number, expected, fail)
        elif (found := int(number)) != expected:
            fail(found)

    def note(self, number: Tensor, expected: int, fail: Failure) -> None:
        """Let the next `read` compare a number; nothing waits for the device now."""
        count = len(self._expected)
        if count == _LARGEST_CAPACITY:
            self.read()
            count = 0
        if self._numbers is None:
            self._numbers = torch.empty(_FIRST_CAPACITY, dtype=torch.int64, device=number.device)
        elif count == len(self._numbers):
            self._numbers = torch.cat((self._numbers, torch.empty_like(self._numbers)))
        self._numbers[count].copy_(number)
        self._expected.append((expected, fail))

    def read(self) -> None:
        """Wait until the device has all numbers, and compare them, the earliest first."""
        expected, self._expected = self._expected, []
        if not expected:
            return
        assert self._numbers is not None
        here = torch.empty(len(expected), dtype=torch.int64, pin_memory=self._numbers.is_cuda)
        here.copy_(self._numbers[: len(expected)], non_blocking=True)
        if self._numbers.is_cuda:
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
            arrived.synchronize()
        for found, (wanted, fail) in zip(here.tolist(), expected, strict=True):
            if found != wanted:
                fail(found)

    def forget(self) -> None:
        """Drop the noted numbers, as the ring has failed."""
        self._expected = []


def on_device(values: Sequence[float], like: Tensor) -> Tensor:
    """The values as a tensor like ``like``, in dtype and device, without waiting for the device."""
    if not like.is_cuda:
        return like.new_tensor(values)
    return torch.tensor(values, dtype=like.dtype).pin_memory().to(like.device, non_blocking=True)
