"""Compares a rotated module with the whole one, gathered for that once: outputs and gradients."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from gyre_trainer.comm.mesh import ring_group
from gyre_trainer.comm.ring_registry import ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.call import cast
from gyre_trainer.rotation.ring_pass import run
from gyre_trainer.rotation.rotation import Rotation
from gyre_trainer.rotation.rule import parameter_at, swapped
from gyre_trainer.rotation.shared_cache import copies_of_caches, is_cache, kept_in_copies
from gyre_trainer.shards.local_shards import local_of

# Relative to the largest value. Sums in another order differ by far less, a wrong rule by far more.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_TOLERANCE_OF_OTHERS = 5e-2
# Some gradients, as those of keys' biases, are zero but for rounding. Up to this, relative to the
# largest gradient of the module's parameters, a gradient counts as zero, rotated and whole.
_NOISE = {torch.float64: 1e-12, torch.float32: 1e-6}
_NOISE_OF_OTHERS = 5e-3


def verify(rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a module that computes something else when it rotates than it does as a whole.

    Compared are the outputs, what is in caches, and, where gradients are enabled, those of inputs
    and parameters. The caches of the call stay as they are.
    Every rank holds the whole module meanwhile. Where the module draws random numbers, nothing is
    compared: its slices draw others. Collective.

    Raises:
        RotationError: on every rank that sees a difference; the message names what differs.
    """
    if isinstance(rotation.sharded.flat, FakeTensor):
        return
    state = torch.get_rng_state()
    try:
        expected = _Results(rotation, args, kwargs, rotates=False)
        is_random = not torch.equal(torch.get_rng_state(), state)
        found = _Results(rotation, args, kwargs, rotates=True)
    finally:
        torch.set_rng_state(state)
    if is_random:
        return
    dtype = rotation.policy.compute_dtype or rotation.sharded.flat.dtype
    tolerance = _TOLERANCE.get(dtype, _TOLERANCE_OF_OTHERS)
    noise = _NOISE.get(dtype, _NOISE_OF_OTHERS)
    for (what, one, _), (_, other, scale) in zip(found.named(), expected.named(), strict=True):
        if one is None or other is None:
            continue
        if not _close(one, other, tolerance, noise * scale):
            raise RotationError(
                f"{rotation.name} computes something else when it rotates: {what} is off by "
                f"{(one - other).abs().max().item():.2g} where its largest value is "
                f"{other.abs().max().item():.2g}; its rule does not fit it, or its forward reads "
                "sizes that a slice does not have"
            )


class _Results:
    """Outputs and gradients of one call, whole or rotated; gradients of shards are averaged."""

    def __init__(
        self, rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any], *, rotates: bool
    ) -> None:
        self._rotation = rotation
        args, kwargs = copies_of_caches((args, kwargs), rotation.name)
        args, kwargs = tree_map(_leaf, (args, kwargs), is_leaf=is_cache)
        leaves = tree_flatten((args, kwargs), is_leaf=is_cache)[0]
        inputs = [each for each in leaves if _takes_grad(each)]
        names = [cut.name for cut in rotation.layout.cuts]
        own = [rotation.module.get_parameter(name) for name in names]
        if rotates:
            weights: list[Tensor] = list(own)
            output = run(rotation, args, kwargs)
        else:
            whole = {name: _whole(p) for name, p in zip(names, own, strict=True)}
            others = {
                name: local_of(parameter_at(rotation.module, name)) for name in rotation.replicated
            }
            weights = list(whole.values())
            dtype = rotation.policy.compute_dtype
            used = {name: cast(each, dtype) for name, each in {**whole, **others}.items()}
            args, kwargs = tree_map_only(
                Tensor, lambda each: cast(each, dtype), (args, kwargs), is_leaf=is_cache
            )
            with swapped(rotation.module, used):
                output = rotation.forward(*args, **kwargs)
        leaves = tree_flatten(output, is_leaf=is_cache)[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.outputs = [tensor.detach() for tensor in tensors] + kept_in_copies((args, kwargs))
        wanted = [tensor for tensor in (*inputs, *weights) if tensor.requires_grad]
        grads: list[Tensor | None] = []
        if any(tensor.requires_grad for tensor in tensors) and wanted:
            trained = [tensor for tensor in tensors if tensor.requires_grad]
            cotangents = [_cotangent(tensor) for tensor in trained]
            grads = list(torch.autograd.grad(trained, wanted, cotangents, allow_unused=True))
        num_inputs = len([tensor for tensor in inputs if tensor.requires_grad])
        self.input_grads = grads[:num_inputs]
        of_weights = iter(grads[num_inputs:])
        self.weight_grads = [
            self._shard(position, next(of_weights), rotates=rotates)
            for position, weight in enumerate(weights)
            if weight.requires_grad and grads
        ]
        self._names = [name for name, p in zip(names, own, strict=True) if p.requires_grad]

    def named(self) -> Iterator[tuple[str, Tensor | None, float]]:
        """Everything that is compared: its name for the message, and what its rounding may have.

        That is the largest gradient of a parameter, for such gradients, and 0 for all else.
        """
        yield from ((f"output {index}", output, 0.0) for index, output in enumerate(self.outputs))
        yield from (
            (f"the gradient of input {index}", grad, 0.0)
            for index, grad in enumerate(self.input_grads)
        )
        largest = max(
            (_largest(grad) for grad in self.weight_grads if grad is not None), default=0.0
        )
        yield from (
            (f"the gradient of {name}", grad, largest)
            for name, grad in zip(self._names, self.weight_grads, strict=False)
        )

    def _shard(self, position: int, grad: Tensor | None, *, rotates: bool) -> Tensor | None:
        """The own shard's averaged gradient."""
        rotation, ring = self._rotation, self._rotation.sharded.ring
        if rotates:
            return None if grad is None else local_of(grad)
        parameter = rotation.sharded.parameters[position]
        assert isinstance(parameter, DTensor)
        flat = rotation.sharded.flat
        mean = torch.zeros(parameter.shape, dtype=flat.dtype, device=flat.device)
        if grad is not None:
            mean.copy_(grad)
        group = ring_group(parameter.device_mesh)
        with ring_of(parameter.device_mesh).hang_diagnosis.collective("verifying a rotated module"):
            dist.all_reduce(mean, group=group)
        layout = rotation.sharded.layout
        cut = layout.cuts[position]
        start, stop = layout.bounds(cut, ring.rank)
        return mean.narrow(cut.dim, start, stop - start) / ring.size


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


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _close(found: Tensor, expected: Tensor, tolerance: float, noise: float) -> bool:
    """Whether they are equal but for rounding; what is not larger than ``noise`` is zero."""
    if found.shape != expected.shape:
        return False
    largest = _largest(expected)
    if max(largest, _largest(found)) <= noise:
        return True
    return torch.allclose(
        found.to(expected.dtype), expected, rtol=tolerance, atol=tolerance * largest, equal_nan=True
    )
