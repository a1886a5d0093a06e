"""A linear layer by its output features: the slices' outputs lie side by side.

Also here:

* Convolutions by output channels: the slices' outputs lie side by side.

The linear layers of a block: into a width that is cut, and out of it.

An embedding by rows of its vocabulary.

Its rows are sent to the ranks whose tokens they are for.

A frozen linear layer whose rows rest and travel in few bits, and are decoded on arrival.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.rotated_module import (
    RotatedModule,
    RotationTarget,
    own_class,
    wrap,
)
from gyre_trainer.rotation.rule import (
    ConcatenatedOutputs,
    ModuleSlice,
    OutputReduction,
    RowsRule,
    Rule,
    parameter_at,
)
from gyre_trainer.shards.layout import Cut, Layout, local_of
from gyre_trainer.shards.quantized import (
    SCALE,
    Encoding,
    Format,
    QuantizedShards,
    decode,
    encode,
    typed,
)
from gyre_trainer.shards.sharded_parameters import sharded_parameters_of
from gyre_trainer.torch_internals import parameters_of


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether this is the layer of `transformers` that GPT-2 has; it may not be installed."""
    cls = own_class(module)
    return (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D")


def is_table(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether a block may have this embedding: one whose columns do not depend on each other."""
    if type(module) is not nn.Embedding:
        return False
    options = module.max_norm, module.scale_grad_by_freq, module.sparse
    return all(option is None or option is False for option in options)


def features_of(layer: nn.Module) -> tuple[int, int]:
    """Input and output features of such a layer."""
    rows, columns = layer.get_parameter("weight").shape
    return columns, rows


def projections(module: nn.Module, inputs: tuple[str, ...], output: str) -> list[Cut]:
    """The cuts of linear layers into a common width, and of the layer ``output`` out of it.

    Raises:
        RotationError: one of them is missing or not linear.
    """
    weights, biases = [], []
    for name in (*inputs, output):
        layer = layer_of(module, name)
        closes = name == output
        weight, bias = layer.get_parameter("weight"), parameters_of(layer)["bias"]
        weights.append(Cut(f"{name}.weight", tuple(weight.shape), int(closes)))
        if bias is not None:
            biases.append(Cut(f"{name}.bias", tuple(bias.shape), 0, padded=closes))
    return weights + biases


def layer_of(module: nn.Module, name: str) -> nn.Linear:
    """The linear layer of this name.

    Raises:
        RotationError: it is missing or not linear.
    """
    layer = dict(module.named_modules()).get(name)
    if not isinstance(layer, nn.Linear):
        raise RotationError(
            f"{type(module).__name__}.{name} is {type(layer).__name__}, "
            "but the rule needs a Linear there"
        )
    return layer


def owner_of(module: nn.Module, count: str) -> tuple[Any, str]:
    """The object that has a count, the module or its ``config``, and the attribute's name."""
    first, _, last = count.rpartition(".")
    return (getattr(module, first) if first else module), last


def require_counts(module: nn.Module, counts: tuple[str, ...], divisor: int) -> None:
    """Return if each of the counts is a whole number that ``divisor`` divides.

    Raises:
        RotationError: a count is missing, is no whole number, or is not divisible.
    """
    for count in counts:
        value = count_of(module, count)
        if value is None or value % divisor:
            raise RotationError(
                f"{type(module).__name__}.{count} is {value}, but the rule needs a whole number "
                f"there that {divisor} divides"
            )


def count_of(module: nn.Module, count: str) -> int | None:
    """The value of a count; None where it is missing or no whole number."""
    try:
        owner, name = owner_of(module, count)
        value = getattr(owner, name)
    except AttributeError:
        return None
    return value if type(value) is int else None


@contextmanager
def changed_counts(module: nn.Module, counts: Mapping[str, int]) -> Iterator[None]:
    """A context in which the module reads other values of its counts, those of a slice.

    Counts of a ``config``, which modules share, are changed in a copy of it.
    """
    if not counts:
        yield
        return
    before = dict(vars(module))
    try:
        for first in {count.rpartition(".")[0] for count in counts} - {""}:
            vars(module)[first] = copy(getattr(module, first))
        for count, value in counts.items():
            owner, name = owner_of(module, count)
            setattr(owner, name, value)
        yield
    finally:
        for name in {count.partition(".")[0] for count in counts}:
            vars(module).pop(name, None)
            if name in before:
                vars(module)[name] = before[name]


class LinearRule(Rule):
    """For `nn.Linear`: rows of the weight, and the bias with them."""

    divisible: ClassVar[bool] = True

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """Weight and bias, along their first dim."""
        return rows(module)

    def output_reduction(
        self, position: int, layout: Layout, dtype: torch.dtype
    ) -> OutputReduction:
        """Side by side, along the features."""
        return ConcatenatedOutputs(-1, layout.all_bounds(layout.cuts[0]), "weight", dtype)


class WeightOnlyRule(LinearRule):
    """For a linear layer whose bias is whole on every rank."""

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """The weight, along its first dim."""
        return [cut for cut in rows(module) if cut.name == "weight"]

    def run(self, current: ModuleSlice, /, *args: Any, **kwargs: Any) -> Tensor:
        """The slice's features, with its part of the bias."""
        (x,) = (*args, *kwargs.values())
        bias = parameter_at(current.module, "bias")[slice(*current.bounds["weight"])]
        output: Tensor = F.linear(x, current.weights["weight"], bias)
        return output


def rotate_linear(module: nn.Linear, target: RotationTarget) -> None:
    """Rotate weight and bias, or the weight alone where it is tied with a layer without a bias."""
    sharded = sharded_parameters_of(module.get_parameter("weight"))
    if module.bias is None or sharded is None or len(sharded.parameters) > 1:
        wrap(module, LinearRule(), target)
    else:
        wrap(module, WeightOnlyRule(), target)


def rows(module: nn.Module) -> list[Cut]:
    """The cuts of a weight, and of the bias where there is one, along the output features.

    Raises:
        RotationError: the module has no parameter `weight`.
    """
    parameters = {name: getattr(module, name, None) for name in ("weight", "bias")}
    if not isinstance(parameters["weight"], nn.Parameter):
        raise RotationError(f"{type(module).__name__} has no parameter named weight")
    return [Cut(name, tuple(p.shape), 0) for name, p in parameters.items() if p is not None]


_FUNCTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True)
class ConvRule(Rule):
    """For `nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d` of one group.

    Attributes:
        conv: the module whose stride, padding and dilation are used.
    """

    conv: nn.Conv1d | nn.Conv2d | nn.Conv3d

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """Weight and bias, along the output channels."""
        return rows(module)

    def output_reduction(
        self, position: int, layout: Layout, dtype: torch.dtype
    ) -> OutputReduction:
        """Side by side, along the channels."""
        return ConcatenatedOutputs(
            self._channels, layout.all_bounds(layout.cuts[0]), "weight", dtype
        )

    def run(self, current: ModuleSlice, /, *args: Any, **kwargs: Any) -> Tensor:
        """The slice's output channels."""
        (x,) = (*args, *kwargs.values())
        start, stop = current.bounds["weight"]
        weight, bias = current.weights["weight"], current.weights.get("bias")
        # torch has no convolution without output channels; one of zeros has the shape
        if start == stop:
            nothing = self._convolved(x, weight.new_zeros(1, *weight.shape[1:]), None)
            return nothing.narrow(self._channels, 0, 0)
        return self._convolved(x, weight, bias)

    @property
    def _channels(self) -> int:
        """The dim of the channels, with or without a batch in front."""
        return -1 - len(self.conv.kernel_size)

    def _convolved(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        conv = self.conv
        padding: str | tuple[int, ...] | int = conv.padding
        if conv.padding_mode != "zeros":
            x, padding = F.pad(x, conv._reversed_padding_repeated_twice, mode=conv.padding_mode), 0
        function = _FUNCTIONS[len(conv.kernel_size)]
        return function(x, weight, bias, conv.stride, padding, conv.dilation)


@dataclass(frozen=True)
class EmbeddingRule(RowsRule):
    """For `nn.Embedding`.

    Attributes:
        num_embeddings: the vocabulary's size.
        padding_idx: the token whose row takes no gradient; None for no such token.
    """

    num_embeddings: int
    padding_idx: int | None = None

    recompute_pays: ClassVar[bool] = False
    divisible: ClassVar[bool] = True  # its slices do not travel, so they set no size of buffers

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """The weight, along the vocabulary."""
        assert isinstance(module, nn.Embedding)
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option) is not None and getattr(module, option) is not False:
                raise RotationError(f"{module}: an embedding with {option} cannot be rotated")
        return [Cut("weight", tuple(module.weight.shape), 0)]

    def of_rows(self, current: ModuleSlice, places: Tensor, padding: int | None) -> Tensor:
        """The rows of the tokens, as the module makes them of ``current``'s."""
        return self._rows(current, places, padding)

    def _rows(self, current: ModuleSlice, tokens: Tensor, padding_idx: int | None) -> Tensor:
        """What the module makes of ``tokens`` that are counted from the slice's first row."""
        return F.embedding(tokens, current.weights["weight"], padding_idx=padding_idx)


@dataclass(frozen=True)
class OwnEmbeddingRule(EmbeddingRule):
    """For a subclass of `nn.Embedding` whose forward changes each row alike, such as by a scale.

    The forward takes the tokens alone, and calls its parent's.
    """

    def _rows(self, current: ModuleSlice, tokens: Tensor, padding_idx: int | None) -> Tensor:
        before = current.module.padding_idx
        current.module.padding_idx = padding_idx  # type: ignore[assignment]
        try:
            rows: Tensor = current.forward(tokens)
        finally:
            current.module.padding_idx = before
        return rows


def is_quantized(module: nn.Module) -> bool:
    """Whether the module's weights are encoded."""
    return isinstance(module, RotatedModule) and isinstance(
        module.rotation.sharded, QuantizedShards
    )


def num_weights(model: nn.Module) -> int:
    """The parameters of a model, those that are encoded included: weights, not their codes."""
    total = sum(parameter.numel() for parameter in model.parameters())
    for module in filter(is_quantized, model.modules()):
        layer: Any = module
        codes, scales = parameters_of(layer)["weight"], parameters_of(layer)[SCALE]
        total += layer.in_features * layer.out_features - codes.numel() - scales.numel()
    return int(total)


def quantize_linear(module: RotatedModule, path: str, to: Format) -> None:
    """Encode the rows of a frozen linear layer that this rank owns; the float weights are gone.

    Raises:
        RotationError: a weight trains, or is not finite.
    """
    layer: Any = module
    for name, parameter in parameters_of(layer).items():
        if parameter is not None and parameter.requires_grad:
            raise RotationError(
                f"{path}.{name} trains, and only frozen weights can be {to}. Freeze it "
                "(requires_grad_(False)) or name it in `keep`."
            )
    weight = local_of(layer.weight)
    if not weight.isfinite().all():
        raise RotationError(f"{path}.weight is not finite; load or make weights before quantizing")
    codes, scales = encode(weight, to)
    encoding = Encoding(to)
    bias = [] if layer.bias is None else [("bias", local_of(layer.bias))]
    plain = module.rotation
    sharded = QuantizedShards(plain.sharded, [*bias, (SCALE, scales), ("weight", codes)])
    for cut, parameter in zip(sharded.layout.cuts, sharded.parameters, strict=True):
        parameters_of(layer)[cut.name] = parameter
    module.rotation = replace(
        plain,
        forward=partial(
            _forward, layer, encoding, None if layer.bias is None else layer.bias.dtype
        ),
        rule=QuantizedLinearRule(),
        layout=sharded.layout,
        sharded=sharded,
    )
    module._by_rule = {}


class QuantizedLinearRule(LinearRule):
    """For a linear layer of encoded rows, which do not travel in pieces."""

    divisible = False


def _forward(
    layer: nn.Module, encoding: Encoding, bias_dtype: torch.dtype | None, x: Tensor
) -> Tensor:
    """The features of the rows that stand in the layer now."""
    codes, scales = parameter_at(layer, "weight"), parameter_at(layer, SCALE)
    bias = None
    if bias_dtype is not None:
        bias = typed(parameter_at(layer, "bias"), bias_dtype).flatten().to(x.dtype)
    output: Tensor = _DecodedLinear.apply(x, codes, scales, bias, encoding)  # type: ignore[no-untyped-call]
    return output


class _DecodedLinear(torch.autograd.Function):
    """A linear layer that keeps codes for backward, and decodes them again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, encoding: Encoding
    ) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.encoding, ctx.num_columns = encoding, x.shape[-1]
        return F.linear(x, _decoded(ctx, codes, scales, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        codes, scales = ctx.saved_tensors
        weight = _decoded(ctx, codes, scales, grad.dtype)
        return grad @ weight, None, None, None, None


def _decoded(ctx: Any, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    scales = typed(scales, torch.float32)
    return decode(codes, scales, ctx.num_columns, *ctx.encoding).to(dtype)
