"""The tensors that autograd saves for a slice between forward and backward.

See [Note: The backward ring] in `gyre_trainer.rotation.ring_pass`.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gyre_trainer.errors import RotationError


class _WeightView(NamedTuple):
    """Where a saved view of the weights lies in the slice's buffer."""

    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class _SavedTensor(NamedTuple):
    """Any other saved tensor, and its version when it was saved."""

    tensor: Tensor
    version: int


class SavedTensors:
    """The saved tensors of one slice's graph; views of its weights are saved without memory.

    In backward such a view is made again on the buffer that then holds the slice.

    Attributes:
        flat: the slice's weights while they are on this rank; None while they are elsewhere.
    """

    def __init__(self, flat: Tensor, name: str) -> None:
        """``flat`` is the slice's weights, and ``name`` the module's, for messages."""
        self.flat: Tensor | None = flat
        self._storage = flat.untyped_storage()._cdata
        self._name = name

    def recording(self) -> saved_tensors_hooks:
        """A context in which autograd saves its tensors here."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> _WeightView | _SavedTensor:
        # the caller holds the slice while it records, so no other storage has this number
        if tensor.untyped_storage()._cdata == self._storage:
            return _WeightView(int(tensor.storage_offset()), tensor.size(), tensor.stride())
        return _SavedTensor(tensor.detach(), tensor._version)

    def _unpack(self, saved: _WeightView | _SavedTensor) -> Tensor:
        if isinstance(saved, _WeightView):
            if self.flat is None:
                raise RotationError(
                    f"backward reads weights of {self._name} that are not on this rank: its rule "
                    "says that backward reads none, or a tensor left a slice by another way than "
                    "the module's output, such as an attribute, a list or a cache"
                )
            return self.flat.as_strided(saved.size, saved.stride, saved.offset)
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(saved.tensor.shape)} that backward needs "
                "was modified in place after forward"
            )
        return saved.tensor
