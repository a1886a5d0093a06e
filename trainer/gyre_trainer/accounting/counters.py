"""The three counters of a step: live bytes, operations, and sent bytes.

One context sees every operator after it has run, on real or on fake tensors.

Live bytes are those of every storage that tensors hold, from its allocation to its release, by
category. A storage is counted once, however many views it has, and as long as anything holds it: a
name, another tensor's graph, a buffer of a communication library. Real tensors and fake ones count
alike. Memory that a kernel or a communication library allocates and releases inside itself is not
counted, and neither is an allocator's rounding.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import chain
from typing import Any, Self

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
    def peak_bytes(self) -> int:
        """The most bytes at any moment."""
        return int(self.live.sum(axis=1).max())

    def at(self, index: int) -> dict[Category, int]:
        """Bytes by category at one moment."""
        return dict(zip(CATEGORIES, self.live[index].tolist(), strict=True))

    def peak(self) -> dict[Category, int]:
        """Bytes by category at the first moment with the most; they add up to `peak_bytes`."""
        return self.at(int(self.live.sum(axis=1).argmax()))

    def since(self, event: str) -> "Timeline":
        """The part that begins with the last moment of that event."""
        start = len(self.events) - 1 - list(reversed(self.events)).index(event)
        return Timeline(self.events[start:], self.live[start:])


@dataclass(slots=True, eq=False)
class _Storage:
    """A storage, alive or released.

    Attributes:
        alive: a weak reference whose callback counts the release; None for a mark.
        category: its use.
        nbytes: its size; 0 after its release, and where it is not counted.
        labelled: whether a label said its category; else that is a guess.
        counted: whether it is; a copy that gloo made for itself is not.
    """

    alive: "weakref.ref[torch.UntypedStorage] | None"
    category: Category
    nbytes: int = 0
    labelled: bool = False
    counted: bool = True


class Counters(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes allocated, operations and bytes sent by operators on plain tensors.

    A storage from before counts from when it is touched or labelled, so label parameters first.
    With a `FakeTensorMode`, enter this context last. A storage has one category for all its life,
    that of its last label, so a buffer that becomes a parameter's gradient counts as gradient from
    its first moment.

    Attributes:
        live_bytes: bytes alive now.
        peak_bytes: the most bytes that were alive.
        sent_bytes: bytes sent to other ranks until now.
        operations: of matrix products, convolutions and attention; a multiplication and the
            addition to its sum are two.
        num_operators: operators until now, which the host started.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self.sent_bytes = self.operations = self.num_operators = 0
        self._defaults = [Category.ACTIVATIONS]
        self._known: dict[int, _Storage] = {}  # by the identity of the storage's Python object
        self._changes: list[tuple[str, _Storage, int]] = []
        self._resizes: list[Any] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to keep the compiler out takes as long as some operators, and nothing is compiled."""
        return False

    def __enter__(self) -> Self:
        # FSDP2 allocates by resizing storages, which is no operator
        resize = torch.UntypedStorage.resize_

        def counted(storage: Any, nbytes: int) -> Any:
            result = resize(storage, nbytes)
            self._observe("resize", storage)
            return result

        self._resizes.append(resize)
        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resizes.pop()  # type: ignore[method-assign]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and count its effects.

        Raises:
            NotImplementedError: it sends an unknown number of bytes. No figure is better than a
                wrong one.
        """
        if func is torch.ops.prim.device.default:  # half of all operators on fake tensors
            return args[0].fake_device
        kwargs = kwargs or {}
        given = list(tensors_in((args, kwargs)))
        if any(map(is_traceable_wrapper_subclass, given)):
            return NotImplemented
        result = func(*args, **kwargs)
        self.num_operators += 1
        self.operations += _operations(func.overloadpacket, args, kwargs, result)
        self.sent_bytes += _sent_bytes(func, args)
        self._count(func, given, result)
        return result

    def _count(self, func: Any, given: Sequence[Tensor], result: Any) -> None:
        """Count the storages that the operator allocated, or resized."""
        if func is torch.ops.aten.split.Tensor:
            # Gloo's reduce-scatter is an all-reduce of a copy of its input, which its wait splits.
            # The copy is made where no operator is seen. NCCL and fake ranks have no such copy.
            self._observe(func, given[0].untyped_storage(), counted=False)
        travels = func.namespace in _COMMUNICATION
        for tensor in filter(_has_memory, chain(given, tensors_in(result))):
            storage = self._observe(func, tensor.untyped_storage())
            if travels and not storage.labelled:
                storage.category = Category.COMMUNICATION

    def label(self, category: Category, tensors: Iterable[Tensor | None]) -> None:
        """Set the category of the storages of ``tensors``. New storages count from now on."""
        plain = [_unwrapped(tensor) for tensor in tensors if tensor is not None]
        for tensor in filter(_has_memory, tensors_in(plain)):
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
        self._changes.append((event, _Storage(None, Category.ACTIVATIONS), 0))

    def timeline(self) -> Timeline:
        """All moments until now."""
        changes = list(self._changes)
        deltas = np.zeros((len(changes), len(CATEGORIES)), dtype=np.int64)
        for row, (_, storage, delta) in enumerate(changes):
            deltas[row, CATEGORIES.index(storage.category)] = delta
        return Timeline([event for event, _, _ in changes], deltas.cumsum(axis=0))

    def _observe(
        self, event: object, untyped: torch.UntypedStorage, *, counted: bool = True
    ) -> _Storage:
        """Count a storage, or the change of its size; a new one only if it is to be ``counted``."""
        # Torch keeps one Python object for each storage, as long as anything holds the storage.
        key = id(untyped)
        storage = self._known.get(key)
        if storage is None:
            alive = weakref.ref(untyped, partial(self._release, key))
            storage = self._known[key] = _Storage(alive, self._defaults[-1], counted=counted)
        if storage.counted:
            self._change(event, storage, untyped.nbytes())
        return storage

    def _release(self, key: int, _: object) -> None:
        self._change("release", self._known.pop(key), 0)

    def _change(self, event: object, storage: _Storage, nbytes: int) -> None:
        delta = nbytes - storage.nbytes
        if delta:
            storage.nbytes = nbytes
            self.live_bytes += delta
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            self._changes.append((str(event), storage, delta))


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts; far faster than torch's pytree."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list, dict)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(part)


def _has_memory(tensor: Tensor) -> bool:
    """Whether the tensor has a storage of its own with memory behind it, real or fake."""
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return tensor.layout == torch.strided and device.type != "meta"


def _unwrapped(tensor: Any) -> list[Any]:
    """The plain tensors, and what is none, that a wrapper such as a DTensor consists of."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _unwrapped(getattr(tensor, name))]


_aten = torch.ops.aten
# Torch's registry knows neither these nor grouped products. In place, a product is added.
_ADDS_PRODUCT = (_aten.addmm_, _aten.baddbmm_)
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward


def _operations(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    if packet is _ATTENTION:
        return 2 * _product(*args[:2])
    if packet is _ATTENTION_BACKWARD:  # computes the scores again
        return 5 * _product(*args[1:3])
    if packet is _aten._grouped_mm:  # its groups share the rows, the columns or the sums
        one, other = args[:2]
        return int(2 * min(one.numel() * other.shape[-1], one.shape[-2] * other.numel()))
    if packet in _ADDS_PRODUCT:
        return int(2 * args[1].numel() * args[2].shape[-1])
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    return 0


def _product(query: Tensor, key: Tensor) -> int:
    """Operations of one product of all queries with all keys, the masked ones too."""
    return 2 * query.numel() * key.shape[-2]


_COMMUNICATION = ("c10d", "_c10d_functional", "fsdp", "gyre")  # namespaces of operators
# For each operator: the sent argument, and how often a rank of N sends its bytes.
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


def _sent_bytes(func: Any, args: Sequence[Any]) -> int:
    """Bytes that an operator sends to other ranks."""
    if func.namespace not in _COMMUNICATION or func.namespace == "fsdp":
        return 0
    name = func.name().partition(".")[0]
    if name == "c10d::alltoall_base_":
        return _bytes_to_others(*args[1:])
    if name not in _SENT:
        raise NotImplementedError(f"{name} sends an unknown number of bytes")
    argument, times = _SENT[name]
    nbytes = sum(leaf.numel() * leaf.element_size() for leaf in tensors_in(args[argument]))
    return round(nbytes * times(dist.get_world_size()))


def _bytes_to_others(
    sent: Tensor, group: Any, _incoming: Sequence[int], outgoing: Sequence[int], *_: Any
) -> int:
    """Bytes of an all-to-all: ``outgoing`` has the rows for each rank; empty for equal parts."""
    ranks = dist.ProcessGroup.unbox(group)
    num_rows = sent.shape[0]
    staying = outgoing[ranks.rank()] if outgoing else num_rows // ranks.size()
    return sent.nbytes * (num_rows - staying) // max(1, num_rows)
