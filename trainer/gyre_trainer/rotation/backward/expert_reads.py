"""Whether a layer reads what its experts returned, in a way that the graph of its forward hides.

A value that is taken out of the graph, by `detach()`, under `no_grad` or by `item()`, may decide
what other nodes save, or which code runs. Where backward computes the layer again with values that
are no numbers in place of experts' outputs, both would be wrong. See [Note: Parts that are computed
again] in `kept_outputs`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from gyre_trainer.rotation.backward.weighted_sums import Dependence

# Functions that give values, but no tensors.
_GIVE_VALUES = frozenset(
    (
        *("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__"),
        *("__complex__", "__contains__", "__format__", "is_nonzero", "equal", "allclose"),
    )
)


class WatchReads(TorchFunctionMode):
    """A context in which a layer computes for the first time.

    Attributes:
        found: whether something read an expert's output, or what was computed from it, and gave a
            value that takes no gradient.
    """

    def __init__(self, nodes: Sequence[Any], inputs: Iterable[Tensor]) -> None:
        """``nodes`` are those of experts, and grow; ``inputs`` are the layer's."""
        super().__init__()
        self.found = False
        self._nodes = nodes
        self._dependence = Dependence(inputs)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._nodes and not self.found and _gives_values(func, result):
            self.found = any(
                self._dependence.depends(leaf.grad_fn, self._nodes)
                for leaf in tree_leaves((args, kwargs))
                if isinstance(leaf, Tensor) and leaf.grad_fn is not None
            )
        return result


class Reads(TorchFunctionMode):
    """A context in which it is not known yet whose values must not be read.

    Attributes:
        nodes: of the graph, from which tensors come that something read in such a way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _gives_values(func, result):
            leaves = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            self.nodes += [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None]
        return result


def _gives_values(func: Any, result: Any) -> bool:
    """Whether a result has values of the arguments, and no gradient goes back from it."""
    name = getattr(func, "__name__", "")
    if name in _GIVE_VALUES:
        return True
    if name.endswith("_like") or name.startswith("new_"):  # of the same shape alone
        return False
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return bool(tensors) and not any(tensor.requires_grad for tensor in tensors)
