# ruff: noqa: N803, N806  # names carry shape letters
"""A linear layer by its output features: the slices' outputs are side by side.

Also here:

* The linear layers of a block: into a cut width, and out of it.
* An embedding by rows of its vocabulary.

[Note: Rows of an embedding]

A batch may have few of a vocabulary's tokens. Where all ranks together have fewer than the
vocabulary, its slices stay where they are. The tokens of all ranks go round the ring, filled up to
the number that the rank with most has. Then a rank's rows do, and each owner adds its own to zeros.
In backward the gradients of the rows go round, and an owner adds those of its own rows, in the
same order in every run. Sizes depend on that one number, which hosts compare, so no rank
waits for its device. With more tokens, slices go round the ring as those of any module.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, TypeGuard

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gyre_trainer.comm.identity import HopIdentity, path_of, span
from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.call import cast
from gyre_trainer.rotation.rotated_module import RotationTarget, own_class, wrap
from gyre_trainer.rotation.rule import (
    BySlices,
    ConcatenatedOutputs,
    ModuleSlice,
    OutputReduction,
    Rotation,
    Rule,
    parameter_at,
    swapped,
)
from gyre_trainer.shards.layout import Cut, GradientRing, Layout, all_pieces, local_of, with_spec
from gyre_trainer.shards.sharded_parameters import sharded_parameters_of
from gyre_trainer.torch_internals import is_fake, parameters_of, spec_of


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
    weights, biases, layers = [], [], dict(module.named_modules())
    for name in (*inputs, output):
        layer, closes = layers.get(name), name == output
        if not isinstance(layer, nn.Linear):
            raise RotationError(
                f"{type(module).__name__}.{name} is {type(layer).__name__}, "
                "but the rule needs a Linear there"
            )
        weight, bias = layer.get_parameter("weight"), parameters_of(layer)["bias"]
        weights.append(Cut(f"{name}.weight", tuple(weight.shape), int(closes)))
        if bias is not None:
            biases.append(Cut(f"{name}.bias", tuple(bias.shape), 0, padded=closes))
    return weights + biases


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
        bounds = [of_piece["weight"] for of_piece in layout.bounds_in]
        return ConcatenatedOutputs(-1, bounds, "weight", dtype)


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


@dataclass(frozen=True)
class EmbeddingRule(Rule):
    """For `nn.Embedding`, and a subclass whose forward changes each row alike, such as by a scale.

    Its forward takes the tokens alone. See [Note: Rows of an embedding].

    Attributes:
        num_embeddings: the vocabulary's size.
        padding_idx: the token whose row takes no gradient; None for no such token.
    """

    num_embeddings: int
    padding_idx: int | None = None

    recompute_pays: ClassVar[bool] = False
    divisible: ClassVar[bool] = True

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """The weight, along the vocabulary."""
        assert isinstance(module, nn.Embedding)
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option) is not None and getattr(module, option) is not False:
                raise RotationError(f"{module}: an embedding with {option} cannot be rotated")
        return [Cut("weight", tuple(module.weight.shape), 0)]

    def call(
        self,
        rotation: Rotation,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        by_slices: BySlices,
    ) -> Any:
        """The rows of the tokens: sent to this rank, or of slices that go round the ring.

        Raises:
            IndexError: a token is not in the vocabulary; see `require_ids`.
            TypeError: tokens are no int64 or int32, which torch refuses, too.
        """
        (tokens,) = (*args, *kwargs.values())
        if tokens.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"tokens of an embedding must be int64 or int32, not {tokens.dtype}")
        ring = rotation.sharded.ring
        longest = require_ids(rotation, tokens, self.num_embeddings, "token", "the embedding")
        if tokens.device.type != "cpu":
            longest = ring.largest(longest, _call_of(rotation))
        if ring.size == 1 or longest * ring.size >= self.num_embeddings:
            return by_slices(rotation, args, kwargs)
        return self._by_rows(rotation, tokens, longest)

    def run(self, current: ModuleSlice, /, *args: Any, **kwargs: Any) -> Tensor:
        """The rows that the slice has; zeros for all other tokens."""
        (tokens,) = (*args, *kwargs.values())
        (start, stop), weight = current.bounds["weight"], current.weights["weight"]
        if start == stop:
            return weight.new_zeros((*tokens.shape, weight.shape[1]))
        places, is_elsewhere = places_in(tokens, start, stop)
        padding = self.padding_idx
        if padding is not None:
            padding = padding - start if start <= padding < stop else None
        rows = _embedded(current.module, current.forward, places, padding)
        return rows.masked_fill(is_elsewhere.unsqueeze(-1), 0)

    def _by_rows(self, rotation: Rotation, tokens: Tensor, longest: int) -> Tensor:
        sharded, module = rotation.sharded, rotation.module
        parameter = parameter_at(module, "weight")
        sharded.require_here(parameter, "weight")
        if torch.is_grad_enabled():
            sharded.before_training(path_of(module))
        rows: Tensor = _Rows.apply(parameter, rotation, tokens.flatten(), longest)  # type: ignore[no-untyped-call]
        others = {
            name: cast(local_of(parameter_at(module, name)), rotation.policy.compute_dtype)
            for name in rotation.replicated
        }
        places = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)
        with swapped(module, {"weight": rows} | others):
            output = _embedded(module, rotation.forward, places, None)
        return output.to(rotation.outer_dtype(()))


# Instead of a number of ids: added to the number of a rank whose ids are refused.
_REFUSED = 2**62


def require_ids(rotation: Rotation, ids: Tensor, size: int, kind: str, where: str) -> int:
    """Require that all ranks have ids in [0, size). Collective on CPUs.

    Args:
        rotation: of the module that reads them.
        ids: integers of this rank.
        size: the number of rows.
        kind: of id, such as "token".
        where: the rows are, such as "the embedding".

    Returns:
        The largest number of ids that a rank of the ring has; on CUDA, this rank's own number.

    Raises:
        IndexError: an id is none of a row; the message names rank and id. On CPUs it is raised on
            every rank of the ring, before any hop; on CUDA on this rank, before the optimizer's
            step.
    """
    ring = rotation.sharded.ring
    if is_fake(ids):
        return ids.numel()
    is_odd = ((ids < 0) | (ids >= size)).any()
    if ids.device.type != "cpu":

        def refuse(_: int) -> NoReturn:
            raise id_error(_odd_id(ids), f"rank {ring.global_rank}: {kind}", where, size)

        ring.checks.require(is_odd, 0, refuse)
        return ids.numel()
    identity = _call_of(rotation)
    longest = ring.largest(_REFUSED + ring.rank if is_odd else ids.numel(), identity)
    if longest < _REFUSED:
        return longest
    source = longest - _REFUSED
    odd = ring.largest(_odd_id(ids) if ring.rank == source else -(2**63), identity)
    rank = dist.get_global_rank(ring.group, source)
    raise id_error(odd, f"rank {rank}: {kind}", where, size)


def _call_of(rotation: Rotation) -> int:
    """The identity of a comparison before the hops of a call."""
    return HopIdentity(rotation.number, True, False, 0, 0).pack()


def id_error(odd: int, kind: str, where: str, size: int) -> IndexError:
    """The refusal of an id, with the words of `require_ids`."""
    return IndexError(f"{kind} {odd} is not in {where}, which has {size} rows")


def _odd_id(ids: Tensor) -> int:
    lowest, highest = map(int, torch.aminmax(ids))
    return lowest if lowest < 0 else highest


def places_in(tokens: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """The tokens' rows in the slice [start, stop), and whether they are in another one."""
    is_elsewhere = (tokens < start) | (tokens >= stop)
    return (tokens - start).masked_fill(is_elsewhere, 0), is_elsewhere


def _embedded(
    module: Any, forward: Callable[..., Tensor], places: Tensor, padding: int | None
) -> Tensor:
    """What the module makes of rows that stand in its weight's place."""
    before = module.padding_idx
    module.padding_idx = padding
    try:
        return forward(places)
    finally:
        module.padding_idx = before


class _Rows(torch.autograd.Function):
    """From a sharded parameter to the rows [T, D] of this rank's tokens.

    See [Note: Rows of an embedding].
    """

    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, rotation: Rotation, tokens_T: Tensor, longest: int
    ) -> Tensor:
        sharded, dtype = rotation.sharded, rotation.travelling_dtype
        ring, (shard_RD,) = sharded.ring, sharded.views(sharded.flat)
        (cut,), width = rotation.layout.cuts, shard_RD.shape[1]
        (start, stop), name = rotation.layout.bounds(cut, ring.rank), path_of(rotation.module)
        rows = Cut(cut.name, (ring.size * longest, width), 0)
        layout = Layout((rows,), ring.size).in_pieces(ring.pool.largest_whole_numel)

        with span(f"{name} forward: fetching rows"):
            ids = _ids_of_all(rotation, tokens_T, longest)

            def own_rows(piece: int) -> Tensor:
                places, is_elsewhere = places_in(
                    ids[slice(*layout.bounds(rows, piece))], start, stop
                )
                if start == stop:
                    return shard_RD.new_zeros((len(places), width), dtype=dtype)
                found = shard_RD.detach().index_select(0, places).to(dtype)
                return found.masked_fill_(is_elsewhere.unsqueeze(-1), 0)

            numbers = ring, layout, dtype, tokens_T.device, rotation.number
            found = GradientRing(*numbers, scale=1).sum(own_rows)
        ctx.rotation, ctx.spec, ctx.version = rotation, spec_of(parameter), sharded.version
        ctx.layout, ctx.ids, ctx.name = layout, ids, name
        return found.view(longest, width)[: len(tokens_T)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None, None]:
        rotation, layout, ids = ctx.rotation, ctx.layout, ctx.ids
        sharded = rotation.sharded
        if sharded.version != ctx.version:
            raise RotationError(
                f"parameters of {rotation.name} changed between forward and backward"
            )
        own, wanted = sharded.flat.dtype, rotation.policy.grad_dtype or sharded.flat.dtype
        if wanted.itemsize < grad_TD.dtype.itemsize:
            grad_TD = grad_TD.to(wanted)
        ring, (rows,) = sharded.ring, layout.cuts
        start, stop = rotation.layout.bounds(rotation.layout.cuts[0], ring.rank)
        total = sharded.flat.new_zeros(sharded.flat.numel(), dtype=torch.promote_types(own, wanted))
        (sum_RD,) = sharded.views(total)
        missing = rows.shape[0] // ring.size - len(grad_TD)
        flat = F.pad(grad_TD, (0, 0, 0, missing)).contiguous().view(-1)
        with span(f"{ctx.name} backward: sending gradients of rows"):
            for piece, part in all_pieces(ring, flat, layout, rotation.number, forward=False):
                here = ids[slice(*layout.bounds(rows, piece))]
                places, is_elsewhere = places_in(here, start, stop)
                if rotation.rule.padding_idx is not None:
                    is_elsewhere |= here == rotation.rule.padding_idx
                if start < stop:
                    (view,) = layout.views(part, piece)
                    grads = view.to(total.dtype).masked_fill(is_elsewhere.unsqueeze(-1), 0)
                    sum_RD.index_add_(0, places, grads, alpha=1 / ring.size)
        (grad,) = sharded.views(total.to(own))
        return grad if ctx.spec is None else with_spec(grad, ctx.spec), None, None, None


def _ids_of_all(rotation: Rotation, tokens_T: Tensor, longest: int) -> Tensor:
    """The tokens of all ranks, one rank's after another's; -1 where a rank has fewer.

    They travel as numbers of the slices' dtype, in the buffers that slices travel in.
    """
    ring, dtype = rotation.sharded.ring, rotation.travelling_dtype
    own = tokens_T.new_full((longest,), -1, dtype=torch.int64)
    own[: len(tokens_T)] = tokens_T
    ids = own.repeat(ring.size, 1)
    numel = ids.nbytes // dtype.itemsize
    layout = Layout((Cut("ids", (numel,), 0),), ring.size)
    for rank, part in all_pieces(ring, own.view(dtype), layout, rotation.number, forward=True):
        if not is_fake(part):  # a dry run knows the tokens of one rank
            ids[rank] = part.view(torch.int64)
    return ids.view(-1)
