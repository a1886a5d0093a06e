"""Whether backward needs what experts, or a layer's last block, returned.

The graph of a forward tells.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
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

# Of what is multiplied by a mask, or dropped out, the mask alone is saved.
_SAVE_A_MASK = frozenset(("MulBackward0", "NativeDropoutBackward0"))


def are_added_up(
    outputs: Sequence[Tensor], nodes: Collection[Any], inputs: Sequence[Tensor]
) -> bool:
    """Whether backward from ``outputs`` to ``inputs`` needs no value that ``nodes`` gave.

    That is so where they only go through nodes that save no values, and none of them depends on
    another one.
    """
    dependence = Dependence(inputs)
    for output in outputs:
        dependence.depends(output.grad_fn, nodes)
    return not dependence.is_saved


def are_dropped_out(outputs: Sequence[Tensor], nodes: Collection[Any]) -> bool:
    """Whether backward from ``outputs`` needs a mask that what ``nodes`` gave is multiplied by.

    And no value of theirs, as `are_added_up` says.
    """
    if not nodes:
        return False
    dependence = Dependence((), after=min(node._sequence_nr() for node in nodes))
    for output in outputs:
        dependence.depends(output.grad_fn, nodes)
    return dependence.has_mask and not dependence.is_saved


class Dependence:
    """Which nodes of a growing graph depend on some of its nodes.

    Attributes:
        is_saved: whether a node was seen that depends on one of them and may save their values.
        has_mask: whether a node was seen that saves a mask alone.
    """

    def __init__(self, inputs: Iterable[Tensor], after: int = 0) -> None:
        """``inputs`` end the search: nothing before them depends on the nodes.

        Nor does a node with a number below ``after``: these are numbered as they are made.
        """
        self.is_saved = self.has_mask = False
        self._after = after
        self._reaches = {each.grad_fn: False for each in inputs if each.grad_fn is not None}
        self._known: set[Any] = set()

    def depends(self, node: Any, on: Collection[Any]) -> bool:
        """Whether ``node`` is one of ``on``, which may grow, or depends on one."""
        if node is None:
            return False
        if len(self._known) != len(on):
            self._known = set(on)
        pending = [node]
        while pending:
            each = pending[-1]
            unknown = [before for before in _before(each) if before not in self._reaches]
            if each not in self._reaches and each._sequence_nr() < self._after:
                self._reaches[each] = False
            if each not in self._reaches and unknown:
                pending += unknown
                continue
            pending.pop()
            if each in self._reaches:
                continue
            reaches = any(self._reaches[before] for before in _before(each))
            is_own = each in self._known
            if reaches and not is_own and _saves_a_mask(each):
                self.has_mask = True
            elif reaches and (is_own or each.name() not in _SAVE_NO_VALUES):
                self.is_saved = True
            self._reaches[each] = reaches or is_own
        return self._reaches[node]


def _saves_a_mask(node: Any) -> bool:
    """Whether a node saves what one input is multiplied by, and that takes no gradient."""
    takers = [each for each, _ in node.next_functions if each is not None]
    return node.name() in _SAVE_A_MASK and len(takers) == 1


def _before(node: Any) -> Iterator[Any]:
    return (each for each, _ in node.next_functions if each is not None)
