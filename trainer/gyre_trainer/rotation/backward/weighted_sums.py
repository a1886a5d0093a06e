"""Whether backward needs what experts returned, as the graph of a forward tells."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor

# Nodes that save nothing but shapes, dtypes and indices: what goes through them is added up, or
# lies elsewhere. Any other node counts as one that needs what went in or came out.
_SAVE_NO_VALUES = frozenset(
    f"{name}Backward{number}"
    for name in (
        *("Add", "Sub", "Neg", "Sum", "Stack", "Cat", "Clone", "ToCopy", "Alias", "Detach"),
        *("IndexAdd", "IndexPut", "Index", "IndexSelect", "ScatterAdd", "Slice", "Select"),
        *("View", "UnsafeView", "ReshapeAlias", "Expand", "T", "Transpose", "Permute"),
        *("Unsqueeze", "Squeeze", "SplitWithSizes", "Split"),
    )
    for number in range(3)
) | {"_RowsAddedBackward"}  # of `layers.experts.token_rows`


def are_added_up(
    outputs: Sequence[Tensor], nodes: Collection[Any], inputs: Sequence[Tensor]
) -> bool:
    """Whether backward from ``outputs`` to ``inputs`` needs no value that ``nodes`` gave.

    That is so where they only go through nodes that save no values, and none of them depends on
    another one.
    """
    experts = set(nodes)
    reaches = {each.grad_fn: False for each in inputs if each.grad_fn is not None}
    pending = [each.grad_fn for each in outputs if each.grad_fn is not None]
    while pending:
        node = pending[-1]
        unknown = [each for each in _before(node) if each not in reaches]
        if node not in reaches and unknown:
            pending += unknown
            continue
        pending.pop()
        if node in reaches:
            continue
        depends = any(reaches[each] for each in _before(node))
        if depends and (node in experts or node.name() not in _SAVE_NO_VALUES):
            return False
        reaches[node] = depends or node in experts
    return True


def _before(node: Any) -> Iterator[Any]:
    return (each for each, _ in node.next_functions if each is not None)
