"""Parameters that a forward reads, instead of calling the module that has them.

Such are those of a `ParameterList`, or of a layer in `F.linear(x, self.layer.weight)`. While a
model runs, plain tensors stand in the place of all its replicated parameters, so that any forward
inside may read any of them.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gyre_trainer.rotation.call import cast
from gyre_trainer.rotation.rotated_module import own_class, uncompiled
from gyre_trainer.rotation.rule import parameter_at, swapped
from gyre_trainer.shards.local_shards import local_of, place_of


class ReadableParameters:
    """Hooks around a model's forward that put plain tensors in the place of its parameters."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        """Register the hooks; parameters of modules that are never called are read in ``dtype``."""
        self._dtypes = dict(_replicated(model, dtype))
        self._running: list[ExitStack] = []
        model.register_forward_pre_hook(self._before)
        model.register_forward_hook(self._after, always_call=True)

    @uncompiled
    def _before(self, model: nn.Module, _args: Any) -> None:
        tensors = {
            name: cast(local_of(parameter_at(model, name)), dtype)
            for name, dtype in self._dtypes.items()
        }
        running = ExitStack()
        running.enter_context(swapped(model, tensors))
        self._running.append(running)

    @uncompiled
    def _after(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        if self._running:  # not where a hook before `_before` has failed
            self._running.pop().close()


def _replicated(
    model: nn.Module, dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.dtype | None]]:
    for path, module in model.named_modules():
        # modules that are called cast their parameters themselves
        is_called = getattr(own_class(module), "forward", None) is not nn.Module.forward
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor) and place_of(parameter) is None:
                yield f"{path}.{name}".removeprefix("."), None if is_called else dtype


def read_layers_of(module: nn.Module) -> list[nn.Module]:
    """Layers whose weights a state-space mixer, such as Mamba's, reads when it takes one token.

    Its convolution along the sequence is then a product with the last inputs, and the kernels for
    CUDA take the weights of the step's projection. Both are small.
    """
    if not isinstance(getattr(module, "A_log", None), nn.Parameter):
        return []
    found = (getattr(module, name, None) for name in ("conv1d", "dt_proj"))
    return [each for each in found if isinstance(each, (nn.Conv1d, nn.Linear))]
