"""Bytes that this rank sends, counted where operators are dispatched."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gyre_trainer.accounting.dispatched import Dispatched, tensors_in
from gyre_trainer.accounting.live_bytes import COMMUNICATION_NAMESPACES

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

    def saw(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Sequence[Tensor],
        result: Any,
    ) -> None:
        """Count what the operator sent.

        Raises:
            NotImplementedError: it communicates in an unknown way. No figure is better than a wrong
                one.
        """
        if func.namespace in COMMUNICATION_NAMESPACES and func.namespace != "fsdp":
            self.total += self._bytes(func.name().partition(".")[0], args)

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
