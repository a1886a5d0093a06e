"""Counters of operators: each sees every operator after it has run, on real or on fake tensors.

Each context costs Python for every operator, so all counts of one step share one context.

Live bytes: every storage that tensors hold, from its allocation to its release, by category.

A storage is counted once, however many views it has, and as long as anything holds it: a name,
another tensor's graph, a buffer of a communication library. Real tensors and fake ones count alike.
Memory that a kernel or a communication library allocates and releases inside itself is not counted,
and neither is an allocator's rounding.

[Note: What gloo copies]

Gloo's reduce-scatter is an all-reduce of a copy of its input; each rank takes its part of that. The
copy is made where no operator is seen, but the wait splits it with one. NCCL and dry runs have no
such copy, so it is not counted: it made FSDP2's peaks up to a tenth too large.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from gyre_trainer.torch_internals import (
    FakeTensor,
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
)


class Ran(NamedTuple):
    """An operator that has run.

    Attributes:
        func: the operator.
        args: its arguments by position.
        kwargs: its arguments by name.
        given: the tensors among both.
        result: the value that it returned.
    """

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    given: Sequence[Tensor]
    result: Any


class Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that sees operators on plain tensors; wrappers come back as such."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and count its effects."""
        if func is torch.ops.prim.device.default:  # half of all operators on fake tensors
            return args[0].fake_device
        given = list(tensors_in((args, kwargs)))
        if any(map(is_traceable_wrapper_subclass, given)):
            return NotImplemented
        result = func(*args, **kwargs or {})
        self.saw(Ran(func, args, kwargs or {}, given, result))
        return result

    def saw(self, ran: Ran) -> None:
        """Take note of an operator that has run."""
        raise NotImplementedError


class Together(Dispatched):  # type: ignore[no-untyped-call]
    """A context in which several others see every operator, without being entered themselves."""

    def __init__(self, *others: Dispatched) -> None:
        super().__init__()
        self._others = others

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to keep the compiler out takes as long as some operators, and nothing is compiled."""
        return False

    def saw(self, ran: Ran) -> None:
        """Let each of them see it."""
        for each in self._others:
            each.saw(ran)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts; far faster than torch's pytree."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list, dict)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(part)


# In place, which torch's registry does not know: the product of these two arguments is added.
_ADDS_PRODUCT = (torch.ops.aten.addmm_, torch.ops.aten.baddbmm_)
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Operations(Dispatched):  # type: ignore[no-untyped-call]
    """A context that counts the operations of matrix products, convolutions and attention.

    A multiplication and the addition to its sum are two.

    Attributes:
        total: operations until now.
        num_operators: operators until now, which the host started.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.num_operators = 0

    def saw(self, ran: Ran) -> None:
        """Count the operations of an operator."""
        self.num_operators += 1
        self.total += _operations(ran)


def _operations(ran: Ran) -> int:
    packet, args = ran.func._overloadpacket, ran.args
    if packet is _ATTENTION:
        return 2 * _product(*args[:2])
    if packet is _ATTENTION_BACKWARD:  # computes the scores again
        return 5 * _product(*args[1:3])
    if packet in _ADDS_PRODUCT:
        return int(2 * args[1].numel() * args[2].shape[-1])
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **ran.kwargs, out_val=ran.result))
    return 0


def _product(query: Tensor, key: Tensor) -> int:
    """Operations of one product of all queries with all keys, the masked ones too."""
    return 2 * query.numel() * key.shape[-2]


COMMUNICATION_NAMESPACES = ("c10d", "_c10d_functional", "fsdp", "gyre")  # namespaces of operators
# For each operator: the argument that is sent, and how often a rank of N sends its bytes.
# Collectives count as their ring algorithms, which send the least.
_SENT: Mapping[str, tuple[int, Callable[[int], float]]] = {
    "c10d::send": (0, lambda n: 1),
    "gyre::send": (0, lambda n: 1),
    "c10d::allreduce_": (0, lambda n: 2 * (n - 1) / n),
    "c10d::_allgather_base_": (0, lambda n: (n - 1) / n),
    "c10d::allgather_": (1, lambda n: n - 1),
    "c10d::_reduce_scatter_base_": (1, lambda n: (n - 1) / n),
    "c10d::broadcast_": (0, lambda n: (n - 1) / n),
    "_c10d_functional::all_reduce": (0, lambda n: 2 * (n - 1) / n),
    "_c10d_functional::all_reduce_": (0, lambda n: 2 * (n - 1) / n),
    "_c10d_functional::all_gather_into_tensor": (0, lambda n: n - 1),
    "_c10d_functional::reduce_scatter_tensor": (0, lambda n: (n - 1) / n),
    **dict.fromkeys(
        (
            "c10d::recv_",
            "gyre::recv",
            "c10d::barrier",
            "_c10d_functional::wait_tensor",
            "_c10d_functional::_wrap_tensor_autograd",
        ),
        (0, lambda n: 0),
    ),
}

# Each rank sends other bytes to each: those of the input but for the part that stays.
_ALL_TO_ALL = "c10d::alltoall_base_"


class SentBytes(Dispatched):  # type: ignore[no-untyped-call]
    """A context that counts the bytes that operators send.

    Attributes:
        total: bytes sent until now.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.total = 0
        self._num_ranks = num_ranks

    def saw(self, ran: Ran) -> None:
        """Count the bytes that the operator sent.

        Raises:
            NotImplementedError: it communicates in an unknown way. No figure is better than a wrong
                one.
        """
        if ran.func.namespace in COMMUNICATION_NAMESPACES and ran.func.namespace != "fsdp":
            self.total += self._bytes(ran.func.name().partition(".")[0], ran.args)

    def _bytes(self, name: str, args: Sequence[Any]) -> int:
        if name == _ALL_TO_ALL:
            return _bytes_to_others(*args[1:])
        if name not in _SENT:
            raise NotImplementedError(f"{name} sends an unknown number of bytes")
        argument, times = _SENT[name]
        nbytes = sum(leaf.numel() * leaf.element_size() for leaf in tensors_in(args[argument]))
        return round(nbytes * times(self._num_ranks))


def _bytes_to_others(
    sent: Tensor, group: Any, _incoming: Sequence[int], outgoing: Sequence[int], *_: Any
) -> int:
    """Bytes of an all-to-all: ``outgoing`` has the rows for each rank; empty for equal parts."""
    ranks = dist.ProcessGroup.unbox(group)
    num_rows = sent.shape[0]
    staying = outgoing[ranks.rank()] if outgoing else num_rows // ranks.size()
    return sent.nbytes * (num_rows - staying) // max(1, num_rows)


class Category(StrEnum):
    """The use of a storage.

    COMMUNICATION storages carry weights or gradients between ranks: remote slices, gathered layers,
    buckets. ACTIVATIONS are all storages without a better category: tensors that autograd saves,
    gradients of activations, temporaries.
    """

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    COMMUNICATION = "communication"
    ACTIVATIONS = "activations"
    LOGITS = "logits"


CATEGORIES = tuple(Category)


@dataclass(frozen=True, eq=False)
class Timeline:
    """Live bytes at each moment that changed them or was marked.

    Attributes:
        events: the event of each moment: the operator that allocated, "release", "resize", or a
            mark.
        live: bytes after each event, of shape (moments, categories), int64; the columns are
            CATEGORIES.
    """

    events: Sequence[str]
    live: npt.NDArray[np.int64]

    @property
    def totals(self) -> npt.NDArray[np.int64]:
        """Bytes of all categories at each moment."""
        totals: npt.NDArray[np.int64] = self.live.sum(axis=1)
        return totals

    @property
    def peak_index(self) -> int:
        """The first moment with the most bytes."""
        return int(self.totals.argmax())

    @property
    def peak_bytes(self) -> int:
        """The most bytes at any moment."""
        return int(self.totals.max())

    def at(self, index: int) -> dict[Category, int]:
        """Bytes by category at one moment."""
        return {
            category: int(value)
            for category, value in zip(CATEGORIES, self.live[index], strict=True)
        }

    def peak(self) -> dict[Category, int]:
        """Bytes by category at the first moment with the most; they add up to `peak_bytes`."""
        return self.at(self.peak_index)

    def since(self, event: str) -> "Timeline":
        """The part that begins with the last moment of that event."""
        start = len(self.events) - 1 - list(reversed(self.events)).index(event)
        return Timeline(self.events[start:], self.live[start:])


@dataclass(slots=True, eq=False)
class _Storage:
    """A storage that is alive, or was.

    Attributes:
        nbytes: its size; 0 after its release.
        category: its use.
        labelled: whether a label said so; else the category is a guess.
        foreign: whether a communication library allocated it for itself.
        alive: a weak reference whose callback counts the release.
    """

    nbytes: int
    category: Category
    labelled: bool = False
    foreign: bool = False
    alive: "weakref.ref[torch.UntypedStorage] | None" = None


class LiveBytes(Dispatched):  # type: ignore[no-untyped-call]
    """A context that counts the storages that operators return or touch, until they are released.

    A storage from before counts from when it is touched or labelled, so label parameters first.
    With a `FakeTensorMode`, enter this context last. A storage has one category for all its life,
    that of its last label, so a buffer that becomes a parameter's gradient counts as gradient from
    its first moment.

    Attributes:
        total: bytes alive now.
        peak: the most bytes that were alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.peak = 0
        self._defaults = [Category.ACTIVATIONS]
        self._known: dict[int, _Storage] = {}  # by address
        self._changes: list[tuple[str, _Storage, int]] = []
        # by size: inputs of reduce-scatters whose copy was not seen yet
        self._scattered = Counter[int]()
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> Self:
        self._entered.append(self.counting_resizes())
        self._entered[-1].__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._entered.pop().__exit__(None, None, None)

    @contextmanager
    def counting_resizes(self) -> Iterator[None]:
        """A context that counts `UntypedStorage.resize_`, which is no operator."""
        resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = _counting_resize(self, resize)  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def saw(self, ran: Ran) -> None:
        """Count the storages that the operator allocated, or resized."""
        func, args = ran.func, ran.args
        travels = func.namespace in COMMUNICATION_NAMESPACES
        if func is torch.ops.c10d._reduce_scatter_base_.default:
            self._scattered[args[1].nbytes] += 1
        elif func is torch.ops.aten.split.Tensor:
            self._leave_out_copy(args[0])
        for tensor in filter(_has_memory, chain(ran.given, tensors_in(ran.result))):
            storage = self._observe(func, tensor.untyped_storage())
            if travels and not storage.labelled:
                storage.category = Category.COMMUNICATION

    def label(self, category: Category, tensors: Iterable[Tensor | None]) -> None:
        """Set the category of the storages of ``tensors``. New storages count from now on."""
        for tensor in filter(
            _has_memory,
            tensors_in([_unwrapped(tensor) for tensor in tensors if tensor is not None]),
        ):
            storage = self._observe(category, tensor.untyped_storage())
            storage.category, storage.labelled = category, True

    @contextmanager
    def during(self, category: Category) -> Iterator[None]:
        """A context whose allocations have this category if they are neither labelled nor sent."""
        self._defaults.append(category)
        try:
            yield
        finally:
            self._defaults.pop()

    def mark(self, event: str) -> None:
        """Name this moment of the timeline."""
        self._changes.append((event, _Storage(0, Category.ACTIVATIONS), 0))

    def timeline(self) -> Timeline:
        """All moments until now."""
        column = {category: index for index, category in enumerate(CATEGORIES)}
        changes = list(self._changes)
        deltas = np.zeros((len(changes), len(CATEGORIES)), dtype=np.int64)
        for row, (_, storage, delta) in enumerate(changes):
            deltas[row, column[storage.category]] = delta
        return Timeline([event for event, _, _ in changes], deltas.cumsum(axis=0))

    def _observe(self, event: object, untyped: torch.UntypedStorage) -> _Storage:
        """Count a storage that is new or has another size."""
        address = untyped._cdata
        storage = self._known.get(address)
        if storage is None:
            storage = self._known[address] = _Storage(0, self._defaults[-1])
            storage.alive = weakref.ref(untyped, partial(self._release, address))
        if not storage.foreign:
            self._change(event, storage, untyped.nbytes())
        return storage

    def _leave_out_copy(self, tensor: Tensor) -> None:
        """Count nothing of a storage if it is a [Note: What gloo copies]."""
        untyped = tensor.untyped_storage()
        if untyped._cdata in self._known or not self._scattered[untyped.nbytes()]:
            return
        self._scattered[untyped.nbytes()] -= 1
        storage = _Storage(0, Category.COMMUNICATION, foreign=True)
        storage.alive = weakref.ref(untyped, partial(self._release, untyped._cdata))
        self._known[untyped._cdata] = storage

    def _release(self, address: int, _: object) -> None:
        self._change("release", self._known.pop(address), 0)

    def _change(self, event: object, storage: _Storage, nbytes: int) -> None:
        delta = nbytes - storage.nbytes
        if delta:
            storage.nbytes = nbytes
            self.total += delta
            self.peak = max(self.peak, self.total)
            self._changes.append((str(event), storage, delta))


def _counting_resize(live: LiveBytes, resize: Callable[..., Any]) -> Callable[..., Any]:
    """`UntypedStorage.resize_`, counted: FSDP2 allocates with it, and it is no operator."""

    def resize_(self: torch.UntypedStorage, nbytes: int) -> Any:
        result = resize(self, nbytes)
        live._observe("resize", self)
        return result

    return resize_


def _has_memory(tensor: Tensor) -> bool:
    """Whether the tensor has a storage of its own with memory behind it, real or fake."""
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return tensor.layout == torch.strided and device.type != "meta"


def _unwrapped(tensor: Any) -> list[Tensor]:
    """The plain tensors that a wrapper such as a DTensor consists of."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _unwrapped(getattr(tensor, name))]
