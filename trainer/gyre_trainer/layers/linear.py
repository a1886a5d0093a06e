"""A linear layer by its output features: the slices' outputs lie side by side.

Also here:

* Convolutions by output channels: the slices' outputs lie side by side.

The linear layers of a block: into a width that is cut, and out of it.

A layer is an `nn.Linear`, or one of `transformers` that keeps its weight transposed, as GPT-2 has
them.

An embedding by rows of its vocabulary.

Its rows are sent to the ranks whose tokens they are for. On one rank it goes
round the ring as other modules do: a slice gives its own tokens' rows, zero for others.

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
from gyre_trainer.rotation.call import cast
from gyre_trainer.rotation.output_reduction import ConcatenatedOutputs, OutputReduction
from gyre_trainer.rotation.rotated_module import (
    PartialRotation,
    RotatedModule,
    RotationTarget,
    mix_in,
    own_class,
    wrap,
)
from gyre_trainer.rotation.rule import ModuleSlice, RowsRule, Rule, parameter_at
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


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_transposed_linear(module)


def features_of(layer: nn.Module) -> tuple[int, int]:
    """Input and output features of such a layer."""
    rows, columns = layer.get_parameter("weight").shape
    return (rows, columns) if is_transposed_linear(layer) else (columns, rows)


class SliceTransposed:
    """Mixed in before the class of a transposed layer inside a block: its width is its weight's."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """The features that the present weight makes."""
        return F.linear(x, self.weight.t(), self.bias)


def projections(module: nn.Module, inputs: tuple[str, ...], output: str) -> list[Cut]:
    """The cuts of linear layers into a common width, and of the layer ``output`` out of it.

    Raises:
        RotationError: one of them is missing or not linear.
    """
    weights, biases = [], []
    for name in (*inputs, output):
        layer = layer_of(module, name)
        closes, transposed = name == output, is_transposed_linear(layer)
        if transposed:
            mix_in(layer, SliceTransposed, "Slice")
        weight, bias = layer.get_parameter("weight"), parameters_of(layer)["bias"]
        dim = int(closes != transposed)
        weights.append(Cut(f"{name}.weight", tuple(weight.shape), dim))
        if bias is not None:
            biases.append(Cut(f"{name}.bias", tuple(bias.shape), 0, padded=closes))
    return weights + biases


def layer_of(module: nn.Module, name: str) -> nn.Module:
    """The linear layer of this name.

    Raises:
        RotationError: it is missing or not linear.
    """
    layer = dict(module.named_modules()).get(name)
    if not isinstance(layer, nn.Module) or not _is_linear(layer):
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


def require_changeable(module: nn.Module, counts: tuple[str, ...]) -> None:
    """Return if a slice can read other values of the counts, as `changed_counts` has it.

    Raises:
        RotationError: a count is one of a frozen dataclass, or another object that takes no value.
    """
    for count in counts:
        value = count_of(module, count)
        try:
            with changed_counts(module, {} if value is None else {count: value}):
                pass
        except (AttributeError, TypeError, NotImplementedError) as error:
            owner = count.rpartition(".")[0]
            holder = type(getattr(module, owner)).__name__ if owner else "the module"
            raise RotationError(
                f"{type(module).__name__}.{count} cannot be set, because {holder} is frozen or has "
                "it from elsewhere, but a slice has another number. Let the forward read it from "
                "the weights (view(..., -1, head_dim)) or from an attribute of the module, or let "
                f"{holder} take another value."
            ) from error


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


class TransposedLinearRule(Rule):
    """For a linear layer whose weight has the output features as columns, as GPT-2's `Conv1D`."""

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """Columns of the weight, and the bias with them."""
        weight, bias = module.get_parameter("weight"), module.get_parameter("bias")
        return [Cut("weight", tuple(weight.shape), 1), Cut("bias", tuple(bias.shape), 0)]

    def run(self, current: ModuleSlice, /, *args: Any, **kwargs: Any) -> Tensor:
        """The slice's features. The layer's own forward would want all of them."""
        (x,) = (*args, *kwargs.values())
        output: Tensor = F.linear(x, current.weights["weight"].t(), current.weights["bias"])
        return output

    def output_reduction(
        self, position: int, layout: Layout, dtype: torch.dtype
    ) -> OutputReduction:
        """Side by side, along the features."""
        return ConcatenatedOutputs(-1, layout.all_bounds(layout.cuts[0]), "weight", dtype)


class WeightOnlyRule(LinearRule):
    """For a linear layer without its bias."""

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """The weight, along its first dim."""
        return [cut for cut in rows(module) if cut.name == "weight"]

    def run(self, current: ModuleSlice, /, *args: Any, **kwargs: Any) -> Tensor:
        """The slice's features, before the bias."""
        (x,) = (*args, *kwargs.values())
        output: Tensor = F.linear(x, current.weights["weight"])
        return output


class AddsBias(RotatedModule):
    """Mixed in before `nn.Linear`: the bias, which is whole on every rank, is added at the end."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output for this rank's part of the batch, as without rotation."""
        assert isinstance(self, nn.Module)
        output = self.ring_forward(*args, **kwargs)
        return output + cast(local_of(parameter_at(self, "bias")), output.dtype)


def rotate_linear(module: nn.Linear, target: RotationTarget) -> None:
    """Rotate weight and bias, or the weight alone where it is tied with a layer without a bias."""
    sharded = sharded_parameters_of(module.get_parameter("weight"))
    if module.bias is None or sharded is None or len(sharded.parameters) > 1:
        wrap(module, LinearRule(), target)
    else:
        partial = PartialRotation(module.forward, ("weight",), AddsBias)
        wrap(module, WeightOnlyRule(), target, partial)


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
    """For `nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d`. A cut may fall inside of a group.

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
            nothing = self._convolved(
                self._inputs(x, 0, 1), weight.new_zeros(1, *weight.shape[1:]), None, 1
            )
            return nothing.narrow(self._channels, 0, 0)
        if self.conv.groups == 1:
            return self._convolved(x, weight, bias, 1)
        parts = []
        for first, num_channels, group, num_groups in self._runs(start, stop):
            own = slice(first - start, first - start + num_channels)
            inputs = self._inputs(x, group, num_groups)
            parts.append(
                self._convolved(
                    inputs, weight[own], None if bias is None else bias[own], num_groups
                )
            )
        return torch.cat(parts, self._channels)

    @property
    def _channels(self) -> int:
        """The dim of the channels, with or without a batch in front."""
        return -1 - len(self.conv.kernel_size)

    def _inputs(self, x: Tensor, group: int, num_groups: int) -> Tensor:
        """The input channels of ``num_groups`` groups, from ``group`` on."""
        size = self.conv.in_channels // self.conv.groups
        return x.narrow(self._channels, group * size, num_groups * size)

    def _runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """First output channel, number of channels, first group, number of groups.

        One convolution computes as many whole groups as there are, or a part of one group.
        """
        size = self.conv.out_channels // self.conv.groups
        while start < stop:
            group, inside = divmod(start, size)
            num_groups = 1 if inside else max(1, (stop - start) // size)
            num_channels = min(num_groups * size - inside, stop - start)
            yield start, num_channels, group, num_groups
            start += num_channels

    def _convolved(self, x: Tensor, weight: Tensor, bias: Tensor | None, num_groups: int) -> Tensor:
        conv = self.conv
        padding: str | tuple[int, ...] | int = conv.padding
        if conv.padding_mode != "zeros":
            x, padding = F.pad(x, conv._reversed_padding_repeated_twice, mode=conv.padding_mode), 0
        function = _FUNCTIONS[len(conv.kernel_size)]
        return function(x, weight, bias, conv.stride, padding, conv.dilation, num_groups)


@dataclass(frozen=True)
class EmbeddingRule(RowsRule):
    """For `nn.Embedding`. Its gradient needs no weights, so these travel only in forward.

    Attributes:
        num_embeddings: the vocabulary's size.
        padding_idx: the token whose row takes no gradient; None for no such token.
    """

    num_embeddings: int
    padding_idx: int | None = None

    backward_reads_weights: ClassVar[bool] = False
    recompute_pays: ClassVar[bool] = False
    divisible: ClassVar[bool] = True

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """The weight, along the vocabulary."""
        assert isinstance(module, nn.Embedding)
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option) is not None and getattr(module, option) is not False:
                raise RotationError(f"{module}: an embedding with {option} cannot be rotated")
        return [Cut("weight", tuple(module.weight.shape), 0)]

    def run(self, current: ModuleSlice, /, *args: Any, **kwargs: Any) -> Tensor:
        """The rows of the tokens in the slice's range of the vocabulary, zero for others."""
        (tokens,) = (*args, *kwargs.values())
        weight = current.weights["weight"]
        start, stop = current.bounds["weight"]
        if start == stop:
            return weight.new_zeros(*tokens.shape, weight.shape[1])
        outside = torch.zeros_like(tokens, dtype=torch.bool)
        # Tokens outside of all slices are left to the first and the last slice, where torch refuses
        # them.
        if start > 0:
            outside |= tokens < start
        if stop < self.num_embeddings:
            outside |= tokens >= stop
        padding = self.padding_idx
        here = None if padding is None or not start <= padding < stop else padding - start
        rows = self._rows(current, torch.where(outside, 0, tokens - start), here)
        return rows.masked_fill(outside.unsqueeze(-1), 0)

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

    backward_reads_weights: ClassVar[bool] = True

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
