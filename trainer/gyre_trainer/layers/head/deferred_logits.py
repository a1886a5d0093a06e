"""Logits that are computed when something else than their cross-entropy is asked for.

[Note: Deferred logits]

A model of `transformers` that is called with `labels` computes all logits and then their
cross-entropy. Where it trains, its head returns `DeferredLogits`: a tensor with the shape and dtype
of the logits, and without their memory. `float`, `view` and the like return such a tensor again,
and so do functions of single logits that the loss can apply to a slice: division and multiplication
by a number, and `tanh`. `F.cross_entropy` computes the loss by slices of the vocabulary from the
head's input. So shifts of labels, ignored targets and divisors are the library's own code. Every
other function gets the logits, which the head computes then, and its result is what it is without
this module.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gyre_trainer.errors import RotationError
from gyre_trainer.layers.encoded.quantized_linear import is_quantized
from gyre_trainer.layers.head.cross_entropy import Reduction, linear_cross_entropy
from gyre_trainer.layers.head.logit_functions import Divided, LogitFunction, Multiplied, Tanh
from gyre_trainer.layers.linear import LinearRule, WeightOnlyRule
from gyre_trainer.rotation.guard import own_class
from gyre_trainer.rotation.rotated_module import RotatedModule, mix_in

_LABELS = "labels"
_WHAT_TO_DO = (
    "call the model without `labels`, and compute the loss from the logits that it returns then"
)


class DefersLogits:
    """Mixed in before a rotated `nn.Linear` that is a model's head.

    Attributes:
        defers: whether the model computes a loss now.
        asked: whether its caller does, as `asked_to_defer` says.
    """

    defers: bool = False
    asked: bool = False
    rotation: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The logits, or deferred ones during a training call with labels."""
        (x,) = (*args, *kwargs.values())
        if self.defers and _is_recorded(self, x) and not is_quantized(cast("nn.Module", self)):
            return DeferredLogits.of(self, x)
        return self.logits(x)

    def logits(self, x: Tensor) -> Tensor:
        """All logits."""
        logits: Tensor = super().forward(x)  # type: ignore[misc]
        return logits


def defer_logits(model: nn.Module) -> None:
    """Let the models of `transformers` in ``model`` compute their own loss without all logits.

    That is so in training with gradients, where the head is a linear layer that rotates by itself.
    """
    for module in model.modules():
        if not hasattr(type(module), "get_output_embeddings") or not _takes_labels(module):
            continue
        head: Any = module.get_output_embeddings()  # type: ignore[operator]
        if isinstance(head, DefersLogits) or not _is_rotated_linear(head):
            continue
        mix_in(head, DefersLogits, "")
        module.register_forward_pre_hook(_begin, with_kwargs=True)
        module.register_forward_hook(_end, always_call=True)


@contextmanager
def asked_to_defer(head: nn.Module) -> Iterator[None]:
    """A context in which a rotated model in training returns deferred logits without `labels`.

    It is for callers that take their `F.cross_entropy`. Other heads compute their logits as ever.
    """
    if not isinstance(head, DefersLogits):
        yield
        return
    head.asked = True
    try:
        yield
    finally:
        head.asked = False


def _takes_labels(module: nn.Module) -> bool:
    return _LABELS in _signature(module).parameters


def _signature(module: nn.Module) -> inspect.Signature:
    cls: Any = own_class(module)
    return inspect.signature(cls.forward)


def _is_rotated_linear(head: Any) -> bool:
    return (
        isinstance(head, RotatedModule)
        and isinstance(head, nn.Linear)
        and type(head.rotation.rule) in (LinearRule, WeightOnlyRule)
    )


def _begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling() or not module.training:
        return  # a graph of the compiler has no place for such tensors
    head: Any = module.get_output_embeddings()  # type: ignore[operator]
    if isinstance(head, DefersLogits):
        given = _signature(module).bind_partial(module, *args, **kwargs).arguments
        head.defers = head.asked or given.get(_LABELS) is not None


def _end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    head: Any = module.get_output_embeddings()  # type: ignore[operator]
    if isinstance(head, DefersLogits):
        head.defers = False


def _is_recorded(head: Any, x: Tensor) -> bool:
    """Whether a backward may follow, in the dtypes that the head is given."""
    if not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return False
    return x.requires_grad or any(parameter.requires_grad for parameter in head.parameters())


class DeferredLogits(Tensor):
    """Logits (..., V) of features (..., D) that nobody has computed yet, after some functions.

    A gradient cannot reach it: what torch does not announce to tensors of other classes, such as an
    `autograd.Function`, is an error that says what to do.
    """

    _source: "_Source"
    _x: Tensor
    _functions: tuple[LogitFunction, ...]
    _compute: Callable[[], Tensor]
    _whole: Tensor | None

    @classmethod
    def of(cls, head: Any, x: Tensor) -> "DeferredLogits":
        """The logits that ``head`` computes of ``x``."""
        source = _Source(head, x)
        dtype = head.rotation.policy.outer_dtype or x.dtype
        return cls._made(source, x, (), dtype, lambda: head.logits(x))

    @classmethod
    def _made(
        cls,
        source: "_Source",
        x: Tensor,
        functions: tuple[LogitFunction, ...],
        dtype: torch.dtype,
        compute: Callable[[], Tensor],
    ) -> "DeferredLogits":
        shape = (*x.shape[:-1], source.head.out_features)
        made: DeferredLogits = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=x.device, requires_grad=True
        )
        made._source, made._x, made._functions = source, x, functions
        made._compute, made._whole = compute, None
        with torch._C.DisableTorchFunctionSubclass():
            made.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        return made

    def whole(self) -> Tensor:
        """The logits, computed once; every rank must ask for them at the same place.

        Raises:
            RotationError: the head's weights or its input have changed since.
        """
        if self._whole is None:
            self._source.require_unchanged()
            self._source.is_computed = True
            with torch.enable_grad():
                self._whole = self._compute()
        return self._whole

    def then(
        self, function: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype | None = None
    ) -> "DeferredLogits":
        """The logits after ``function``, which are those of ``x`` in ``dtype``."""
        compute = partial(self._computed_by, function)
        return self._made(self._source, x, self._functions, dtype or self.dtype, compute)

    def after(
        self, applied: LogitFunction, function: Callable[[Tensor], Tensor]
    ) -> "DeferredLogits":
        """The logits after ``function``, which is ``applied`` to the logits of each slice."""
        functions = (*self._functions, applied)
        compute = partial(self._computed_by, function)
        return self._made(self._source, self._x, functions, self.dtype, compute)

    def _computed_by(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(self.whole())

    def cross_entropy(self, targets: Tensor, **options: Any) -> Tensor:
        """Their loss, in their dtype, by slices of the vocabulary."""
        self._source.require_unchanged()
        options["functions"] = self._functions
        return linear_cross_entropy(self._source.head, self._x, targets, **options).to(self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Defer further, describe, or compute the logits and call the function with them."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in _DESCRIBING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if isinstance(first, DeferredLogits) and not first._source.is_computed:
            deferred = _DEFERRING.get(func)
            found = deferred(*args, **kwargs) if deferred else None
            if found is not None:
                return found
        args, kwargs = tree_map_only(DeferredLogits, DeferredLogits.whole, (args, dict(kwargs)))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse: the graph around this operator would not reach the head."""
        raise RotationError(f"{func} needs logits, which the model did not compute; {_WHAT_TO_DO}")


class _Source:
    """A head's input, and whether the logits were computed."""

    def __init__(self, head: Any, x: Tensor) -> None:
        self.head, self._x = head, x
        self.is_computed = False
        self._versions = self._now()

    def _now(self) -> tuple[int, int]:
        return self.head.rotation.sharded.version, self._x._version

    def require_unchanged(self) -> None:
        if self._now() != self._versions:
            raise RotationError(
                "the logits were not computed, and the head's weights, or its input, have changed "
                f"since. Read them before the optimizer's step, or {_WHAT_TO_DO}"
            )


def _refuse_gradient(grad: Tensor) -> None:
    raise RotationError(
        f"a gradient was computed for logits that the model did not compute; {_WHAT_TO_DO}"
    )


def _cross_entropy(
    logits: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """None for what takes all logits: weights of classes, probabilities, torch's old arguments."""
    if any(each is not None for each in (weight, size_average, reduce)) or logits.dim() != 2:
        return None
    if target.dtype != torch.int64 or target.shape != logits.shape[:1]:
        return None
    return logits.cross_entropy(
        target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )


def _cast(logits: DeferredLogits, *args: Any, **kwargs: Any) -> DeferredLogits | None:
    if kwargs or len(args) != 1:
        return None
    (to,) = args
    if to == logits.device or to == logits.dtype:
        return logits
    if not isinstance(to, torch.dtype) or not to.is_floating_point:
        return None
    return logits.then(lambda whole: whole.to(to), logits._x, to)


def _float(logits: DeferredLogits) -> DeferredLogits | None:
    return _cast(logits, torch.float32)


def _contiguous(logits: DeferredLogits) -> DeferredLogits:
    return logits.then(Tensor.contiguous, logits._x)


def _reshape(logits: DeferredLogits, *args: Any) -> DeferredLogits | None:
    """For shapes whose last dim is that of the classes."""
    *dims, last = args[0] if len(args) == 1 and isinstance(args[0], Sequence) else args
    x, num_classes = logits._x, logits.shape[-1]
    if last != num_classes and (last != -1 or -1 in dims):
        return None
    if last == -1 and logits.numel() != num_classes * prod(dims):
        return None
    return logits.then(
        lambda whole: whole.reshape(*dims, num_classes), x.reshape(*dims, x.shape[-1])
    )


def _item(logits: DeferredLogits, index: Any) -> DeferredLogits | None:
    """For ranges of tokens: `logits[:, :-1]`, `logits[..., :-1, :]`."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(each is Ellipsis or isinstance(each, slice) for each in parts):
        return None
    takes_classes = len(parts) == logits.dim() or Ellipsis in parts
    if takes_classes and parts[-1] != slice(None):
        return None
    return logits.then(lambda whole: whole[index], logits._x[index])


def _multiply(logits: DeferredLogits, factor: Any, **kwargs: Any) -> DeferredLogits | None:
    if kwargs or not isinstance(factor, int | float):
        return None
    return logits.after(Multiplied(factor), lambda whole: whole * factor)


def _divide(logits: DeferredLogits, divisor: Any, **kwargs: Any) -> DeferredLogits | None:
    """For quotients that are not rounded to integers."""
    if kwargs or not isinstance(divisor, int | float):
        return None
    return logits.after(Divided(divisor), lambda whole: whole / divisor)


def _tanh(logits: DeferredLogits, **kwargs: Any) -> DeferredLogits | None:
    return None if kwargs else logits.after(Tanh(), torch.tanh)


_DEFERRING: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    Tensor.float: _float,
    Tensor.to: _cast,
    Tensor.contiguous: _contiguous,
    Tensor.view: _reshape,
    Tensor.reshape: _reshape,
    Tensor.__getitem__: _item,
    **dict.fromkeys((Tensor.mul, torch.mul), _multiply),
    **dict.fromkeys((Tensor.div, torch.div), _divide),
    **dict.fromkeys((Tensor.tanh, torch.tanh), _tanh),
}
_PROPERTIES = "shape dtype device layout ndim requires_grad is_leaf grad grad_fn is_cpu is_cuda"
_DESCRIBING: frozenset[Any] = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split()),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__),
    ]
)
