"""Norms under recomputation keep only their input, and the modules after them keep nothing."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gyre_trainer.layers.known_blocks import is_trained
from gyre_trainer.layers.known_modules import has_code_of
from gyre_trainer.rotation.backward.recomputation import recomputed
from gyre_trainer.rotation.guard import own_class
from gyre_trainer.rotation.rotated_module import RotatedModule, mix_in, uncompiled
from gyre_trainer.rotation.rule import swapped
from gyre_trainer.shards.local_shards import local_of

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


class RecomputedNorm:
    """Mixed in before the class of a norm whose code is known; backward computes its output again.

    Attributes:
        has_own_rows: whether each row of the input, along its last dim, gives a row of the output.
    """

    has_own_rows: bool

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, as without recomputation."""
        assert isinstance(self, nn.Module)
        weights = [
            local_of(parameter) for parameter in self._parameters.values() if parameter is not None
        ]
        if kwargs or len(args) != 1 or not _is_recorded([*args, *weights]):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return recomputed(self._compute, *args, *weights, by_rows=self.has_own_rows)

    def _compute(self, x: Tensor, *weights: Tensor) -> Tensor:
        assert isinstance(self, nn.Module)
        names = [name for name, parameter in self._parameters.items() if parameter is not None]
        with swapped(self, dict(zip(names, weights, strict=True))):
            output: Tensor = super().forward(x)  # type: ignore[misc]
        return output


def _is_recorded(tensors: list[Any]) -> bool:
    """Whether all of these are tensors through which a backward may follow."""
    are_tensors = all(isinstance(tensor, Tensor) for tensor in tensors)
    return (
        torch.is_grad_enabled() and are_tensors and any(tensor.requires_grad for tensor in tensors)
    )


def recompute_norms(model: nn.Module) -> None:
    """Let norms in a rotated model keep their inputs alone for backward.

    Norms inside of rotated modules are left as they are, and so are those of unknown code, which
    might draw random numbers or count its calls.
    """
    inside = {id(module) for module in _modules_inside_rotations(model)}
    for module in model.modules():
        if (
            id(module) not in inside
            and not isinstance(module, RecomputedNorm | RotatedModule)
            and _keeps_its_input(module)
        ):
            has_own_rows = _has_own_rows(module)
            mix_in(module, RecomputedNorm, "Recomputed")
            module.has_own_rows = has_own_rows  # type: ignore[assignment]


def _modules_inside_rotations(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that run slice by slice and whose parameters are replicated."""
    for module in model.modules():
        if isinstance(module, RotatedModule):
            yield from (
                module.get_submodule(name.rpartition(".")[0]) for name in module.rotation.replicated
            )


def _keeps_its_input(module: nn.Module) -> bool:
    """Whether a module is a norm of known code: one of torch, or of a library, that was trained."""
    others = [
        *module.children(),
        *module.buffers(),
        *(parameter for parameter in module.parameters() if parameter.ndim > 1),
    ]
    if others:
        return False
    has_weights = next(module.parameters(), None) is not None
    return _is_of_torch(module) or (has_weights and is_trained(module))


def _is_of_torch(module: nn.Module) -> bool:
    return any(isinstance(module, norm) and has_code_of(module, norm) for norm in _NORMS)


def _has_own_rows(module: nn.Module) -> bool:
    """Whether a known norm takes the rows along the last dim one by one."""
    if _is_of_torch(module):
        return len(getattr(module, "normalized_shape", ())) == 1
    return "RMSNorm" in own_class(module).__name__
