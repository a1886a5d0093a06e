"""Activations that no graph keeps: the graph node that computed one computes it again in backward.

A norm keeps its input for its own backward. A module that reads the norm's output, and needs it
again in backward, can have it recomputed from that input. The inputs are saved as torch's own
functions save theirs, so `torch.utils.checkpoint` around them drops them as well.

What experts of a list return, where it is only multiplied by weights and added up.

[Note: Weighted outputs]

A mixture of experts multiplies what an expert returned by a weight for each token. For the weight's
gradient, which is the dot product of a token's output and of its gradient, autograd would keep that
output: as many rows as tokens chose the expert. But the output is a sum over slices, or its slices
lie side by side, and so the dot product is a sum over slices, too. With recomputation backward
computes each slice's output again, and takes its part of the dot product there. So no graph keeps
the output, and nothing more is sent.

The product is found in the module's forward, while it runs: `Weighing` knows the last output of
an expert. An output that was used in another way before is as ever. One that is used again after
the product is refused in backward.

When backward runs the forward of a layer again: before anything of the layer travels.

A checkpoint runs a layer again when backward asks for a tensor that it saved. Which module asks
first depends on the tokens of a rank where experts are listed: one without tokens may ask for none.
So each rotated module of the layer asks for a tensor of the layer before its slices travel in
backward, and all ranks make the same hops in the same order.

Finds out whether a module's own forward calls torch's checkpoint, or saves tensors like it.

What a checkpoint computes again in backward, it computes outside of what a slice is computed in:
without the slice's weights, its numbers of heads and its masks. So such a module does not rotate as
a whole; its layers rotate one by one, and a checkpoint around these is exact.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, Self
from weakref import ref

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from gyre_trainer.errors import RotationError

Compute = Callable[..., Tensor]
_NOTHING = nullcontext()
# Elements of a norm's input of which backward computes the gradient at once: a norm that computes
# in float32 has six tensors of that size then, 16 MiB each. All rows of 16,384 tokens, 3,072 wide,
# took 1.1 GiB, at the peak of a step. Fewer elements cost more launches.
_MAX_NUMEL = 2**22
_NO_GRADS = None, None, None  # of the arguments of `_Recomputed` before its inputs


class SharedInput:
    """A tensor that several nodes read, such as the tokens of which each expert gets some rows.

    Where a node can compute it again, the readers do not keep it. Backward computes it once for all
    of them, and holds it until the last one is done.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._again = recomputation_of(tensor)
        self._num_readers = 0
        self._value: Tensor | None = None

    def kept(self, tensor: Tensor) -> list[Tensor]:
        """The part of ``tensor`` that a new reader keeps, which is the one of the constructor."""
        self._num_readers += 1
        return [tensor] if self._again is None else []

    def restored(self, saved: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The inputs of a reader, given the tensors that it saved."""
        if self._again is None:
            return tuple(saved)
        if self._value is None:
            self._value = self._again.compute_again({})
        return self._value, *saved

    def done(self) -> None:
        """One of the readers needs it no longer."""
        self._num_readers -= 1
        if not self._num_readers:
            self._value = None


def recomputed(
    compute: Compute, *inputs: Tensor, by_rows: bool = False, shared: SharedInput | None = None
) -> Tensor:
    """``compute(*inputs)``, of which the graph keeps the inputs alone. See `recomputation_of`.

    Args:
        compute: gives the same bits every time, and one tensor that is no view of an input.
        inputs: every tensor that the result depends on and that takes a gradient.
        by_rows: whether each row of the first input, along its last dim, gives the same row of the
            result. Then backward takes some rows at a time.
        shared: the first input, where other nodes read it, too.
    """
    output: Tensor = _Recomputed.apply(compute, by_rows, shared, *inputs)  # type: ignore[no-untyped-call]
    if output.grad_fn is not None:
        output.grad_fn.version = output._version  # type: ignore[attr-defined]  # the node is the context of `_Recomputed`
    return output


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, compute: Compute, by_rows: bool, shared: SharedInput | None, *inputs: Tensor
    ) -> Tensor:
        kept = inputs if shared is None else (*shared.kept(inputs[0]), *inputs[1:])
        ctx.save_for_backward(*kept)
        ctx.compute, ctx.by_rows, ctx.shared, ctx.inputs = compute, by_rows, shared, None
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
        grads = _grads(ctx, inputs, grad_output)
        if ctx.shared is not None:
            ctx.shared.done()
        return *_NO_GRADS, *grads


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
        saved = node.saved_tensors
        node.inputs = saved if node.shared is None else node.shared.restored(saved)
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

    def stand_in(self, cache: dict[Any, Tensor]) -> Tensor:
        """The tensor in a graph that saves nothing, where `recomputation_of` finds it, too.

        ``cache`` is as above, but not the same one.
        """
        if self.node not in cache:
            # The node must not hold its own output, or both would stay for good.
            whole = [self.compute_whole()]
            anchor = whole[0].new_empty(0).requires_grad_()
            with saved_tensors_hooks(Tensor.detach, Tensor.detach):
                cache[self.node] = recomputed(lambda _: whole.pop(), anchor)
        return self._viewed(cache[self.node])

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
        or node.version != whole._version  # type: ignore[attr-defined]
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


class GradOfWeight:
    """The gradient of the weights of a call's output; all slices add to it.

    Attributes:
        grad: that of the weighted output.
        total: None before the first slice.
    """

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad
        self.total: Tensor | None = None

    def add(self, grad: Tensor, output: Tensor) -> None:
        """Add the dot products of a slice's output and its part of ``grad``, along the last dim."""
        wide = torch.promote_types(output.dtype, torch.float32)
        part = (grad * output).sum(-1, keepdim=True, dtype=wide)
        self.total = part if self.total is None else self.total.add_(part)


class _Pass(Protocol):
    """A ring pass that computes slices again in backward."""

    is_weighted: bool

    def backward(
        self, grad_outputs: Sequence[Tensor | None], of_weight: GradOfWeight | None = None
    ) -> list[Tensor | None]:
        """The gradients of its inputs."""
        ...


@dataclass(frozen=True, slots=True)
class _Output:
    """An expert's output that may be weighted.

    Attributes:
        tensor: the output.
        version: of the tensor, and ``node`` where it came from, when it was returned. An operation
            in place changes one of them.
        ring_pass: what computed it; None where it stands for one that is not computed again.
        inputs: of the ring pass.
    """

    tensor: Tensor
    version: int
    node: Any
    ring_pass: _Pass | None
    inputs: Sequence[Tensor]

    @property
    def is_changed(self) -> bool:
        """Whether the tensor was written to."""
        return self.tensor._version != self.version or self.tensor.grad_fn is not self.node


@dataclass
class Weighing:
    """The experts' outputs in one forward of the module that has them.

    Attributes:
        owners: the rotations of the experts.
    """

    owners: Collection[object]
    _last: _Output | None = None
    _weighted: list["ref[Tensor]"] = field(default_factory=list)

    def note(
        self, outputs: Sequence[Tensor], ring_pass: _Pass | None, inputs: Sequence[Tensor]
    ) -> None:
        """An expert has returned ``outputs``."""
        self._last = None
        if len(outputs) == 1:
            (output,) = outputs
            self._last = _Output(output, output._version, output.grad_fn, ring_pass, inputs)

    def used(self, values: Iterable[Any]) -> None:
        """A function other than a product takes ``values``."""
        last = self._last
        if last is not None and any(each is last.tensor for each in values):
            self._last = None

    def require_not_weighted(self, tensor: Tensor) -> None:
        """Refuse to watch the gradient of an output that was weighted: it has none.

        Raises:
            RotationError: ``tensor`` is such an output.
        """
        if any(weighted() is tensor for weighted in self._weighted):
            raise RotationError(
                "a hook is registered for the gradient of what an expert returned, or retain_grad, "
                "after it was multiplied by weights. Do it before, or take "
                'RotationPolicy(recompute="none").'
            )

    def weighted(self, one: Any, other: Any) -> Tensor | None:
        """The product of the last output and its weights; None where they are something else."""
        last = self._last
        if last is None or not isinstance(one, Tensor) or not isinstance(other, Tensor):
            return None
        if one is not last.tensor and other is not last.tensor:
            return None
        weight = other if one is last.tensor else one
        self._last = None
        if last.is_changed or not _are_weights(weight, last.tensor):
            return None
        self._weighted.append(ref(last.tensor))
        weight, again = recomputable(weight)
        with DisableTorchFunction():  # it is not the layer that reads the output
            result: Tensor = _Weighted.apply(  # type: ignore[no-untyped-call]
                last.ring_pass, again, last.tensor.detach(), weight, *last.inputs
            )
        return result


def _are_weights(weight: Tensor, output: Tensor) -> bool:
    """Whether there is one number for each row of the output."""
    return (
        weight.is_floating_point()
        and weight.device == output.device
        and weight.shape == (*output.shape[:-1], 1)
    )


class _Weighted(torch.autograd.Function):
    """The product of a rotated module's output and weights; see the note above."""

    @staticmethod
    def forward(
        ctx: Any,
        ring_pass: _Pass | None,
        again: Recomputation | None,
        output: Tensor,
        weight: Tensor,
        *_inputs: Tensor,
    ) -> Tensor:
        if ring_pass is not None:
            ring_pass.is_weighted = True
        ctx.ring_pass = ring_pass
        ctx.again, ctx.dtypes = again, (output.dtype, weight.dtype)
        if again is None:
            ctx.save_for_backward(weight)
        ctx.set_materialize_grads(False)
        return output * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        dtype, weight_dtype = ctx.dtypes
        if grad is None:
            return None, None, None, None, *ctx.ring_pass.backward((None,))
        again = ctx.again
        weight = ctx.saved_tensors[0] if again is None else again.compute_again({})
        of_weight = GradOfWeight(grad) if ctx.needs_input_grad[3] else None
        grads = ctx.ring_pass.backward(((grad * weight).to(dtype),), of_weight)
        total = None if of_weight is None else of_weight.total
        return None, None, None, None if total is None else total.to(weight_dtype), *grads


_WEIGHING: ContextVar[Weighing | None] = ContextVar("weighing", default=None)


def weighing() -> Weighing | None:
    """Of the module with a list of experts that computes now."""
    return _WEIGHING.get()


@contextmanager
def as_weighing(now: Weighing | None) -> Iterator[None]:
    """A context in which experts' outputs are noted in ``now``, or nowhere."""
    token = _WEIGHING.set(now)
    try:
        yield
    finally:
        _WEIGHING.reset(token)


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
    with _as_current(None), as_weighing(None):
        yield


class WatchCheckpoints(TorchFunctionMode):
    """A context for a forward that takes gradients and that no backward follows.

    Where a checkpoint has pushed hooks for saved tensors, what an operator saves does not come to
    the hooks of this context. The reentrant kind pushes none, but is a node of the graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._is_packed = False
        self._found = False

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.__exit__(*error)

    def found(self, outputs: Sequence[Tensor]) -> bool:
        """Whether the forward that returned ``outputs`` has called a checkpoint."""
        return self._found or _has_reentrant(outputs)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if torch.is_grad_enabled() and not self._found:
            self._is_packed = False
            torch.ones(1, requires_grad=True).exp()  # saves what it returns
            self._found = not self._is_packed
        return func(*args, **kwargs or {})

    def _pack(self, tensor: Tensor) -> Tensor:
        self._is_packed = True
        return tensor.detach()


def _has_reentrant(outputs: Sequence[Tensor]) -> bool:
    left = [output.grad_fn for output in outputs]
    seen: set[Any] = set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, CheckpointFunction._backward_cls):
            return True
        seen.add(node)
        left += [each for each, _ in node.next_functions]
    return False
