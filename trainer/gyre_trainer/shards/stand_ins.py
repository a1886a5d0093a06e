"""What stands in the place of a sharded parameter while a model runs: whole when it is read."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from gyre_trainer.errors import RotationError
from gyre_trainer.shards.gathered import Gathered

_View = tuple[Any, tuple[Any, ...], dict[str, Any]]


class StandIn(Tensor):
    """Has the shape, the dtype and the device of a parameter that is cut, but no values.

    An operator that computes with it computes with the whole parameter, gathered for that. A view
    of it, and a cast, are stand-ins, too. So what autograd keeps of it takes no memory. See [Note:
    Parameters that are read] in `gathered`.

    Attributes:
        gathered: the parameter, and how it is gathered.
        views: the operators that made this view of it, with their arguments.
        version: the parameter's version when it was read first; None if it was not yet.
        base: the stand-in that this is a view of; itself if it is none.
    """

    gathered: Gathered
    views: tuple[_View, ...]
    version: int | None
    base: "StandIn"

    # what is asked of it for each call of a model is answered without Python
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(gathered: Gathered) -> "StandIn":
        """A stand-in of a parameter; it takes a gradient where the parameter does."""
        parameter = gathered.parameter
        takes_grad = parameter.requires_grad
        made: Any = StandIn._make(
            parameter, gathered.dtype, parameter.device, takes_grad=takes_grad
        )
        made._is_param = True  # `isinstance(it, nn.Parameter)` is true
        made.gathered, made.views, made.base = gathered, (), made
        made.version = gathered.version if gathered.is_read else None
        if takes_grad:
            made.register_post_accumulate_grad_hook(gathered.take_gradient)
        stand_in: StandIn = made
        return stand_in

    @property
    def is_fresh(self) -> bool:
        """Whether the parameter is as it was when this was first read, if it was."""
        return self.version is None or self.version == self.gathered.version

    @staticmethod
    def _make(
        like: Tensor, dtype: torch.dtype, device: torch.device, *, takes_grad: bool
    ) -> "StandIn":
        with torch.inference_mode(False):
            made: Any = Tensor._make_wrapper_subclass(
                StandIn,
                like.shape,
                strides=like.stride(),
                storage_offset=like.storage_offset(),
                dtype=dtype,
                device=device,
                requires_grad=takes_grad,
            )
        stand_in: StandIn = made
        return stand_in

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator on the whole parameter, or make a view of the stand-in.

        Raises:
            RotationError: it would write to the parameter, or the parameter has changed since
                forward.
        """
        kwargs = dict(kwargs or {})
        _require_unwritten(func, args, kwargs)
        if _is_view(func, args, kwargs):
            return args[0]._view(func, tuple(args[1:]), kwargs)
        args, kwargs = tree_map_only(StandIn, StandIn._value, (args, kwargs))
        return func(*args, **kwargs)

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "StandIn":
        """The stand-in of what a view, or a cast, would be."""
        twin = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        seen = func(twin, *args, **{k: v for k, v in kwargs.items() if k != "device"})
        made = StandIn._make(seen, seen.dtype, self.device, takes_grad=False)
        made.gathered, made.base = self.gathered, self.base
        made.views = (*self.views, (func, args, kwargs))
        return made

    def _value(self) -> Tensor:
        """The values, gathered from all ranks."""
        base = self.base
        whole, version = self.gathered.whole(), self.gathered.version
        if base.version is None:
            base.version = version
        if base.version != version:
            raise RotationError(f"{self.gathered.name} changed between forward and backward")
        for func, args, kwargs in self.views:
            whole = func(whole, *args, **kwargs)
        return whole

    def full_tensor(self) -> Tensor:
        """The whole parameter as a plain tensor, gathered from all ranks; gradients reach it."""
        return self.clone()

    def __repr__(self) -> str:  # type: ignore[override]
        name, shape = self.gathered.name, tuple(self.shape)
        return f"StandIn({name}, shape={shape}, dtype={self.dtype})"


def _is_view(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator makes one view of a stand-in, or casts it where it is."""
    if not args or not isinstance(args[0], StandIn) or len(func._schema.returns) != 1:
        return False
    if str(func._schema.returns[0].type) != "Tensor":
        return False
    if func is torch.ops.aten._to_copy.default:
        return kwargs.get("device") in (None, args[0].device)
    return bool(func.is_view)


def _require_unwritten(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if not func._schema.is_mutable:
        return
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        for leaf in tree_leaves(value) if argument.is_write else ():
            if isinstance(leaf, StandIn):
                raise RotationError(
                    f"{leaf.gathered.name} is written to by a forward, but each rank has only its "
                    "shard of it; keep its module whole by a rule of None"
                )


def behind(parameter: Any) -> Any:
    """The parameter that a stand-in stands for; anything else as it is."""
    return parameter.gathered.parameter if isinstance(parameter, StandIn) else parameter
