"""One call of a rotated module: once round the ring, and once more in backward.

What autograd would save of a visitor is replaced by where it lay in the slice, and found again at the slice's second visit.
So a module's forward needs no backward written for it, and no visitor outlives its visit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from gyre_trainer.errors import RotationError
from gyre_trainer.home import local_of
from gyre_trainer.joined import Joined, Sum
from gyre_trainer.ring import Direction, Relay
from gyre_trainer.rotation import Departure, Rotation, prefetch_of
from gyre_trainer.rule import Part, swapped
from gyre_trainer.saved import SavedSlice

_Grads = Sequence[Tensor | None]


def run(rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The module's output; a backward through it leaves averaged gradients on the home's parameters."""
    turn, tensors = _begin(rotation, args, kwargs)
    output: Tensor = _Rotate.apply(turn, *tensors)  # type: ignore[no-untyped-call]
    return output


def prove(rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a module whose slices' outputs do not add up to its own.

    They do where the output is linear in the weights that the rule names: times -2 where these are times -2. A residual, a
    norm or an activation after the last layer is not.

    Raises:
        RotationError: it is not linear.
    """
    names = rotation.rule.linear_in
    turn, tensors = _begin(rotation, args, kwargs)
    index, flat = rotation.home.ring.rank, rotation.home.flat.to(rotation.policy.compute_dtype or rotation.home.flat.dtype)
    with torch.no_grad():
        turn.take_in(tensors)
        output, _ = turn.compute(index, flat)
        scaled = flat.clone()
        for cut, view in zip(rotation.layout.cuts, rotation.layout.views(scaled, index), strict=True):
            view.mul_(-2 if cut.name in names else 1)
        expected, found = -2 * output, turn.compute(index, scaled)[0]
    if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item(), equal_nan=True):
        raise RotationError(
            f"the output of {rotation.name} is not linear in {', '.join(names)}, so its slices do not add up to it; "
            "keep residuals, norms, activations and dropout after the last layer outside of what is rotated"
        )


def _begin(rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple["Turn", list[Tensor]]:
    """A turn, and its tensors: the home's parts, the passengers, those among the arguments."""
    leaves, spec = tree_flatten((args, kwargs))
    homes = [rotation.home.local(rotation.module.get_parameter(cut.name), cut.name) for cut in rotation.layout.cuts]
    passengers = [local_of(rotation.module.get_parameter(name)) for name in rotation.passengers]
    tensors = [*homes, *passengers, *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return Turn(rotation, leaves, spec, recorded=recorded), tensors


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
        self._ring = rotation.home.ring
        self._leaves = leaves
        self._spec = spec
        self._recorded = recorded
        self._spent = False
        self._keeps_graphs = recorded and not (rotation.policy.recompute and rotation.rule.backward_reads_weights)
        self._graphs: dict[int, _Graph] = {}
        self._version = rotation.home.version

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        """The slices' outputs, joined."""
        self.take_in(tensors)
        joined = Joined(self._rotation.rule, self._layout, self._outer_dtype)
        with Departure(self._rotation, Direction.CLOCKWISE) as departure:
            for index, flat in chain([(self._ring.rank, departure.own)], departure.visitors):
                joined.add(index, self._run(index, flat))
        return joined.result()

    def backward(self, grad_output: Tensor) -> list[Tensor | None]:
        """Gradients of the home's parts, complete and averaged, and this rank's own of the passengers and inputs.

        Raises:
            RotationError: the parameters changed since forward, or this backward ran before.
        """
        self._require_fresh()
        home, policy = self._rotation.home, self._rotation.policy
        layout = self._layout.only(self._trainable)
        relay = Relay(self._ring, layout, policy.grad_dtype or home.flat.dtype, home.flat.device)
        sums = [Sum(dtype) for dtype in self._whole_dtypes]
        for index, flat in self._visits():
            grads, whole_grads = self._differentiate(index, flat, grad_output)
            for total, grad in zip(sums, whole_grads, strict=True):
                total.add(grad)
            if layout.cuts and index != self._ring.rank:
                relay.pass_on(index, grads)
        complete = relay.finish(grads).div_(self._ring.size).to(home.flat.dtype)
        own = iter(layout.views(complete, self._ring.rank))
        self._whole.clear()
        self._leaves.clear()
        return [next(own) if trainable else None for trainable in self._trainable] + [total.total for total in sums]

    def _require_fresh(self) -> None:
        if self._rotation.home.version != self._version:
            raise RotationError(f"parameters of {self._rotation.name} changed between forward and backward")
        if self._spent:
            raise RotationError(f"backward through {self._rotation.name} ran before; it can run once after each forward")
        self._spent = True

    def take_in(self, tensors: Sequence[Tensor]) -> None:
        """Cut the inputs off the graph around; passengers and the first input take on the dtype to compute in."""
        num_cuts, first = len(self._layout.cuts), len(self._rotation.passengers)
        self._trainable = [self._recorded and tensor.requires_grad for tensor in tensors[:num_cuts]]
        self._whole_dtypes = [tensor.dtype for tensor in tensors[num_cuts:]]
        self._whole = [tensor.detach() for tensor in tensors[num_cuts:]]
        self._outer_dtype = self._rotation.home.flat.dtype
        if len(self._whole) > first and self._whole[first].is_floating_point():
            self._outer_dtype = self._whole[first].dtype
        for place, tensor in enumerate(self._whole[: first + 1]):
            if tensor.is_floating_point():
                self._whole[place] = tensor.to(self._rotation.policy.compute_dtype or tensor.dtype)
        if self._recorded:
            for tensor, source in zip(self._whole, tensors[num_cuts:], strict=True):
                tensor.requires_grad_(source.requires_grad)
        arrived = iter(self._whole[first:])
        self._leaves = [next(arrived) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]

    def _run(self, index: int, flat: Tensor) -> Tensor:
        """One slice's output; its graph is kept where backward will want it."""
        if not self._keeps_graphs:
            return self.compute(index, flat)[0].detach()
        saved = SavedSlice(flat)
        with torch.enable_grad(), saved.recording():
            output, weights = self.compute(index, flat)
        saved.flat = None
        edge = get_gradient_edge(output) if output.requires_grad else None
        self._graphs[index] = _Graph(edge, output.dtype, weights, saved)
        return output.detach()

    def compute(self, index: int, flat: Tensor) -> tuple[Tensor, list[Tensor]]:
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
            raise RotationError(f"{rotation.name} returns a {type(output).__name__}; only one tensor can rotate")
        return output, leaves

    def _visits(self) -> Iterator[tuple[int, Tensor | None]]:
        """Slice indices from the next rank's to the own, counter-clockwise, with the slices where backward reads them."""
        rank, size = self._ring.rank, self._ring.size
        prefetch = prefetch_of(self._ring)
        prefetch.begin(self._rotation)
        if not self._rotation.rule.backward_reads_weights:
            yield from (((rank + step) % size, None) for step in range(1, size))
            prefetch.send_ahead(self._rotation)
            yield rank, None
            return
        with prefetch.departure(self._rotation) as departure:
            yield from departure.visitors
            prefetch.send_ahead(self._rotation)
            yield rank, departure.own

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
            output, weights = self.compute(index, flat)
        return _Graph(get_gradient_edge(output) if output.requires_grad else None, output.dtype, weights, None)

    def _share(self, index: int, grad_output: Tensor) -> Tensor:
        """The output gradient's part that belongs to one slice."""
        dim = self._rotation.rule.join_dim
        if dim is None:
            return grad_output
        start, stop = self._layout.bounds(self._layout.cuts[0], index)
        return grad_output.narrow(dim, start, stop - start)
