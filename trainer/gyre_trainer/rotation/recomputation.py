"""Activations that no graph keeps: the graph node that computed one computes it again in backward.

A norm keeps its input for its own backward. A module that reads the norm's output, and needs it
again in backward, can have it recomputed from that input. The inputs are saved as torch's own
functions save theirs, so `torch.utils.checkpoint` around them drops them as well.

Also here:

* When backward runs the forward of a layer again: before anything of the layer travels.

A checkpoint runs a layer again when backward asks for a tensor that it saved. Which module asks
first depends on the tokens of a rank where experts are listed: one without tokens may ask for none.
So each rotated module of the layer asks for a tensor of the layer before its slices travel in
backward, and all ranks make the same hops in the same order.

Random numbers that a slice drew in forward, drawn again when backward computes it again.

Dropout masks that backward finds again: each rank draws its own, for each slice from a generator
that is seeded for this slice of this call.

A call's key is drawn from torch's CPU generator. So each call has another key, and
`torch.utils.checkpoint` draws the same one again.

Dropout inside of a module that rotates as a whole: which masks its slices draw.

[Note: Dropout in slices]

Let y_j be what slice j computes, so that the module's output is the sum of all y_j. A dropout acts
on one of three kinds of tensors:

* What is computed with the first layers, such as attention's probabilities or an MLP's hidden
  width. Each slice has entries of its own, so each draws a mask of its own.
* What is computed with the last layer. Each slice has a part of every entry there, and mask * (sum
  of y_j) is the sum of mask * y_j, so all slices of one call use one mask.
* What goes into the first layers. It is whole in every slice: one mask, too.

Which one it is shows the order of the forward: a dropout is called before the first use of the
first layers' weights, after that, or after the first use of the last layer's. A use makes a tensor
of the weight, as `F.linear` does, or `x @ weight.T`. An argument of the call is dropped out as what
goes into the first layers, whenever that is. The first call in training compares the order with
what was computed from what.

A mask is that of the call's key (`DropoutMasks`), of the dropout's number in the forward, of the
rank, and of the slice where each has its own. So backward finds it again in whichever order slices
come, and a call takes one number from torch's generator, whether it is computed again or not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from gyre_trainer.comm.ring import Ring
from gyre_trainer.torch_internals import tree_leaves, version_of, without_dispatch


def generators_of(device: torch.device) -> list[torch.Generator]:
    """The generators that a module with parameters on ``device`` draws from; the CPU's is first."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators


def states_of(generators: Sequence[torch.Generator]) -> list[Tensor]:
    """The states of generators, as `set_states` takes them."""
    with without_dispatch():
        return [generator.get_state() for generator in generators]


def set_states(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    """Give generators their states of another moment."""
    with without_dispatch():
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


class Randomness:
    """The states of torch's generators before each slice; backward draws the same numbers again."""

    def __init__(self, device: torch.device) -> None:
        """``device`` is that of the parameters; the CPU's generator is replayed, too."""
        self._generators = generators_of(device)
        self._states: dict[int, list[Tensor]] = {}

    def record(self, index: int) -> None:
        """Note the states: slice ``index`` computes now for the first time."""
        self._states[index] = states_of(self._generators)

    @contextmanager
    def replaying(self, index: int) -> Iterator[None]:
        """A context in which slice ``index`` draws the same random numbers once more."""
        now = states_of(self._generators)
        set_states(self._generators, self._states.pop(index))
        try:
            yield
        finally:
            set_states(self._generators, now)


MASKS_ARGUMENT = "_dropout_masks"  # the keyword argument that takes a call's masks to its slices


def new_key() -> int:
    """The key of one call, drawn from torch's CPU generator."""
    with without_dispatch():  # a fake tensor has no value
        return int(torch.randint(2**62, ()))


@dataclass(frozen=True, slots=True)
class DropoutMasks:
    """The dropout masks of one call.

    Attributes:
        key: the call's key.
        ring: the ring that the batch is spread over.
        first: the index of the first entry along the last dim. It differs between slices of a
            sliced dim.
        positions: numbers the masks of one call.
    """

    key: int
    ring: Ring
    first: int = 0
    positions: Iterator[int] = field(default_factory=count)

    def for_slice(self, first: int) -> "DropoutMasks":
        """The masks of one slice, which begins at ``first`` along the last dim."""
        return replace(self, first=first, positions=count())

    def apply(self, x: Tensor, p: float) -> Tensor:
        """``x`` with each entry set to 0 with probability ``p``, else divided by 1 - p."""
        generator = torch.Generator(x.device).manual_seed(self.next_seed())
        kept = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(
            1 - p, generator=generator
        )
        return torch.where(kept, x, 0).mul_(1 / (1 - p) if p < 1 else 0.0)

    def next_seed(self) -> int:
        """The seed of the next mask."""
        return _seed(self.key, next(self.positions), self.ring.part, self.first)


def _seed(*numbers: int) -> int:
    digest = blake2b(
        b"".join(number.to_bytes(8, "little") for number in numbers), digest_size=8
    ).digest()
    return int.from_bytes(digest, "little", signed=True)


_ATTENTION = F.scaled_dot_product_attention


class Place(Enum):
    """Where a forward drops out: before its first layers, behind them, or behind its last one."""

    BEFORE = auto()
    INSIDE = auto()
    AFTER = auto()


@dataclass(frozen=True, slots=True)
class Dropout:
    """What one call drops out.

    Attributes:
        place: where in the forward.
        shape: of the tensor.
        rate: the probability of each entry to be dropped.
        takes_grad: whether the tensor takes a gradient.
    """

    place: Place
    shape: tuple[int, ...]
    rate: float
    takes_grad: bool


@dataclass(frozen=True, slots=True)
class Undropped:
    """In the place of a call's masks: nothing is dropped, and ``seen`` tells what would be."""

    seen: list[Dropout] = field(default_factory=list)

    def for_slice(self, _first: int) -> "Undropped":
        """The same for a slice."""
        return self

    def apply(self, x: Tensor, _rate: float) -> Tensor:
        """``x`` itself."""
        return x


Masks = DropoutMasks | Undropped


def may_drop_out(module: nn.Module) -> bool:
    """Whether a module is in training, or one inside alone, such as a dropout."""
    return any(each.training for each in module.modules())


def dropout_inside(
    weights: Mapping[str, Tensor], last: Sequence[str], masks: Masks, arguments: Any = ()
) -> AbstractContextManager[object]:
    """A context in which a module's forward drops out by ``masks``.

    Args:
        weights: the tensors in the place of the parameters that are cut, by name.
        last: names of those of the last layer.
        masks: of the slice.
        arguments: of the call, in any form: what of them is dropped out is whole in every slice.
    """
    closing = {id(tensor) for name, tensor in weights.items() if name in last}
    opening = {id(tensor) for tensor in weights.values()} - closing
    given = {id(each) for each in tree_leaves(arguments) if isinstance(each, Tensor)}
    return _DropoutInside(opening, closing, masks, given)


class _DropoutInside(TorchFunctionMode):
    def __init__(self, first: set[int], last: set[int], masks: Masks, given: set[int]) -> None:
        super().__init__()
        self._first, self._last, self._masks, self._given = first, last, masks, given
        self._place = Place.BEFORE

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout or func is torch.dropout:
            return self._drop(func, *args, **kwargs)
        if func is _ATTENTION:
            return self._attend(*args, **kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):  # not a weight's dtype or shape
            self._note(id(each) for each in (*args, *kwargs.values()))
        return result

    def _note(self, ids: Iterator[int]) -> None:
        for each in ids:
            if each in self._last:
                self._place = Place.AFTER
            elif each in self._first and self._place is Place.BEFORE:
                self._place = Place.INSIDE

    def _drop(
        self,
        func: Callable[..., Tensor],
        input: Tensor,  # noqa: A002  # torch's name
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        train: bool | None = None,
    ) -> Tensor:
        rate = p if (training if train is None else train) else 0.0
        if not 0.0 < rate <= 1.0:
            return func(input, p, False)  # torch refuses a wrong probability
        place = Place.BEFORE if id(input) in self._given else self._place
        if isinstance(self._masks, Undropped):
            self._see(place, tuple(input.shape), rate, input.requires_grad)
            return input.mul_(1) if inplace else input  # a trial sees that it is written to
        dropped = self._masks_at(place, self._masks).apply(input, rate)
        return input.copy_(dropped) if inplace else dropped

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **others: Any,
    ) -> Tensor:
        others["is_causal"] = is_causal
        if not dropout_p:
            return _ATTENTION(query, key, value, attn_mask, dropout_p, **others)
        if isinstance(self._masks, Undropped):
            takes_grad = any(each.requires_grad for each in (query, key, value))
            shape = *query.shape[:-1], key.shape[-2]
            self._see(self._place, shape, dropout_p, takes_grad)
            return _ATTENTION(query, key, value, attn_mask, 0.0, **others)
        with _seeded(self._masks_at(self._place, self._masks).next_seed(), query.device):
            return _ATTENTION(query, key, value, attn_mask, dropout_p, **others)

    def _masks_at(self, place: Place, masks: DropoutMasks) -> DropoutMasks:
        """Those of the slice inside, and those of all slices elsewhere; they share a count."""
        return masks if place is Place.INSIDE else replace(masks, first=0)

    def _see(self, place: Place, shape: tuple[int, ...], rate: float, takes_grad: bool) -> None:
        assert isinstance(self._masks, Undropped)
        self._masks.seen.append(Dropout(place, shape, rate, takes_grad))


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """A context in which torch's generators begin at ``seed``; afterwards they are as before."""
    generators = generators_of(device)
    before = states_of(generators)
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        set_states(generators, before)


Compute = Callable[..., Tensor]
_NOTHING = nullcontext()
# Elements of a norm's input of which backward computes the gradient at once: a norm that computes
# in float32 has six tensors of that size then, 16 MiB each. All rows of 16,384 tokens, 3,072 wide,
# took 1.1 GiB, at the peak of a step. Fewer elements cost more launches.
_MAX_NUMEL = 2**22
_NO_GRADS = None, None  # of the arguments of `_Recomputed` before its inputs


def recomputed(compute: Compute, *inputs: Tensor, by_rows: bool = False) -> Tensor:
    """``compute(*inputs)``, of which the graph keeps the inputs alone. See `recomputation_of`.

    Args:
        compute: gives the same bits every time, and one tensor that is no view of an input.
        inputs: every tensor that the result depends on and that takes a gradient.
        by_rows: whether each row of the first input, along its last dim, gives the same row of the
            result. Then backward takes some rows at a time.
    """
    output: Tensor = _Recomputed.apply(compute, by_rows, *inputs)  # type: ignore[no-untyped-call]
    if output.grad_fn is not None:
        output.grad_fn.version = version_of(output)  # type: ignore[attr-defined]  # the node is the context of `_Recomputed`
    return output


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Compute, by_rows: bool, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.compute, ctx.by_rows, ctx.inputs = compute, by_rows, None
        ctx.autocast = autocast_of_now(inputs[0].device)
        return compute(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        inputs = _inputs(ctx)
        ctx.inputs = None
        chunks = _chunks_of(inputs[0], grad_output) if ctx.by_rows else []
        if len(chunks) > 1:
            return *_NO_GRADS, *_grads_by_rows(ctx, inputs, grad_output, chunks)
        return *_NO_GRADS, *_grads(ctx, inputs, grad_output)


def _grads_by_rows(
    ctx: Any, inputs: Sequence[Tensor], grad_output: Tensor, chunks: Sequence[slice]
) -> list[Tensor | None]:
    """The same as `_grads`, some rows of the first input at a time."""
    first, *others = inputs
    grad_first = torch.empty_like(first) if ctx.needs_input_grad[len(_NO_GRADS)] else None
    wide = [torch.promote_types(each.dtype, torch.float32) for each in others]
    sums: list[Tensor | None] = [None] * len(others)
    for rows in chunks:
        of_rows = _rows_of(first, rows), *others
        grad_of_rows, *found = _grads(ctx, of_rows, _rows_of(grad_output, rows))
        if grad_first is not None and grad_of_rows is not None:
            _rows_of(grad_first, rows).copy_(grad_of_rows)
        for place, grad in enumerate(found):
            if grad is not None:
                before = sums[place]
                grad = grad.to(wide[place])  # noqa: PLW2901
                sums[place] = grad if before is None else before + grad
    return [
        grad_first,
        *(
            None if total is None else total.to(each.dtype)
            for total, each in zip(sums, others, strict=True)
        ),
    ]


def _grads(ctx: Any, inputs: Sequence[Tensor], grad_output: Tensor) -> list[Tensor | None]:
    """The gradients of the inputs that take one."""
    leaves = [
        x.detach().requires_grad_(needed)
        for x, needed in zip(inputs, ctx.needs_input_grad[len(_NO_GRADS) :], strict=True)
    ]
    with torch.enable_grad(), ctx.autocast():
        edge = get_gradient_edge(ctx.compute(*leaves))  # releases the output itself
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    grads = iter(torch.autograd.grad(edge, wanted, grad_output, allow_unused=True))
    return [next(grads) if leaf.requires_grad else None for leaf in leaves]


def _chunks_of(first: Tensor, grad_output: Tensor) -> list[slice]:
    """Ranges of rows; none where rows cannot be taken as views."""
    if first.ndim < 2 or not (first.is_contiguous() and grad_output.is_contiguous()):
        return []
    num_rows = first.numel() // max(1, first.shape[-1])
    size = max(1, _MAX_NUMEL // max(1, first.shape[-1]))
    return [slice(start, start + size) for start in range(0, num_rows, size)]


def _rows_of(tensor: Tensor, rows: slice) -> Tensor:
    """Some rows, with as many dims as the tensor has."""
    flat = tensor.view(-1, tensor.shape[-1])[rows]
    return flat.view(*[1] * (tensor.ndim - 2), *flat.shape)


def _inputs(node: Any) -> Sequence[Tensor]:
    """The inputs of a `_Recomputed` node.

    They are unpacked once for all readers in one backward, because a checkpoint gives them out
    once.
    """
    if node.inputs is None:
        node.inputs = node.saved_tensors
    inputs: Sequence[Tensor] = node.inputs
    return inputs


@dataclass(frozen=True, slots=True)
class Recomputation:
    """How to compute a tensor again in the backward of a module that reads it.

    Attributes:
        node: the graph node that computed the tensor, or the tensor's base if it is a view.
        view: size, stride and offset of the view, and the stride of its base; None for no view.
    """

    node: Any
    view: tuple[Sequence[int], Sequence[int], int, Sequence[int]] | None = None

    @torch.no_grad()
    def compute_again(self, cache: dict[Any, Tensor]) -> Tensor:
        """The tensor, detached from the graph.

        ``cache`` has the results of nodes for other readers that ask at the same time.
        """
        if self.node not in cache:
            cache[self.node] = self.compute_whole()
        return self._viewed(cache[self.node].detach())

    @torch.no_grad()
    def compute_whole(self) -> Tensor:
        """The tensor, or the base that it is a view of."""
        with self.node.autocast():
            whole: Tensor = self.node.compute(*_inputs(self.node))
        return whole

    def _viewed(self, whole: Tensor) -> Tensor:
        if self.view is None:
            return whole
        size, stride, offset, whole_stride = self.view
        assert whole.stride() == whole_stride
        return whole.as_strided(size, stride, offset)


def recomputation_of(tensor: Tensor) -> Recomputation | None:
    """How to compute ``tensor`` again; None if `recomputed` did not make it, or if it changed.

    A view of such a result has a recomputation too.
    """
    whole = tensor if tensor._base is None else tensor._base
    node: Any = whole.grad_fn
    if (
        not isinstance(node, _Recomputed._backward_cls)
        or node.version != version_of(whole)  # type: ignore[attr-defined]
        or tensor.dtype != whole.dtype
    ):
        return None
    if whole is tensor:
        return Recomputation(node)
    return Recomputation(
        node, (tensor.size(), tensor.stride(), int(tensor.storage_offset()), whole.stride())
    )


def recomputable(tensor: Tensor) -> tuple[Tensor, Recomputation | None]:
    """The same tensor, and how backward gets it again without its reader keeping it.

    Where no node can compute it again, a node before the reader keeps it. The second item is None
    for a tensor that takes no gradient, since such a node would not be in the graph.
    """
    recomputation = recomputation_of(tensor)
    if recomputation is not None or not tensor.requires_grad:
        return tensor, recomputation
    same = recomputed(_same, tensor)
    return same, Recomputation(same.grad_fn)


def autocast_of_now(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """A function that makes contexts with autocast as it is now, but without its weight cache.

    The cached weights would belong to a remote slice.
    """
    kind = device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    autocast = partial(torch.autocast, kind, dtype, enabled, cache_enabled=False)
    if enabled:
        return autocast
    return lambda: autocast() if torch.is_autocast_enabled(kind) else _NOTHING


def _same(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


class Replay:
    """One call of a layer that backward runs again.

    Attributes:
        began: whether forward was run once.
        ran_again: whether backward has run it again.
    """

    def __init__(self) -> None:
        self.began = self.ran_again = False
        self._node: Any = None  # in forward alone: what the checkpoint keeps holds this object

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which the layer computes, for the first time or again."""
        node = _Saved.apply(torch.empty(0, requires_grad=True)).grad_fn  # type: ignore[no-untyped-call]
        if self.began:
            self.ran_again = True
            with _as_current(None):
                yield
            return
        self.began, self._node = True, node
        try:
            with _as_current(self):
                yield
        finally:
            self._node = None

    def before_hops(self) -> Callable[[], None]:
        """A function that runs the layer again now, if backward has not yet."""
        node = self._node

        def replay() -> None:
            if not self.ran_again:
                _ = node.saved_tensors

        return replay


class _Saved(torch.autograd.Function):
    """A node that saves a tensor, which a checkpoint around it must compute again."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(anchor)
        return anchor.clone()


_CURRENT: ContextVar[Replay | None] = ContextVar("replay", default=None)


@contextmanager
def _as_current(replay: Replay | None) -> Iterator[None]:
    token = _CURRENT.set(replay)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def replay_of_layer() -> Replay | None:
    """Of the layer that computes now for the first time, if backward will run it again."""
    return _CURRENT.get()


@contextmanager
def outside_of_layers() -> Iterator[None]:
    """A context for calls that are none of a layer's own, such as those that check a rule."""
    with _as_current(None):
        yield
