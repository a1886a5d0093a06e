"""Large parameters that a forward reads itself, as in `x @ self.weight`: gathered on use.

[Note: All-gather on use]

Each rank keeps a shard of such a parameter. When the forward of the module that reads it is called,
the shards go round the ring once, N-1 hops, and a plain tensor with all values stands in the
parameter's place until the forward returns. Autograd saves the place of such values, not the
values, so nothing whole lives between forward and backward. Backward gathers once more, N-1 hops,
and sends the gradient round the ring, N-1 hops, so that each rank has its shard's. These are the
bytes of a module that rotates. What differs is the memory: the parameters that one forward reads,
and in backward their gradients, are whole on every rank for a while.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from gyre_trainer.comm.identity import path_of
from gyre_trainer.comm.ring import Ring
from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.rule import RotationPolicy
from gyre_trainer.shards.layout import GradientRing, Layout, all_pieces, with_spec
from gyre_trainer.shards.sharded_parameters import ShardedParameters
from gyre_trainer.torch_internals import (
    at_end_of_backward,
    number_of_backward,
    saved_tensors_hooks_around,
    spec_of,
    storage_number,
    version_of,
)


class GatheredParameter:
    """A sharded parameter that a module's forward reads. See [Note: All-gather on use].

    Attributes:
        owner: the module that has it: the reader, a container inside, or a layer that it names.
        last: its name there.
        reader: the module whose forward reads it.
        sharded: the sharded parameters that it is one of.
        dtype: the dtype in which it is read and travels; None for its own.
    """

    def __init__(
        self,
        owner: nn.Module,
        last: str,
        reader: nn.Module,
        sharded: ShardedParameters,
        policy: RotationPolicy,
        dtype: torch.dtype | None,
    ) -> None:
        self.owner, self.last, self.reader, self.sharded = owner, last, reader, sharded
        self._policy = policy
        parameter = owner.get_parameter(last)
        places = [place for place, each in enumerate(sharded.parameters) if each is parameter]
        (self._place,) = places
        self.dtype = dtype
        self._number = self.sharded.ring.modules.add(owner)
        self._whole: tuple[int, Tensor] | None = None
        self._version = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """That of the copied modules, which travels by itself."""
        copied = memo[id(self)] = copy(self)  # its owner may be in the middle of being copied
        copied.owner, copied.reader = deepcopy(self.owner, memo), deepcopy(self.reader, memo)
        copied.sharded = deepcopy(self.sharded, memo)
        copied._number = copied.sharded.ring.modules.add(copied.owner)
        copied.release()
        return copied

    @property
    def name(self) -> str:
        """The parameter's name in its model."""
        return f"{path_of(self.owner)}.{self.last}".removeprefix(".")

    @property
    def _layout(self) -> Layout:
        """How it travels, once everything that rotates on the ring is known."""
        sharded = self.sharded
        layout = Layout((sharded.layout.cuts[self._place],), sharded.ring.size)
        return layout.in_pieces(sharded.ring.pool.largest_whole_numel)

    def read(self) -> Tensor:
        """The whole parameter as a plain tensor, whose gradients reach the shards. Collective."""
        parameter = self.owner.get_parameter(self.last)
        sharded = self.sharded
        sharded.require_here(parameter, self.name)
        if torch.is_grad_enabled():
            sharded.before_training(self.name)
        whole: Tensor = _Gather.apply(parameter, self)  # type: ignore[no-untyped-call]
        self._version = version_of(whole)
        return whole

    def again(self, version: int) -> Tensor:
        """The whole parameter in backward, held until that has its gradient. Collective.

        Raises:
            RotationError: it is not as it was in forward.
        """
        if version != self.sharded.version:
            raise RotationError(f"{self.name} changed between forward and backward")
        if self._whole is None or self._whole[0] != version:
            with torch.no_grad():
                self.gather()
        assert self._whole is not None
        return self._whole[1]

    def gather(self) -> Tensor:
        """The values of all ranks; in backward they are held. Collective."""
        sharded, layout = self.sharded, self._layout
        ring, (cut,) = sharded.ring, layout.cuts
        own = sharded.views(sharded.flat)[self._place].detach()
        own = own.to(self.dtype or own.dtype)
        forward = number_of_backward() == -1
        whole = own if ring.size == 1 else own.new_empty(cut.shape)
        flat = own.reshape(-1)
        if ring.size > 1:
            for piece, part in all_pieces(ring, flat, layout, self._number, forward=forward):
                start, stop = layout.bounds(cut, piece)
                (view,) = layout.views(part, piece)
                whole.narrow(cut.dim, start, stop - start).copy_(view)
        if not forward:
            _hold(ring, self)
            self._whole = sharded.version, whole
        return whole

    def require_unwritten(self, whole: Tensor) -> None:
        """Refuse a forward that has written to its parameters. Torch counts no writes to `data`.

        Raises:
            RotationError: the version is another one than that of the values that were gathered.
        """
        if version_of(whole) != self._version:
            raise RotationError(
                f"{self.name} is written to by a forward, but each rank has only its shard of it; "
                "keep its module whole by a rule of None"
            )

    def release(self) -> None:
        """Hold the whole parameter no longer."""
        self._whole = None

    def reduce(self, grad: Tensor) -> Tensor:
        """The own shard's part of a gradient, averaged over the ranks. Collective."""
        self.release()
        sharded, layout = self.sharded, self._layout
        ring, (cut,) = sharded.ring, layout.cuts
        dtype = self._policy.grad_dtype or sharded.flat.dtype

        def part(piece: int) -> Tensor:
            start, stop = layout.bounds(cut, piece)
            return grad.narrow(cut.dim, start, stop - start)

        gradients = GradientRing(ring, layout, dtype, grad.device, self._number)
        own = gradients.sum(part).to(sharded.flat.dtype)
        (view,) = layout.in_rounds(1).views(own, ring.rank)
        return view


class _Gather(torch.autograd.Function):
    """From a sharded parameter to all of its values."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, gathered: GatheredParameter) -> Tensor:
        ctx.gathered, ctx.spec = gathered, spec_of(parameter)
        return gathered.gather()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return with_spec(ctx.gathered.reduce(grad), ctx.spec), None


class _Saved(NamedTuple):
    """The place of a saved tensor in a gathered parameter."""

    gathered: GatheredParameter
    version: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


@contextmanager
def saved_by_place(wholes: Mapping[int, tuple[Tensor, GatheredParameter]]) -> Iterator[None]:
    """A context in which autograd saves the places of views of whole parameters, not the values.

    Args:
        wholes: whole parameters by the numbers of their storages.
    """
    # such as the hooks of a checkpoint
    pack_other, unpack_other = saved_tensors_hooks_around() or (_same, _same)

    def pack(tensor: Tensor) -> Any:
        # the caller holds the parameters, so no other storage has such a number
        found = wholes.get(storage_number(tensor))
        if found is None or found[0].dtype != tensor.dtype:
            return pack_other(tensor)
        gathered = found[1]
        offset = int(tensor.storage_offset())
        return _Saved(gathered, gathered.sharded.version, offset, tensor.size(), tensor.stride())

    def unpack(saved: Any) -> Any:
        if not isinstance(saved, _Saved):
            return unpack_other(saved)
        whole = saved.gathered.again(saved.version)
        return whole.as_strided(saved.size, saved.stride, saved.offset)

    wholes = dict(wholes)
    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    finally:
        wholes.clear()  # autograd keeps the hooks


def _same(tensor: Tensor) -> Tensor:
    return tensor


# Whole parameters in backward, by ring: those of one reader.
_HELD: WeakKeyDictionary[Ring, list[GatheredParameter]] = WeakKeyDictionary()


def _hold(ring: Ring, gathered: GatheredParameter) -> None:
    """Note what is held; parameters of another reader are released, and all when backward ends."""
    held = _HELD.setdefault(ring, [])
    if held and held[0].reader is not gathered.reader:
        _release_all(held)
    if not held:
        at_end_of_backward(lambda: _release_all(held))
    held.append(gathered)


def _release_all(held: list[GatheredParameter]) -> None:
    while held:
        held.pop().release()
