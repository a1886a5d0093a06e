# ruff: noqa: N803  # names carry shape letters
# ruff: noqa: N803, N806  # names carry shape letters
"""Self-attention by groups of heads: a slice attends with its own heads, and the outputs add up.

Dims: B batch, T time, D model, H heads, K key/value heads, C channels of one head.

Which heads each slice of an attention has where slices cannot have equal parts of all heads.

The ranks may be able to share the query heads evenly, but not the key/value heads: 8 query heads
and 2 key/value heads on 4 ranks. Then a slice has its query heads and the key/value heads that
serve these, and several slices have the same key/value head. Or they can share neither: of 25 heads
on 4 ranks, a slice has 7 or 6.

Gyre's own attention rotates layer by layer where the ranks cannot share the key/value heads evenly,
and each rank attends with all heads.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gyre_trainer.errors import RotationError
from gyre_trainer.layers.linear import (
    LinearRule,
    changed_counts,
    count_of,
    features_of,
    is_table,
    layer_of,
    projections,
    require_changeable,
    require_counts,
)
from gyre_trainer.layers.mlp import refuse_dropout
from gyre_trainer.rotation.output_reduction import (
    ConcatenatedOutputs,
    EqualParts,
    OutputReduction,
    SumOfOutputs,
)
from gyre_trainer.rotation.recomputation import MASKS_ARGUMENT
from gyre_trainer.rotation.rotated_module import (
    RotationTarget,
    wrap,
)
from gyre_trainer.rotation.rule import ArgumentCut, ModuleSlice, Rule
from gyre_trainer.shards.layout import Cut, Layout

Ranges = tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True, slots=True)
class SharedHeads:
    """The heads of each slice.

    The first slices have a query head more where the slices cannot have equally many. Each
    key/value head of a slice serves equally many of its query heads, which follow one another. So a
    slice whose query heads lie unevenly on two key/value heads has one of these more than once.

    Attributes:
        num_kv_heads: key/value heads of the module.
        group: query heads of the module that each of them serves.
        num_slices: at most the number of query heads.
        kv_width: features of all keys, and of all values.
    """

    num_kv_heads: int
    group: int
    num_slices: int
    kv_width: int

    @property
    def num_heads(self) -> int:
        """Query heads of the module."""
        return self.num_kv_heads * self.group

    @property
    def head_width(self) -> int:
        """Features of one head."""
        return self.kv_width // self.num_kv_heads

    @property
    def is_even(self) -> bool:
        """Whether all slices have equally many query heads."""
        return self.num_heads % self.num_slices == 0

    @property
    def is_cut(self) -> bool:
        """Whether each slice has a head, and none is larger than the first one."""
        sizes = [
            len(range(*self.heads(index))) + self.num_kv_heads_of(index)
            for index in range(min(self.num_slices, self.num_heads))
        ]
        return len(sizes) == self.num_slices and sizes[0] == max(sizes)

    def heads(self, index: int) -> tuple[int, int]:
        """The half-open range of the query heads of slice ``index``."""
        few, more = divmod(self.num_heads, self.num_slices)
        start = index * few + min(index, more)
        return start, start + few + (index < more)

    def slice_at(self, start: int) -> int:
        """The slice whose queries begin at a feature."""
        return [self.heads(index)[0] for index in range(self.num_slices)].index(
            start // self.head_width
        )

    def group_of(self, index: int) -> int:
        """Query heads of a slice that each of its key/value heads serves."""
        start, stop = self.heads(index)
        return gcd(stop - start, start, self.group)

    def num_kv_heads_of(self, index: int) -> int:
        """Key/value heads of a slice, each counted as often as the slice has it."""
        start, stop = self.heads(index)
        return (stop - start) // self.group_of(index)

    def kv_heads(self, index: int) -> tuple[int, ...]:
        """The module's key/value heads that slice ``index`` has, in their order."""
        return tuple(head // self.group for head in range(*self.heads(index), self.group_of(index)))

    def of_queries(self) -> Ranges:
        """For each slice, the half-open range of the features of its queries."""
        return self._of_slices(self._queries)

    def of_keys(self) -> Ranges:
        """For each slice, half-open ranges of the features of its keys, or of its values."""
        return self._of_slices(self._keys)

    def of_all(self) -> Ranges:
        """The same of one layer with all queries, keys and values, in this order."""
        queries = self.kv_width * self.group
        return self._of_slices(
            lambda index: (
                *self._queries(index),
                *self._keys(index, queries),
                *self._keys(index, queries + self.kv_width),
            )
        )

    def _of_slices(self, ranges: Callable[[int], Iterable[tuple[int, int]]]) -> Ranges:
        return tuple(tuple(ranges(index)) for index in range(self.num_slices))

    def _queries(self, index: int) -> Iterator[tuple[int, int]]:
        start, stop = self.heads(index)
        yield start * self.head_width, stop * self.head_width

    def _keys(self, index: int, offset: int = 0) -> Iterator[tuple[int, int]]:
        for head in self.kv_heads(index):
            yield offset + head * self.head_width, offset + (head + 1) * self.head_width


_HEADS = -3  # the dim of heads in what is added to scores of queries and keys


@dataclass(frozen=True, slots=True)
class Heads:
    """How a model's width is divided among heads.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key/value heads; each serves num_heads / num_kv_heads query heads.
    """

    num_heads: int
    num_kv_heads: int


def rope_table(num_positions: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Rotary position embeddings (arXiv 2104.09864): cosines in the first half, then sines.

    The table is made once for all layers and slices, whose graphs keep it for backward.

    Returns:
        A float32 tensor of shape (T, C).
    """
    frequencies = theta ** -(
        torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    )
    angles = torch.outer(
        torch.arange(num_positions, dtype=torch.float32, device=device), frequencies
    )
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _apply_rope(x_BHTC: Tensor, rope_TC: Tensor) -> Tensor:
    """``x_BHTC`` with each pair of channels (i, i + C/2) rotated by its position's angle.

    The computation is in the table's precision or better.
    """
    cos, sin = rope_TC.chunk(2, dim=-1)
    one, other = x_BHTC.chunk(2, dim=-1)
    return torch.cat((one * cos - other * sin, one * sin + other * cos), dim=-1).type_as(x_BHTC)


class Attention(nn.Module):
    """Self-attention with rotary positions and grouped key/value heads.

    The forward reads the number of heads from the weights, so it runs with all heads or with a
    slice.
    """

    def __init__(self, dim: int, heads: Heads, *, bias: bool = False, causal: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = dim // heads.num_heads
        self.causal = causal
        kv_dim = heads.num_kv_heads * self.head_dim
        self.q = nn.Linear(dim, dim, bias=bias)
        self.k = nn.Linear(dim, kv_dim, bias=bias)
        self.v = nn.Linear(dim, kv_dim, bias=bias)
        self.o = nn.Linear(dim, dim, bias=bias)

    def forward(
        self,
        x_BTD: Tensor,
        rope_TC: Tensor | None = None,
        padding_BT: Tensor | None = None,
        allowed_B1TT: Tensor | None = None,
    ) -> Tensor:
        """The output: each position attends to itself and those before; to all if not causal.

        Args:
            x_BTD: the input.
            rope_TC: the table of `rope_table` for T positions; None for no rotary positions.
            padding_BT: true at positions that no other may attend to; None for none.
            allowed_B1TT: true where a position attends to another, in place of all that.
        """
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for y in (self.q(x_BTD), self.k(x_BTD), self.v(x_BTD))
        )
        if rope_TC is not None:
            q, k = _apply_rope(q, rope_TC), _apply_rope(k, rope_TC)
        mask = allowed_B1TT
        if mask is None and padding_BT is not None:
            mask = self._mask(padding_BT)
        causal, grouped = self.causal and mask is None, q.shape[1] != k.shape[1]
        y_BHTC = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped
        )
        output: Tensor = self.o(y_BHTC.transpose(1, 2).flatten(2))
        return output

    def _mask(self, padding_BT: Tensor) -> Tensor:
        """Which position attends to which, as (B, 1, T, T) or a shape that broadcasts to it.

        Padding before the beginning of a text attends to itself.
        """
        allowed = ~padding_BT[:, None, None, :]
        if not self.causal:
            return allowed
        num_positions = padding_BT.shape[1]
        own = torch.eye(num_positions, dtype=torch.bool, device=padding_BT.device)
        return allowed.expand(-1, -1, num_positions, -1).tril() | own


@dataclass(frozen=True)
class AttentionRule(Rule):
    """For a module that projects to queries, keys and values, attends, and projects back.

    A slice holds some key/value heads, and the query heads that they serve, of all four layers.
    Where the ranks cannot share the key/value heads evenly, a slice holds some query heads, and the
    key/value heads that serve them, which other slices may hold, too; the first slices may hold a
    query head more than the others. The forward must read the numbers of heads from the weights
    (`view(..., -1, head_dim)`), or from ``counts``, ``kv_counts`` and ``groups``, and be linear in
    the last layer's weights. Other outputs have the query heads in dim 1, as attention weights do,
    or are arguments that it returns as they are.

    Numbers that the forward reads are named as attributes of the module, such as "num_heads", or of
    its config, such as "config.num_attention_heads".

    Attributes:
        num_kv_heads: key/value heads of the whole module.
        inputs: names of the linear layers from the input to the heads; one layer may make queries,
            keys and values, if the rows of each key/value head are together, or if it is packed.
            More than three are as wide as the queries, such as those for keys of positions.
        output: name of the linear layer from the heads to the output.
        packed: whether one layer makes all queries, then all keys, then all values.
        counts: numbers that the forward reads and of which a slice has as much as of query heads.
        kv_counts: numbers that it reads and of which a slice has as much as of key/value heads.
        groups: numbers that it reads and that say how many query heads a key/value head serves.
        by_heads: names of the forward's parameters that may have a tensor of all query heads in dim
            -3, such as a bias of positions: a slice is given that of its own heads.
        batched: those of them of which a tensor with three dims has the batch in dim -3, and is the
            same for all heads.
        tables: names of embeddings inside, or of parameters with two dims, that have a column for
            each query head, from which the forward makes such a bias.
        drops_out: whether the forward may drop out, by modules or functions: its input before all
            layers, what belongs to query heads, and the output. Slices of one call drop the same
            entries of input and output.
    """

    caches_heads: ClassVar[bool] = True

    num_kv_heads: int
    inputs: tuple[str, ...] = ("q", "k", "v")
    output: str = "o"
    packed: bool = False
    counts: tuple[str, ...] = ()
    kv_counts: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    by_heads: tuple[str, ...] = ()
    batched: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    drops_out: bool = False

    @property
    def cut_arguments(self) -> tuple[str, ...]:
        """The arguments by heads."""
        return self.by_heads

    def argument_cut(self, name: str, shape: Sequence[int], layout: Layout) -> ArgumentCut | None:
        """By query heads; None where the tensor is the same for all heads."""
        of_batch = name in self.batched and len(shape) == -_HEADS
        if len(shape) < -_HEADS or shape[_HEADS] == 1 or of_batch:
            return None
        num_heads = self.num_heads(layout.cuts)
        if shape[_HEADS] != num_heads:
            raise RotationError(
                f"an attention of {num_heads} heads is called with {name} of shape {tuple(shape)}; "
                f"to share it among slices, its dim {_HEADS} must be {num_heads} or 1"
            )
        return ArgumentCut(_HEADS, self._heads_of_slices(layout))

    @property
    def linear_in(self) -> tuple[str, ...]:
        """Weight and bias of the last layer."""
        return f"{self.output}.weight", f"{self.output}.bias"

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """Rows of the input layers, columns of the output layer, and a segment of its bias."""
        self.require_known_dropout(module)
        if num_slices > 1:
            require_changeable(module, (*self.counts, *self.kv_counts, *self.groups))
        sections = self._sections(module) if self.packed else ()
        cuts = projections(module, self.inputs, self.output, sections)
        cuts += [self._cut_of_table(module, name, self.num_heads(cuts)) for name in self.tables]
        if self.num_kv_heads % num_slices == 0:
            require_counts(module, (*self.counts, *self.kv_counts), num_slices)
            return cuts
        heads = self.shared_heads(cuts, num_slices)
        if heads is None or not heads.is_cut:
            queries = "" if heads is None else f" and {heads.num_heads} query heads"
            names = ", ".join((*self.inputs, self.output))
            raise RotationError(
                f"{type(module).__name__} has {self.num_kv_heads} key/value heads{queries}, "
                f"which {num_slices} ranks cannot share. Use a number that divides them, "
                f"or rotate its layers {names} one by one instead."
            )
        require_counts(module, self.counts, heads.num_heads)
        require_counts(module, self.kv_counts, self.num_kv_heads)
        for name in self.groups:
            if count_of(module, name) != heads.group:
                raise RotationError(
                    f"{type(module).__name__}.{name} is {count_of(module, name)}, but each of its "
                    f"{self.num_kv_heads} key/value heads serves {heads.group} query heads"
                )
        found = [self._by_heads(cut, heads) for cut in cuts]
        sizes = Layout(tuple(found), num_slices)
        if max(map(sizes.numel, range(num_slices))) > sizes.numel(0):
            raise RotationError(
                f"{type(module).__name__} has heads of which slice 0 would not have the most "
                f"elements on {num_slices} ranks. Use a number of ranks that divides its "
                f"{self.num_kv_heads} key/value heads or {heads.num_heads} query heads."
            )
        return found

    def require_known_dropout(self, module: nn.Module) -> None:
        """Refuse any dropout without ``drops_out``."""
        refuse_dropout(module, allows_plain=self.drops_out)

    def _sections(self, module: nn.Module) -> tuple[int, ...]:
        """The features of queries, keys and values in the one layer that makes them."""
        (name,) = self.inputs
        _, size = features_of(layer_of(module, name))
        queries, _ = features_of(layer_of(module, self.output))
        keys, rest = divmod(size - queries, 2)
        if rest or keys <= 0 or keys % self.num_kv_heads or queries % self.num_kv_heads:
            raise RotationError(
                f"{type(module).__name__}.{name} has {size} output features, which are not "
                f"{queries} of queries and those of keys and values of {self.num_kv_heads} heads"
            )
        return queries, keys, keys

    def _cut_of_table(self, module: nn.Module, name: str, num_heads: int) -> Cut:
        """Columns of an embedding, or of a parameter, that has one for each query head."""
        own = dict(module.named_parameters()).get(name)
        if own is not None and own.ndim == 2 and own.shape[1] == num_heads:
            return Cut(name, tuple(own.shape), 1)
        table = module.get_submodule(name) if own is None else own
        if isinstance(table, nn.Module) and is_table(table) and table.embedding_dim == num_heads:
            return Cut(f"{name}.weight", tuple(table.weight.shape), 1)
        raise RotationError(
            f"{type(module).__name__}.{name} is {table}, but the rule needs an Embedding, or a "
            f"parameter with two dims, of {num_heads} columns there, one for each query head, "
            "without other arguments"
        )

    def num_heads(self, cuts: Sequence[Cut]) -> int:
        """The query heads of the whole module; 0 where the widths of the layers do not say it."""
        queries, keys = self._widths(cuts)
        return self.num_kv_heads * queries // keys if keys > 0 else 0

    def _widths(self, cuts: Sequence[Cut]) -> tuple[int, int]:
        """Features of all queries, and of all keys."""
        widths = {cut.name: cut.shape[cut.dim] for cut in cuts}
        queries = widths[f"{self.output}.weight"]
        inputs = [widths[f"{name}.weight"] for name in self.inputs]
        return queries, (inputs[0] - queries) // 2 if len(inputs) == 1 else min(inputs)

    def shared_heads(self, cuts: Sequence[Cut], num_slices: int) -> SharedHeads | None:
        """The heads of each slice where slices have no equal parts of the key/value heads.

        None where they have, and where the widths of the layers do not say how many heads there
        are.
        """
        if self.num_kv_heads % num_slices == 0:
            return None
        widths = {cut.name: cut.shape[cut.dim] for cut in cuts}
        queries = widths[f"{self.output}.weight"]
        inputs = sorted(widths[f"{name}.weight"] for name in self.inputs)
        keys = (inputs[0] - queries) // 2 if self.packed else inputs[0]
        expected = [queries + 2 * keys] if self.packed else [keys, keys, queries]
        if len(inputs) > 3:
            expected = [queries] * len(inputs)
        if inputs != expected or keys % self.num_kv_heads or queries % keys:
            return None
        return SharedHeads(self.num_kv_heads, queries // keys, num_slices, keys)

    def _by_heads(self, cut: Cut, heads: SharedHeads) -> Cut:
        """A cut where slices have no equal parts of all heads."""
        layer, width = cut.name.rpartition(".")[0], cut.shape[cut.dim]
        if {layer, cut.name} & {*self.tables}:
            columns = tuple((heads.heads(index),) for index in range(heads.num_slices))
            return cut if heads.is_even else replace(cut, of_slices=columns)
        if layer == self.output or width == heads.kv_width * heads.group:  # that of the queries
            return (
                cut if cut.padded or heads.is_even else replace(cut, of_slices=heads.of_queries())
            )
        ranges = heads.of_all() if self.packed else heads.of_keys()
        return replace(cut, sections=(), of_slices=ranges)

    def run(self, current: ModuleSlice, /, *args: Any, **kwargs: Any) -> Any:
        """The slice's contribution; the module reads the slice's numbers of heads meanwhile."""
        masks = kwargs.pop(MASKS_ARGUMENT, None)
        first, _ = current.bounds[f"{self.output}.weight"]
        with (
            changed_counts(current.module, self._counts_of_slice(current)),
            self.dropping(current, masks and masks.for_slice(first), (args, kwargs)),
        ):
            return current.forward(*args, **kwargs)

    def _counts_of_slice(self, current: ModuleSlice) -> dict[str, int]:
        """The numbers that the module reads where a slice has others than it."""
        reader, num_slices = current.module, current.num_slices
        named = {name: count_of(reader, name) or 0 for name in (*self.counts, *self.kv_counts)}
        if num_slices == 1 or not (named or self.groups):
            return {}
        heads = self.shared_heads(current.cuts, num_slices)
        if heads is None:
            return {name: value // num_slices for name, value in named.items()}
        index = heads.slice_at(current.bounds[f"{self.output}.weight"][0])
        own, kv_heads = len(range(*heads.heads(index))), heads.num_kv_heads_of(index)
        return (
            {name: named[name] * own // heads.num_heads for name in self.counts}
            | {name: named[name] * kv_heads // self.num_kv_heads for name in self.kv_counts}
            | dict.fromkeys(self.groups, heads.group_of(index))
        )

    def cached_heads(self, layout: Layout) -> Sequence[Sequence[int]]:
        """A slice's own part of all heads, or the key/value heads that serve its query heads."""
        heads = self.shared_heads(layout.cuts, layout.num_slices)
        if heads is None:
            return super().cached_heads(layout)
        return [heads.kv_heads(index) for index in range(layout.num_slices)]

    def output_reduction(
        self, position: int, layout: Layout, dtype: torch.dtype
    ) -> OutputReduction:
        """The first output adds up; heads lie side by side."""
        if position == 0:
            return SumOfOutputs(dtype)
        heads = self.shared_heads(layout.cuts, layout.num_slices)
        if heads is None or heads.is_even:
            return EqualParts(1, layout.num_slices, dtype)
        return ConcatenatedOutputs(1, self._heads_of_slices(layout), self.output, dtype)

    def _heads_of_slices(self, layout: Layout) -> list[tuple[int, int]]:
        """For each slice, the half-open range of its query heads."""
        heads = self.shared_heads(layout.cuts, layout.num_slices)
        if heads is not None:
            return [heads.heads(index) for index in range(layout.num_slices)]
        own = self.num_heads(layout.cuts) // layout.num_slices
        return [(index * own, (index + 1) * own) for index in range(layout.num_slices)]


def rotate_attention(module: Attention, target: RotationTarget) -> None:
    """Rotate by key/value heads where the ranks can share them evenly, else layer by layer."""
    if module.heads.num_kv_heads % target.num_slices == 0:
        wrap(module, AttentionRule(module.heads.num_kv_heads), target)
        return
    for layer in (module.q, module.k, module.v, module.o):
        wrap(layer, LinearRule(), target)
