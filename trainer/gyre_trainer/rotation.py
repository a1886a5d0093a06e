"""Running a module slice by slice while the slices rotate, and the way back.

The life of a parameter: its owner keeps a slice of it at home and no rank ever has more. In forward the slice goes once round
the ring clockwise; every rank runs the module on its own part of the batch with the slice that visits, its own first, and
joins the outputs. In backward the slices come once more, counter-clockwise, the own one last; the gradient of each follows
one step behind it and is complete when it reaches the owner.

What autograd would save of a visitor is replaced by where it lay in the slice, and found again at the slice's second visit.
So a module's forward needs no backward written for it, and no visitor outlives its visit.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from gyre_trainer.errors import RotationError
from gyre_trainer.home import Home, local_of
from gyre_trainer.layout import Layout
from gyre_trainer.ring import Direction, Relay, Visitors
from gyre_trainer.rule import Part, Rule, swapped
from gyre_trainer.saved import SavedSlice, Sum

_Grads = Sequence[Tensor | None]


@dataclass(frozen=True, slots=True)
class RotationPolicy:
    """How slices travel and compute; homes keep the dtype that the parameters have.

    Attributes:
        compute_dtype: of travelling weights and of the computation with them; None for the parameters' own.
        grad_dtype: of travelling gradients; None for the parameters' own.
        recompute: keep no activation inside the module, run each slice once more in backward. Sends no byte more.
    """

    compute_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class Rotation:
    """A rotated module: how it is cut, where its slice lives, and what it was.

    Attributes:
        module: whose parameters now lie in ``home``.
        forward: the module's own, for whole or sliced parameters alike.
        layout: as the home's, with the names that its parameters have in this module.
        passengers: names of parameters inside that no cut names; each rank has them whole.
    """

    module: nn.Module
    forward: Callable[..., Tensor]
    rule: Rule
    layout: Layout
    home: Home
    policy: RotationPolicy
    passengers: tuple[str, ...]

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        """The module's output; a backward through it leaves averaged gradients on the home's parameters."""
        leaves, spec = tree_flatten((args, kwargs))
        homes = self.home.locals()
        passengers = [local_of(self.module.get_parameter(name)) for name in self.passengers]
        tensors = [*homes, *passengers, *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        turn = Turn(self, leaves, spec, recorded=recorded)
        output: Tensor = _Rotate.apply(turn, *tensors)  # type: ignore[no-untyped-call]
        return output

    @contextmanager
    def own_slice(self) -> Iterator[Tensor]:
        """The own slice as it travels: the home itself, or a copy in the computation's dtype."""
        flat = self.home.flat
        dtype = self.policy.compute_dtype or flat.dtype
        if dtype == flat.dtype:
            yield flat
            return
        pool = self.home.ring.pool
        buffer = pool.take(self.layout.numel(0), dtype, flat.device)
        try:
            yield buffer[: flat.numel()].copy_(flat)
        finally:
            pool.put(buffer)


class _Rotate(torch.autograd.Function):
    """A turn as a node of the graph. Its inputs: the home's parts, the passengers, the tensors among the arguments."""

    @staticmethod
    def forward(ctx: Any, turn: "Turn", *tensors: Tensor) -> Tensor:
        ctx.turn = turn
        return turn.forward(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.turn.backward(grad_output)


@dataclass(frozen=True, slots=True)
class _Graph:
    """One slice's computation, ready for its backward.

    Attributes:
        output: None where the output depends on nothing that takes a gradient.
        weights: the leaves that the slice's parts of the parameters are in it.
        saved: what else it keeps, unless it is used while the slice is still here.
    """

    output: GradientEdge | None
    dtype: torch.dtype
    weights: list[Tensor]
    saved: SavedSlice | None


class Turn:
    """One call of a rotated module: once round the ring, and once more in backward."""

    def __init__(self, rotation: Rotation, leaves: list[Any], spec: TreeSpec, *, recorded: bool) -> None:
        """``leaves`` and ``spec`` are the call's arguments; ``recorded`` says whether a backward may follow."""
        self._rotation = rotation
        self._layout = rotation.layout
        self._leaves = leaves
        self._spec = spec
        self._recorded = recorded
        self._keeps_graphs = recorded and not (rotation.policy.recompute and rotation.rule.backward_reads_weights)
        self._graphs: dict[int, _Graph] = {}
        self._version = rotation.home.flat._version

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        """The slices' outputs, joined."""
        self._take_in(tensors)
        ring = self._rotation.home.ring
        joined = _Joined(self._rotation.rule, self._layout, self._outer_dtype)
        with (
            self._rotation.own_slice() as own,
            closing(Visitors(ring, own, self._layout, Direction.CLOCKWISE)) as visitors,
        ):
            for index, flat in chain([(ring.rank, own)], visitors):
                joined.add(index, self._run(index, flat))
        return joined.result()

    def backward(self, grad_output: Tensor) -> list[Tensor | None]:
        """Gradients of the home's parts, complete and averaged, and this rank's own of the passengers and inputs."""
        home, policy = self._rotation.home, self._rotation.policy
        if home.flat._version != self._version:
            raise RotationError(f"parameters of {type(self._rotation.module).__name__} changed between forward and backward")
        layout = self._layout.only(self._trainable)
        relay = Relay(home.ring, layout, policy.grad_dtype or home.flat.dtype, home.flat.device)
        sums = [Sum(dtype) for dtype in self._whole_dtypes]
        with self._visits() as visits:
            for index, flat in visits:
                grads, whole_grads = self._differentiate(index, flat, grad_output)
                for total, grad in zip(sums, whole_grads, strict=True):
                    total.add(grad)
                if layout.cuts and index != home.ring.rank:
                    relay.pass_on(index, grads)
        complete = relay.finish(grads).div_(home.ring.size).to(home.flat.dtype)
        own = iter(layout.views(complete, home.ring.rank))
        return [next(own) if trainable else None for trainable in self._trainable] + [total.total for total in sums]

    def _take_in(self, tensors: Sequence[Tensor]) -> None:
        """Cut the inputs off the graph around; the first one is the activation and takes on the computation's dtype."""
        num_cuts, first = len(self._layout.cuts), len(self._rotation.passengers)
        self._trainable = [self._recorded and tensor.requires_grad for tensor in tensors[:num_cuts]]
        self._whole_dtypes = [tensor.dtype for tensor in tensors[num_cuts:]]
        self._whole = [tensor.detach() for tensor in tensors[num_cuts:]]
        self._outer_dtype = self._rotation.home.flat.dtype
        if len(self._whole) > first and self._whole[first].is_floating_point():
            self._outer_dtype = self._whole[first].dtype
            self._whole[first] = self._whole[first].to(self._rotation.policy.compute_dtype)
        if self._recorded:
            for tensor, source in zip(self._whole, tensors[num_cuts:], strict=True):
                tensor.requires_grad_(source.requires_grad)
        arrived = iter(self._whole[first:])
        self._leaves = [next(arrived) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]

    def _run(self, index: int, flat: Tensor) -> Tensor:
        """One slice's output; its graph is kept where backward will want it."""
        if not self._keeps_graphs:
            return self._compute(index, flat)[0].detach()
        saved = SavedSlice(flat)
        with torch.enable_grad(), saved.recording():
            output, weights = self._compute(index, flat)
        saved.flat = None
        edge = get_gradient_edge(output) if output.requires_grad else None
        self._graphs[index] = _Graph(edge, output.dtype, weights, saved)
        return output.detach()

    def _compute(self, index: int, flat: Tensor) -> tuple[Tensor, list[Tensor]]:
        """One slice's output, and the leaves that its parts of the parameters are in the output's graph."""
        leaves = [view.detach() for view in self._layout.views(flat, index)]
        weights, bounds = {}, {}
        for cut, leaf, trainable in zip(self._layout.cuts, leaves, self._trainable, strict=True):
            leaf.requires_grad_(trainable)
            start, stop = bounds[cut.name] = self._layout.bounds(cut, index)
            weights[cut.name] = F.pad(leaf, (start, cut.shape[0] - stop)) if cut.padded else leaf
        rotation = self._rotation
        whole = dict(zip(rotation.passengers, self._whole, strict=False))
        args, kwargs = tree_unflatten(self._leaves, self._spec)
        with swapped(rotation.module, {**weights, **whole}):
            output = rotation.rule.run(rotation.forward, Part(weights, bounds), args, kwargs)
        if not isinstance(output, Tensor):
            raise RotationError(
                f"{type(rotation.module).__name__} returns a {type(output).__name__}; only one tensor can rotate"
            )
        return output, leaves

    @contextmanager
    def _visits(self) -> Iterator[Iterable[tuple[int, Tensor | None]]]:
        """Slice indices from the next rank's to the own, counter-clockwise, with the slices where backward reads them."""
        ring = self._rotation.home.ring
        if not self._rotation.rule.backward_reads_weights:
            yield [((ring.rank + step) % ring.size, None) for step in range(1, ring.size + 1)]
            return
        with (
            self._rotation.own_slice() as own,
            closing(Visitors(ring, own, self._layout, Direction.COUNTER_CLOCKWISE)) as visitors,
        ):
            yield chain(visitors, [(ring.rank, own)])

    def _differentiate(self, index: int, flat: Tensor | None, grad_output: Tensor) -> tuple[_Grads, _Grads]:
        """Gradients of one slice: of its trainable parts, and of the passengers and inputs."""
        graph = self._graph(index, flat)
        wanted = [leaf for leaf in (*graph.weights, *self._whole) if leaf.requires_grad]
        if graph.output is None or not wanted:
            found: _Grads = [None] * len(wanted)
        else:
            share = self._share(index, grad_output).to(graph.dtype)
            found = torch.autograd.grad([graph.output], wanted, [share], allow_unused=True)
        num_trainable = sum(self._trainable)
        of_whole = iter(found[num_trainable:])
        return found[:num_trainable], [next(of_whole) if leaf.requires_grad else None for leaf in self._whole]

    def _graph(self, index: int, flat: Tensor | None) -> _Graph:
        if self._keeps_graphs:
            graph = self._graphs.pop(index)
            assert graph.saved is not None
            graph.saved.flat = flat
            return graph
        assert flat is not None
        with torch.enable_grad():
            output, weights = self._compute(index, flat)
        return _Graph(get_gradient_edge(output) if output.requires_grad else None, output.dtype, weights, None)

    def _share(self, index: int, grad_output: Tensor) -> Tensor:
        """The output gradient's part that belongs to one slice."""
        dim = self._rotation.rule.join_dim
        if dim is None:
            return grad_output
        start, stop = self._layout.bounds(self._layout.cuts[0], index)
        return grad_output.narrow(dim, start, stop - start)


class _Joined:
    """The module's output while slices add to it or fill it."""

    def __init__(self, rule: Rule, layout: Layout, dtype: torch.dtype) -> None:
        self._dim = rule.join_dim
        self._layout = layout
        self._sum = Sum(dtype)

    def add(self, index: int, output: Tensor) -> None:
        if self._dim is None:
            self._sum.add(output)
            return
        cut = self._layout.cuts[0]
        start, stop = self._layout.bounds(cut, index)
        if self._sum.total is None:
            shape = list(output.shape)
            shape[self._dim] = cut.shape[cut.dim]
            self._sum.total = output.new_empty(shape, dtype=self._sum.dtype)
        self._sum.total.narrow(self._dim, start, stop - start).copy_(output)

    def result(self) -> Tensor:
        assert self._sum.total is not None
        return self._sum.total
