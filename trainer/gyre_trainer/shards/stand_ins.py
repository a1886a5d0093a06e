"""What stands in the place of a sharded parameter while a model runs: it refuses to be read."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from gyre_trainer.errors import RotationError


class StandIn(Tensor):
    """Has the shape, the dtype and the device of a parameter that is cut, but no values.

    A forward may ask for these. Where it computes with the parameter, instead of calling the module
    that has it, a rank would need all shards.

    Attributes:
        parameter: the parameter.
        full_name: its name in the model.
        path: of the module that rotates with it.
    """

    parameter: DTensor
    full_name: str
    path: str

    # what is asked of it for each call of a model is answered without Python
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(parameter: DTensor, name: str, path: str) -> "StandIn":
        """A stand-in of a parameter; it takes a gradient where the parameter does."""
        with torch.inference_mode(False):
            made: Any = Tensor._make_wrapper_subclass(
                StandIn,
                parameter.shape,
                dtype=parameter.dtype,
                device=parameter.device,
                requires_grad=parameter.requires_grad,
            )
        made._is_param = True  # `isinstance(it, nn.Parameter)` is true
        made.parameter, made.full_name, made.path = parameter, name, path
        stand_in: StandIn = made
        return stand_in

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuse every operator.

        Raises:
            RotationError: always; the message names the parameter.
        """
        leaves = tree_leaves((args, kwargs))
        raise next(each for each in leaves if isinstance(each, StandIn))._refusal()

    def full_tensor(self) -> Tensor:
        """The whole parameter, gathered from all ranks; without gradients.

        Raises:
            RotationError: a gradient of it would be one rank's own.
        """
        if torch.is_grad_enabled() and self.requires_grad:
            raise self._refusal()
        whole: Tensor = self.parameter.full_tensor()
        return whole

    def _refusal(self) -> RotationError:
        return RotationError(
            f"{self.full_name} is read by a forward that does not call the module with it, but "
            f"each rank has only its shard of it while {self.path} rotates; keep that module whole "
            f"with rotate_all(..., rules={{{self.path!r}: None}}), or call it"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StandIn({self.full_name}, shape={tuple(self.shape)}, dtype={self.dtype})"


def behind(parameter: Any) -> Any:
    """The parameter that a stand-in stands for; anything else as it is."""
    return parameter.parameter if isinstance(parameter, StandIn) else parameter
