"""Compares a rotated module with the whole one, gathered for that once: outputs and gradients."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from gyre_trainer.comm.mesh import ring_group
from gyre_trainer.comm.ring_registry import ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.inspection.rule_checks import largest_finite
from gyre_trainer.inspection.shared_refusal import refuse_together
from gyre_trainer.rotation.backward.randomness import generators_of
from gyre_trainer.rotation.backward.slice_dropout import Undropped, dropout_inside, may_drop_out
from gyre_trainer.rotation.caches.shared_cache import copies_of_caches, is_cache, kept_in_copies
from gyre_trainer.rotation.call import cast
from gyre_trainer.rotation.ring_pass import run
from gyre_trainer.rotation.rotation import Rotation
from gyre_trainer.rotation.rule import parameter_at, swapped
from gyre_trainer.shards.local_shards import local_of

# Relative to the largest value. Sums in another order differ by far less, a wrong rule by far more.
# Norms of `transformers` compute in float32, even of float64.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_TOLERANCE_OF_OTHERS = 5e-2
# Some gradients, as those of keys' biases, are zero but for rounding. Up to this, relative to the
# largest gradient of the module's parameters, a gradient counts as zero, rotated and whole.
_NOISE = {torch.float64: 1e-12, torch.float32: 1e-6}
_NOISE_OF_OTHERS = 5e-3
# What both ways sum in few bits, such as gradients of keys, which cancel, may be off by more. So a
# difference counts beside the whole module's own rounding: its distance from float32.
_TIMES_ROUNDING = 4.0


def verify_module(rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a module that computes something else when it rotates than it does as a whole.

    Compared are the outputs, what is in caches, and, where gradients are enabled, those of inputs
    and parameters. The caches of the call stay as they are.
    Every rank holds the whole module meanwhile. Dropout that the rule knows of drops nothing. A
    module that draws other random numbers in training, where its slices draw others, is compared in
    evaluation instead, with gradients; one that draws them there, too, is not, and a warning says
    so. Collective.

    Raises:
        RotationError: on every rank of the ring, where one sees a difference; the message names
            what differs.
    """
    if isinstance(rotation.sharded.flat, FakeTensor):
        return
    generators = generators_of(rotation.sharded.flat.device)
    states = [generator.get_state() for generator in generators]
    try:
        is_compared = _compare(rotation, args, kwargs)
        if not is_compared and rotation.module.training:
            with _evaluating(rotation.module):
                is_compared = _compare(rotation, args, kwargs)
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
    if not is_compared:
        warnings.warn(
            f"{rotation.name} draws random numbers in evaluation, too, so it was not compared with "
            "what it computes as a whole: test its rule with these numbers switched off, or pass "
            "verify=False",
            stacklevel=2,
        )


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """A context in which the module and those inside are in evaluation."""
    training = {each: each.training for each in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for each, mode in training.items():
            each.training = mode


def _compare(rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether both ways were compared: not where a rank's whole module draws random numbers."""
    generators = generators_of(rotation.sharded.flat.device)
    before = [generator.get_state() for generator in generators]
    expected = _Results(rotation, args, kwargs, rotates=False)
    is_random = not all(
        torch.equal(generator.get_state(), state)
        for generator, state in zip(generators, before, strict=True)
    )
    if _on_any_rank(rotation, is_random):
        return False
    found = _Results(rotation, args, kwargs, rotates=True)
    dtype = _dtype_of(rotation)
    compared = list(zip(found.named(), expected.named(), strict=True))
    noise = _NOISE.get(dtype, _NOISE_OF_OTHERS) * expected.largest_grad()
    different = [
        (place, name)
        for place, ((name, one), (_, other)) in enumerate(compared)
        if not _agree(rotation, one, other, noise if place >= found.num_before_grads else 0.0)
    ]
    if dtype not in _TOLERANCE and _on_any_rank(rotation, bool(different)):
        exact = _in_float32(rotation, args, kwargs)
        different = [
            (place, name)
            for place, name in different
            if not exact or not _rounded(*(each for _, each in (*compared[place], exact[place])))
        ]
    reason = ""
    for place, name in different[:1]:
        (_, one), (_, other) = compared[place]
        off = _off(*_both(one, other))
        reason = (
            f"{rotation.name} computes something else when it rotates: {name} is {off}; its rule "
            "does not fit it, or its forward reads sizes that a slice does not have"
        )
    refuse_together(rotation, reason)
    if reason:
        raise RotationError(reason)
    return True


def _in_float32(
    rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[str, Tensor | None]]:
    """The whole module's results in float32; none where its code does not take that."""
    kind = rotation.sharded.flat.device.type
    try:
        with torch.autocast(kind, enabled=False):
            found = _Results(rotation, args, kwargs, rotates=False, dtype=torch.float32)
            return list(found.named())
    except RuntimeError:  # foreign code, with a dtype of its own
        return []


def _on_any_rank(rotation: Rotation, value: bool) -> bool:
    """Whether it is true of a rank of the ring: an expert without tokens draws nothing."""
    mesh = _mesh_of(rotation)
    flag = torch.tensor([int(value)], device=rotation.sharded.flat.device)
    with ring_of(mesh).hang_diagnosis.collective("verifying a rotated module"):
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=ring_group(mesh))
    return bool(flag.item())


def _dtype_of(rotation: Rotation) -> torch.dtype:
    """What is computed in, which autocast may have chosen."""
    kind = rotation.sharded.flat.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return rotation.policy.compute_dtype or rotation.sharded.flat.dtype


def _mesh_of(rotation: Rotation) -> DeviceMesh:
    parameter = rotation.sharded.parameters[0]
    assert isinstance(parameter, DTensor)
    return parameter.device_mesh


def _agree(rotation: Rotation, found: Tensor | None, expected: Tensor | None, noise: float) -> bool:
    """Whether they are equal but for rounding, or not above ``noise``; None counts as zeros."""
    if found is None and expected is None:
        return True
    dtype = _dtype_of(rotation)
    return _close(*_both(found, expected), _TOLERANCE.get(dtype, _TOLERANCE_OF_OTHERS), noise)


def _both(found: Tensor | None, expected: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both, with zeros in place of None."""
    some = expected if found is None else found
    assert some is not None
    return (
        torch.zeros_like(some) if found is None else found,
        torch.zeros_like(some) if expected is None else expected,
    )


def _rounded(found: Tensor | None, expected: Tensor | None, exact: Tensor | None) -> bool:
    """Whether ``found`` is about as far from the exact values as the whole module's own are."""
    if exact is None:
        return False
    one, other = _both(found, expected)
    if one.shape != other.shape or _of_another_kind(one, other).any():
        return False
    rounding = largest_finite(other.float() - exact)
    return largest_finite(one.float() - exact) <= _TIMES_ROUNDING * rounding


def _off(found: Tensor, expected: Tensor) -> str:
    """How they differ, for a message."""
    if found.shape != expected.shape:
        return f"of shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    if (places := _of_another_kind(found, expected)).any():
        return f"of another kind (finite, infinite or no number) in {places.sum()} places"
    off, largest = largest_finite(found - expected), largest_finite(expected)
    return f"off by {off:.2g} where its largest value is {largest:.2g}"


class _Results:
    """Outputs and gradients of one call, whole or rotated; gradients of shards are averaged.

    Attributes:
        outputs: all tensors among the outputs, and those in caches.
        input_grads: gradients by the names of inputs; None for no gradient.
        grads: those by the names of parameters.
    """

    def __init__(
        self,
        rotation: Rotation,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        rotates: bool,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Call the module; as a whole in ``dtype``, or else in that of the policy."""
        self._rotation = rotation
        args, kwargs = copies_of_caches((args, kwargs), rotation.name)
        args, kwargs = tree_map(_leaf, (args, kwargs), is_leaf=is_cache)
        leaves = tree_flatten((args, kwargs), is_leaf=is_cache)[0]
        inputs = [each for each in leaves if _takes_grad(each)]
        names = [cut.name for cut in rotation.layout.cuts]
        own = [parameter_at(rotation.module, name) for name in names]
        others = {name: parameter_at(rotation.module, name) for name in rotation.replicated}
        if rotates:
            weights: list[Tensor] = list(own)
            output = run(rotation, args, kwargs)
        else:
            whole = {name: _whole(p) for name, p in zip(names, own, strict=True)}
            weights = list(whole.values())
            dtype = dtype or rotation.policy.compute_dtype
            local = {name: local_of(each) for name, each in others.items()}
            used = {name: cast(each, dtype) for name, each in {**whole, **local}.items()}
            args, kwargs = tree_map_only(
                Tensor, lambda each: cast(each, dtype), (args, kwargs), is_leaf=is_cache
            )
            with swapped(rotation.module, used), _undropped(rotation, used):
                output = rotation.forward(*args, **kwargs)
        leaves = tree_flatten(output, is_leaf=is_cache)[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.outputs = [tensor.detach() for tensor in tensors] + kept_in_copies((args, kwargs))
        trained_others = {name: each for name, each in others.items() if each.requires_grad}
        inputs = [tensor for tensor in inputs if tensor.requires_grad]
        wanted = [
            *inputs,
            *trained_others.values(),
            *(tensor for tensor in weights if tensor.requires_grad),
        ]
        grads: list[Tensor | None] = [None] * len(wanted)
        trained = [tensor for tensor in tensors if tensor.requires_grad]
        if trained and wanted:
            cotangents = [_cotangent(tensor) for tensor in trained]
            with _without_hooks(wanted):
                grads = list(torch.autograd.grad(trained, wanted, cotangents, allow_unused=True))
        found = iter(grads)
        self.input_grads = [(f"input {index}", next(found)) for index, _ in enumerate(inputs)]
        self.grads: list[tuple[str, Tensor | None]] = []
        for name in trained_others:
            grad = next(found)
            self.grads.append((name, None if grad is None else local_of(grad)))
        if not torch.is_grad_enabled():
            return
        for position, (name, weight) in enumerate(zip(names, weights, strict=True)):
            if weight.requires_grad:
                self.grads.append((name, self._shard(position, next(found), rotates=rotates)))

    @property
    def num_before_grads(self) -> int:
        """How many of `named` are no gradients of parameters."""
        return len(self.outputs) + len(self.input_grads)

    def named(self) -> Iterator[tuple[str, Tensor | None]]:
        """All of them with their names: outputs, and gradients of inputs and of parameters."""
        yield from ((f"output {place}", each) for place, each in enumerate(self.outputs))
        for name, grad in (*self.input_grads, *self.grads):
            yield f"the gradient of {name}", grad

    def largest_grad(self) -> float:
        """The largest entry of the gradients of parameters; 0 without any."""
        return max((largest_finite(each) for _, each in self.grads if each is not None), default=0)

    def _shard(self, position: int, grad: Tensor | None, *, rotates: bool) -> Tensor | None:
        """The own shard's averaged gradient."""
        rotation, ring = self._rotation, self._rotation.sharded.ring
        if rotates:
            return None if grad is None else local_of(grad)
        parameter = rotation.sharded.parameters[position]
        flat = rotation.sharded.flat
        mean = torch.zeros(parameter.shape, dtype=flat.dtype, device=flat.device)
        if grad is not None:
            mean.copy_(grad)
        mesh = _mesh_of(rotation)
        with ring_of(mesh).hang_diagnosis.collective("verifying a rotated module"):
            dist.all_reduce(mean, group=ring_group(mesh))
        layout = rotation.sharded.layout
        cut = layout.cuts[position]
        start, stop = layout.bounds(cut, ring.rank)
        return mean.narrow(cut.dim, start, stop - start) / ring.size


@contextmanager
def _without_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """A context in which no hook on the gradient of one of the tensors is called."""
    hooks = {id(each): each._backward_hooks for each in tensors if each._backward_hooks}
    kept = [(each, dict(each)) for each in hooks.values() if each is not None]
    for each, _ in kept:
        each.clear()
    try:
        yield
    finally:
        for each, before in kept:
            each.update(before)


def _undropped(rotation: Rotation, weights: Mapping[str, Tensor]) -> AbstractContextManager[object]:
    """A context in which the whole module drops nothing that the rule knows of, as slices do."""
    rule = rotation.rule
    if not (rule.drops_out and may_drop_out(rotation.module)):
        return nullcontext()
    return dropout_inside(weights, rule.linear_in, Undropped())


def _whole(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    with torch.no_grad():
        whole = parameter.full_tensor()
    return whole.detach().requires_grad_(parameter.requires_grad)


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _cotangent(output: Tensor) -> Tensor:
    """What the output's entries weigh in the loss: as different as random ones, but no draw."""
    return torch.arange(output.numel(), device=output.device).cos().view_as(output).to(output.dtype)


def _takes_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _of_another_kind(one: Tensor, other: Tensor) -> Tensor:
    """Where one is infinite or no number, and the other one is not the same."""
    same = (one == other) | (one.isnan() & other.isnan())
    return ~(one.isfinite() & other.isfinite()) & ~same


def _close(found: Tensor, expected: Tensor, tolerance: float, noise: float) -> bool:
    """Whether they are equal but for rounding; what is not larger than ``noise`` is zero.

    Infinities and values that are not a number must be in the same places: a plain model may have
    them, too.
    """
    if found.shape != expected.shape or _of_another_kind(found, expected).any():
        return False
    largest = largest_finite(expected)
    if max(largest, largest_finite(found)) <= noise:
        return True
    return torch.allclose(
        found.to(expected.dtype), expected, rtol=tolerance, atol=tolerance * largest, equal_nan=True
    )
