"""Small modules that travel together, and are computed whole.

[Note: Bundles]

A visit of a slice costs Python, however small the slice is, and a hop costs a message. So small
modules of a model are put into bundles. At the first call of a module in a bundle, the slices of
all its modules go round the ring in one buffer, and each rank puts the whole parameters together.
Modules then run as they are, each once. Autograd knows when the last of them has its gradients:
these go round the ring in one buffer, too, and each rank keeps the sum for its own slice.

The whole parameters live until backward has used them, so weights travel once for forward and
backward: (N-1)/N of their bytes. Without gradients, those of one bundle are kept until another
bundle is gathered or the parameters change.

Parameters that no rank used must get no gradient, and one that only some ranks used is an error. So
behind each slice's gradients travels one number for each parameter: the share of the ranks that
have a gradient of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves, tree_map_only

from gyre_trainer.comm.identity import HopIdentity
from gyre_trainer.comm.ring import Direction, Ring
from gyre_trainer.comm.spans import path_of
from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.backward.deferred_grads import DeferredGrads
from gyre_trainer.rotation.call import cast
from gyre_trainer.rotation.rotation import Rotation
from gyre_trainer.rotation.rule import ModuleSlice, parameter_at, swapped
from gyre_trainer.shards.gradient_ring import GradientRing
from gyre_trainer.shards.layout import Cut, Layout
from gyre_trainer.shards.local_shards import local_of, spec_of, with_spec
from gyre_trainer.shards.remote_slices import RemoteSlices
from gyre_trainer.shards.sharded_parameters import ShardedParameters

# A bundle of 2^18 elements is 1 MiB in float32, which a rank holds whole while it computes with it.
_MAX_BUNDLE_NUMEL = 2**18


def bundled(rotations: Sequence[Rotation]) -> Iterator[tuple["Bundle", list[Rotation]]]:
    """Bundles of those rotations that are small enough for their policy, in the given order."""
    kinds: dict[Any, list[Rotation]] = {}
    for rotation in rotations:
        if _is_small(rotation):
            flat = rotation.sharded.flat
            kinds.setdefault((rotation.policy, flat.dtype, flat.device), []).append(rotation)
    for kind in kinds.values():
        members: list[Rotation] = []
        for rotation in kind:
            if members and _numel_of([*members, rotation]) > _MAX_BUNDLE_NUMEL:
                yield Bundle(members), members
                members = []
            members.append(rotation)
        yield Bundle(members), members


def _is_small(rotation: Rotation) -> bool:
    policy = rotation.policy
    recomputed = policy.recompute and rotation.rule.recompute_pays
    return (
        _numel_of([rotation]) <= policy.bundle_numel and not recomputed and not rotation.is_compiled
    )


def _numel_of(rotations: Sequence[Rotation]) -> int:
    sharded = dict.fromkeys(rotation.sharded for rotation in rotations)
    return sum(sum(map(each.layout.numel, range(each.ring.size))) for each in sharded)


class _Row(Layout):
    """A layout in which a slice is one tensor."""

    def views(self, flat: Tensor, index: int) -> list[Tensor]:
        """All of slice ``index``."""
        return [flat]


@dataclass(frozen=True)
class _Travel:
    """How the slices of several sharded parameters travel together, and their gradients.

    Attributes:
        rotation: of the first module; all others have the same policy.
        sharded: the parameters of all modules, each once.
        layout: the slices' layout: the parameters of ``sharded``, one after the other.
        number: the bundle's number in `Ring.modules`.
    """

    rotation: Rotation
    sharded: list[ShardedParameters]
    layout: Layout
    number: int

    @property
    def ring(self) -> Ring:
        """The ring that they travel on."""
        return self.rotation.sharded.ring

    @property
    def version(self) -> int:
        """A number that grows with every write to a parameter."""
        return sum(each.version + each.flat._version for each in self.sharded)

    def gather(self) -> list[Tensor]:
        """The whole parameters, in the dtype to compute in."""
        ring, layout = self.ring, self.layout
        own = torch.cat([each.flat for each in self.sharded])
        own = cast(own, self.rotation.policy.compute_dtype)
        slices = {ring.rank: layout.views(own, ring.rank)}
        hop = HopIdentity(self.number, True, False, 0, 1)
        with closing(RemoteSlices(ring, own, layout, Direction.CLOCKWISE, hop)) as remote:
            for index, flat in remote:
                slices[index] = layout.views(flat.clone(), index)
        shards = zip(*(slices[index] for index in range(ring.size)), strict=True)
        return [torch.cat(each, cut.dim) for cut, each in zip(layout.cuts, shards, strict=True)]

    def reduce(
        self, grads: Sequence[Tensor | None], trainable: Sequence[bool]
    ) -> list[Tensor | None]:
        """The own shards' gradients, averaged over the ranks; None where no rank has one.

        Raises:
            RotationError: some ranks have a gradient that others have not.
        """
        ring, flat = self.ring, self.rotation.sharded.flat
        layout, present = self.layout.only(trainable), [grad is not None for grad in grads]
        present = [each for each, wanted in zip(present, trainable, strict=True) if wanted]
        some = next(grad for grad in grads if grad is not None)
        wanted = (grad for grad, wanted in zip(grads, trainable, strict=True) if wanted)
        pieces = [
            torch.split(
                some.new_zeros(cut.shape) if grad is None else grad,
                [stop - start for start, stop in layout.all_bounds(cut)],
                cut.dim,
            )
            for cut, grad in zip(layout.cuts, wanted, strict=True)
        ]
        shares = Cut("shares", (len(present) * ring.size,), 0)
        rows = _Row((*layout.cuts, shares), ring.size)
        dtype = self.rotation.policy.grad_dtype or flat.dtype
        gradient_ring = GradientRing(ring, rows, dtype, flat.device, self.number)
        used = some.new_tensor(present)
        for step in range(1, ring.size + 1):
            index = (ring.rank + step) % ring.size
            row = torch.cat([*(each[index].reshape(-1) for each in pieces), used])
            gradient_ring.receive(index).add(0, row)
            gradient_ring.send_on()
        own = gradient_ring.finish().to(flat.dtype)
        if flat.device.type == "cpu" and not isinstance(own, FakeTensor):
            # on CUDA the process would have to wait for the device
            self._require_agreement(own[layout.numel(ring.rank) :].tolist(), layout)
        found = zip(layout.views(own[: layout.numel(ring.rank)], ring.rank), present, strict=True)
        own_grads = iter([grad if there else None for grad, there in found])
        return [next(own_grads) if wanted else None for wanted in trainable]

    def _require_agreement(self, shares: list[float], layout: Layout) -> None:
        margin = 0.5 / self.ring.size
        for cut, share in zip(layout.cuts, shares, strict=True):
            if margin < share < 1 - margin:
                raise RotationError(
                    f"{cut.name} has a gradient on {round(share * self.ring.size)} of "
                    f"{self.ring.size} ranks; all ranks must call the same modules, "
                    "and use what they return"
                )


@dataclass
class _Gathered:
    """The whole parameters of a bundle.

    Attributes:
        of: what they depend on: the parameters' version, and the modes of autograd.
        whole: in the order of the layout.
        spent: whether a backward has used them.
    """

    of: tuple[object, ...]
    whole: Sequence[Tensor] = ()
    spent: list[bool] = field(default_factory=list)


class _Gather(torch.autograd.Function):
    """From the parameters of which this rank has a shard to whole ones."""

    @staticmethod
    def forward(
        ctx: Any, travel: _Travel, spent: list[bool], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.travel, ctx.spent, ctx.version = travel, spent, travel.version
        ctx.specs = [spec_of(parameter) for parameter in parameters]
        ctx.set_materialize_grads(False)
        return tuple(travel.gather())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        travel: _Travel = ctx.travel
        if travel.version != ctx.version:
            raise RotationError(
                f"parameters of {travel.rotation.name}, or of a module in one bundle with it, "
                "changed between forward and backward"
            )
        ctx.spent.append(True)
        found = travel.reduce(grads, ctx.needs_input_grad[2:])
        return (
            None,
            None,
            *(
                grad if grad is None or spec is None else with_spec(grad, spec)
                for grad, spec in zip(found, ctx.specs, strict=True)
            ),
        )


class Bundle:
    """Small modules whose parameters travel together. See [Note: Bundles]."""

    def __init__(self, rotations: Sequence[Rotation]) -> None:
        """``rotations`` have one policy, dtype, device and ring."""
        ring = rotations[0].sharded.ring
        sharded = list(dict.fromkeys(rotation.sharded for rotation in rotations))
        names = {rotation.sharded: path_of(rotation.module) for rotation in reversed(rotations)}
        cuts = [
            replace(cut, name=f"{place}: {names[each]}.{cut.name}", padded=False)
            for place, each in enumerate(sharded)
            for cut in each.layout.cuts
        ]
        layout = Layout(tuple(cuts), ring.size)
        number = ring.modules.add(rotations[0].module)
        self._travel = _Travel(rotations[0], sharded, layout, number)
        starts = accumulate((len(each.layout.cuts) for each in sharded), initial=0)
        self._starts = dict(zip(sharded, starts, strict=False))
        self._gathered: _Gathered | None = None

    def run(self, rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The output of one of the modules, computed whole."""
        if rotation.sharded.replica_gradients is not None and torch.is_grad_enabled():
            rotation.sharded.replica_gradients.before_training(path_of(rotation.module))
        dtype, cuts = rotation.policy.compute_dtype, rotation.layout.cuts
        first = self._starts[rotation.sharded]
        whole = self._whole()[first : first + len(cuts)]
        weights = {cut.name: tensor for cut, tensor in zip(cuts, whole, strict=True)}
        others = {
            name: cast(local_of(parameter_at(rotation.module, name)), dtype)
            for name in rotation.replicated
        }
        outer_dtype = _outer_dtype(rotation, args, kwargs)
        if dtype is not None:
            args, kwargs = tree_map_only(Tensor, partial(cast, dtype=dtype), (args, kwargs))
        bounds = {cut.name: (0, cut.shape[cut.dim]) for cut in cuts}
        with swapped(rotation.module, weights | others):
            current = ModuleSlice(
                rotation.module, rotation.forward, weights, bounds, DeferredGrads({}), 1, cuts
            )
            output = rotation.rule.run(current, *args, **kwargs)
        return tree_map_only(Tensor, partial(cast, dtype=outer_dtype), output)

    def _whole(self) -> Sequence[Tensor]:
        """The whole parameters: those of the last call if they are still true, or new ones."""
        travel, gathered = self._travel, self._gathered
        parameters = [each for sharded in travel.sharded for each in sharded.parameters]
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        of = travel.version, *modes, *(parameter.requires_grad for parameter in parameters)
        if gathered is None or gathered.of != of or gathered.spent:
            _release_other(self, travel.ring)
            gathered = _Gathered(of)
            for sharded in travel.sharded:
                for parameter, cut in zip(sharded.parameters, sharded.layout.cuts, strict=True):
                    sharded.require_here(parameter, cut.name)
            gathered.whole = _Gather.apply(travel, gathered.spent, *parameters)  # type: ignore[no-untyped-call]
            self._gathered = gathered
        return gathered.whole

    def release(self) -> None:
        """Keep the whole parameters no longer; a backward that needs them has its own hold."""
        self._gathered = None


_LATEST: WeakKeyDictionary[Ring, ref[Bundle]] = WeakKeyDictionary()


def _release_other(bundle: Bundle, ring: Ring) -> None:
    """Release what the last bundle on a ring gathered."""
    latest = _LATEST.get(ring)
    before = None if latest is None else latest()
    if before is not None:
        before.release()
    _LATEST[ring] = ref(bundle)


def _outer_dtype(rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype:
    """The dtype of the outputs, as where the module rotates by itself."""
    first = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
    own = rotation.sharded.flat.dtype
    if first is not None and first.is_floating_point():
        own = first.dtype
    return rotation.policy.outer_dtype or own
