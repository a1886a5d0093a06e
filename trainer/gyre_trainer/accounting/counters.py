"""Counters of operators: each sees every operator after it has run, on real or on fake tensors.

Each context costs Python for every operator, so all counts of one step share one context.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.flop_counter import flop_registry

from gyre_trainer.layers.head import multiplicity


class Ran(NamedTuple):
    """An operator that has run.

    Attributes:
        func: the operator.
        args: its arguments by position.
        kwargs: its arguments by name.
        given: the tensors among both.
        result: what it returned.
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
        """Count what the operator computed, and all that it stands for."""
        self.num_operators += multiplicity()
        self.total += multiplicity() * _operations(ran)


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
}
_SILENT = frozenset(
    {
        "c10d::recv_",
        "gyre::recv",
        "c10d::barrier",
        "_c10d_functional::wait_tensor",
        "_c10d_functional::_wrap_tensor_autograd",
    }
)

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
        """Count what the operator sent.

        Raises:
            NotImplementedError: it communicates in an unknown way. No figure is better than a wrong
                one.
        """
        if ran.func.namespace in COMMUNICATION_NAMESPACES and ran.func.namespace != "fsdp":
            self.total += self._bytes(ran.func.name().partition(".")[0], ran.args)

    def _bytes(self, name: str, args: Sequence[Any]) -> int:
        if name in _SILENT:
            return 0
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
    """What an all-to-all sends: ``outgoing`` has the rows for each rank; empty for equal parts."""
    ranks = dist.ProcessGroup.unbox(group)
    num_rows = sent.shape[0]
    staying = outgoing[ranks.rank()] if outgoing else num_rows // ranks.size()
    return sent.nbytes * (num_rows - staying) // max(1, num_rows)
