"""Norms under recomputation keep only their input, and the modules after them keep nothing."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gyre_trainer.rotation.backward.recomputation import recomputed
from gyre_trainer.rotation.rotated_module import RotatedModule, mix_in, own_class, uncompiled
from gyre_trainer.rotation.rule import swapped
from gyre_trainer.shards.local_shards import local_of
from gyre_trainer.shards.sharded_parameters import same_storage

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
_FORWARDS = [norm.forward for norm in _NORMS]


class RecomputedNorm:
    """Mixed in before the class of a norm, or of another module with vectors as parameters.

    Backward computes its output again. For torch's norms the second result has the same bits. Any
    other module is tried at its first call; where it draws random numbers, gives other bits when it
    is called again, or returns anything but a new tensor, its output is kept.
    """

    _repeats: bool | None = None
    _has_own_rows = False

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, as without recomputation."""
        assert isinstance(self, nn.Module)
        weights = [
            local_of(parameter) for parameter in self._parameters.values() if parameter is not None
        ]
        if (
            kwargs
            or len(args) != 1
            or not _is_recorded([*args, *weights])
            or not self._repeated(args[0], weights)
        ):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return recomputed(self._compute, *args, *weights, by_rows=self._has_own_rows)

    def _compute(self, x: Tensor, *weights: Tensor) -> Tensor:
        assert isinstance(self, nn.Module)
        names = [name for name, parameter in self._parameters.items() if parameter is not None]
        with swapped(self, dict(zip(names, weights, strict=True))):
            output: Tensor = super().forward(x)  # type: ignore[misc]
        return output

    def _repeated(self, x: Tensor, weights: list[Tensor]) -> bool:
        if self._repeats is None:
            known = own_class(self).forward in _FORWARDS  # type: ignore[arg-type,attr-defined]
            if known:
                self._has_own_rows = len(getattr(self, "normalized_shape", ())) == 1
            self._repeats = known or self._proved(x, weights)
        return self._repeats

    @torch.no_grad()
    def _proved(self, x: Tensor, weights: list[Tensor]) -> bool:
        """Whether two calls give the same bits and draw no random numbers."""
        devices = [] if x.device.type == "cpu" else [x.device]
        with torch.random.fork_rng(devices, device_type=x.device.type if devices else "cuda"):
            before = _random_states(devices)
            one, other = (self._compute(x, *weights) for _ in range(2))
            drew = any(
                not torch.equal(*states)
                for states in zip(before, _random_states(devices), strict=True)
            )
        if drew or not isinstance(one, Tensor) or one.shape != other.shape:
            return False
        is_view = any(same_storage(one, tensor) for tensor in (x, *weights))
        self._has_own_rows = one.shape == x.shape and self._rows_agree(x, weights, one)
        return one.is_floating_point() and not is_view and torch.equal(one, other)

    def _rows_agree(self, x: Tensor, weights: list[Tensor], output: Tensor) -> bool:
        """Whether rows that begin and end within a sequence alone give their part of the output."""
        if x.ndim < 2 or not x.is_contiguous():
            return False
        flat = x.view(-1, x.shape[-1])
        inside = slice(len(flat) // 2 + 1, len(flat) - 1)
        part = flat[inside]
        if not len(part):
            return False
        try:
            found = self._compute(part.view(*[1] * (x.ndim - 2), *part.shape), *weights)
        except Exception:  # foreign code, that may need as many rows as before
            return False
        expected = output.reshape(flat.shape)[inside]
        return found.numel() == part.numel() and torch.equal(found.view(part.shape), expected)


def _random_states(devices: list[torch.device]) -> list[Tensor]:
    return [
        torch.get_rng_state(),
        *(torch.get_device_module(device).get_rng_state(device) for device in devices),
    ]


def _is_recorded(tensors: list[Any]) -> bool:
    """Whether all of these are tensors through which a backward may follow."""
    are_tensors = all(isinstance(tensor, Tensor) for tensor in tensors)
    return (
        torch.is_grad_enabled() and are_tensors and any(tensor.requires_grad for tensor in tensors)
    )


def recompute_norms(model: nn.Module) -> None:
    """Let norms in a rotated model keep their inputs alone for backward.

    Norms inside of rotated modules are left as they are.
    """
    inside = {id(module) for module in _modules_inside_rotations(model)}
    for module in model.modules():
        if (
            id(module) not in inside
            and not isinstance(module, RecomputedNorm | RotatedModule)
            and _keeps_its_input(module)
        ):
            mix_in(module, RecomputedNorm, "Recomputed")


def _modules_inside_rotations(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that run slice by slice and whose parameters are replicated."""
    for module in model.modules():
        if isinstance(module, RotatedModule):
            yield from (
                module.get_submodule(name.rpartition(".")[0]) for name in module.rotation.replicated
            )


def _keeps_its_input(module: nn.Module) -> bool:
    """Whether a module is a norm, or has only vectors as parameters as a norm has."""
    vectors = [parameter for parameter in module.parameters() if parameter.ndim <= 1]
    others = [
        *module.children(),
        *module.buffers(),
        *(parameter for parameter in module.parameters() if parameter.ndim > 1),
    ]
    return not others and (bool(vectors) or isinstance(module, _NORMS))
