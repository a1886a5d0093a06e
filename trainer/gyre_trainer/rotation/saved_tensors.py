"""What autograd keeps of a slice between forward and backward."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gyre_trainer.shards.sharded_parameters import same_storage


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a saved view of the weights lay in the slice's buffer."""

    offset: int
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Kept:
    """Any other saved tensor, and how often it had been written to."""

    tensor: Tensor
    version: int


class SavedSlice:
    """Saved tensors of one slice's graph; views of its weights are found again in whatever buffer holds the slice.

    Attributes:
        flat: the slice's weights while it is here, None while it is elsewhere.
    """

    def __init__(self, flat: Tensor) -> None:
        self.flat: Tensor | None = flat

    def recording(self) -> saved_tensors_hooks:
        """A context in which autograd saves here."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> _Place | _Kept:
        assert self.flat is not None
        if same_storage(tensor, self.flat):
            return _Place(int(tensor.storage_offset()), tensor.size(), tensor.stride())
        return _Kept(tensor.detach(), tensor._version)

    def _unpack(self, saved: _Place | _Kept) -> Tensor:
        if isinstance(saved, _Place):
            assert self.flat is not None, "the rule says that its backward reads no weights, but it does"
            return self.flat.as_strided(saved.size, saved.stride, saved.offset)
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(saved.tensor.shape)} that backward needs was modified in place after forward"
            )
        return saved.tensor
