"""The whole parameters of a bundle while a rank has them, and what graphs keep instead of them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from gyre_trainer.comm.ring import Ring
from gyre_trainer.rotation.bundles.travel import Travel
from gyre_trainer.shards.local_shards import spec_of, with_spec

# Elements of a bundle. A rank holds as many whole while it computes with them, and as many
# gradients in backward. Half of it doubles the messages of a model with many small modules. It is
# an eighth above 2^18, so that four matrices of 256 by 256 with their biases fit.
MAX_BUNDLE_NUMEL = 9 * 2**15
# Elements that the bundles of a ring have whole together, weights and gradients: those of one full
# bundle, or the weights of two frozen ones. What does not fit is gathered a second time, for
# backward. Twice as many save that for twice as large models, and raise the peak of larger ones by
# as much (2.3 MiB in float32).
_MAX_WHOLE_NUMEL = 2 * MAX_BUNDLE_NUMEL


class _View(NamedTuple):
    """Where a saved view of a whole parameter lies."""

    place: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class _Kept(NamedTuple):
    """Any other saved tensor, and its version when it was saved."""

    tensor: Tensor
    version: int


class WholeParameters:
    """The whole parameters of a bundle: gathered when they are asked for, until `release`."""

    def __init__(self, travel: Travel) -> None:
        """``travel`` says how they are gathered."""
        self._travel = travel
        self._version = -1
        self._values: Sequence[Tensor] = ()
        self._trainable: list[bool] = []
        self._in_graph: Sequence[Tensor] = ()

    @property
    def is_held(self) -> bool:
        """Whether they are here."""
        return bool(self._values)

    @property
    def numel(self) -> int:
        """Elements of all of them, and as many of their gradients unless all are frozen."""
        parameters = (parameter for each in self._travel.sharded for parameter in each.parameters)
        return self._travel.numel * (1 + any(parameter.requires_grad for parameter in parameters))

    def parameters(self, caller: nn.Module) -> Sequence[Tensor]:
        """The parameters as they are now, in the order of the layout; ``caller`` needs them.

        They are in the graph of autograd where gradients are recorded. Collective where they are
        not here, which is so on all ranks or on none.
        """
        sharded = self._travel.sharded
        values = self._values_now(caller, forward=True)
        if not torch.is_grad_enabled():
            return values
        parameters = [parameter for each in sharded for parameter in each.parameters]
        trainable = [parameter.requires_grad for parameter in parameters]
        if not self._in_graph or self._trainable != trainable:
            self._trainable = trainable
            self._in_graph = _Whole.apply(self, values, *parameters)  # type: ignore[no-untyped-call]
        return self._in_graph

    def _values_now(self, caller: nn.Module, *, forward: bool) -> Sequence[Tensor]:
        version = self._travel.version
        if not self._values or self._version != version:
            self.release()
            _make_room(self._travel.ring, self)
            self._values, self._version = self._travel.gather(caller, forward=forward), version
        return self._values

    def release(self) -> None:
        """Hold them no longer."""
        self._values = self._in_graph = ()

    def saving(self, caller: nn.Module) -> AbstractContextManager[Any]:
        """A context in which autograd keeps no whole parameter: backward asks for them again.

        They must be here, and ``caller`` runs inside. Other tensors are saved as they are outside.
        """
        places = {each.untyped_storage()._cdata: i for i, each in enumerate(self._values)}
        version = self._version
        pack_other, unpack_other = _hooks_around() or (_keep, _kept)

        def pack(tensor: Tensor) -> Any:
            place = places.get(tensor.untyped_storage()._cdata)
            if place is None:
                return pack_other(tensor)
            return _View(place, int(tensor.storage_offset()), tensor.size(), tensor.stride())

        def unpack(saved: Any) -> Tensor:
            if not isinstance(saved, _View):
                tensor: Tensor = unpack_other(saved)
                return tensor
            self._travel.require_version(version)
            whole = self._values_now(caller, forward=False)[saved.place]
            return whole.as_strided(saved.size, saved.stride, saved.offset)

        return saved_tensors_hooks(pack, unpack)


class _Whole(torch.autograd.Function):
    """From the parameters of which this rank has a shard to whole ones."""

    @staticmethod
    def forward(
        ctx: Any, whole: WholeParameters, values: Sequence[Tensor], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.whole, ctx.travel = ref(whole), whole._travel  # no cycle through the outputs
        ctx.version = ctx.travel.version
        ctx.specs = [spec_of(parameter) for parameter in parameters]
        ctx.set_materialize_grads(False)
        return tuple(value.detach() for value in values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        travel: Travel = ctx.travel
        travel.require_version(ctx.version)
        whole = ctx.whole()
        if whole is not None:
            whole.release()
        found = travel.reduce(grads, ctx.needs_input_grad[2:])
        return (
            None,
            None,
            *(
                grad if grad is None or spec is None else with_spec(grad, spec)
                for grad, spec in zip(found, ctx.specs, strict=True)
            ),
        )


def _hooks_around() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else (hooks[0], hooks[1])


def _keep(tensor: Tensor) -> _Kept:
    return _Kept(tensor.detach(), tensor._version)


def _kept(saved: _Kept) -> Tensor:
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            f"a tensor of shape {tuple(saved.tensor.shape)} that backward needs "
            "was modified in place after forward"
        )
    return saved.tensor


def _make_room(ring: Ring, wanted: WholeParameters) -> None:
    """Release the parameters of other bundles, the oldest first, until ``wanted`` may be held."""
    held = [each for each in ring.gathered if each is not wanted and each.is_held]
    total = wanted.numel + sum(each.numel for each in held)
    while held and total > _MAX_WHOLE_NUMEL:
        oldest = held.pop(0)
        total -= oldest.numel
        oldest.release()
    ring.gathered[:] = [*held, wanted]


def forget_whole(ring: Ring) -> None:
    """Release the parameters of all bundles on a ring; all ranks must do so alike.

    Not every write to a shard can be seen: `parameter.data.mul_` raises no version.
    """
    for each in ring.gathered:
        each.release()
    ring.gathered.clear()
