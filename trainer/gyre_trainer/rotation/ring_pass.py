"""One call of a rotated module: once round the ring, and once more in backward.

What autograd would save of a visitor is replaced by where it lay in the slice, and found again at the slice's second visit.
So a module's forward needs no backward written for it, and no visitor outlives its visit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gyre_trainer.comm.ring import Direction
from gyre_trainer.comm.spans import slice_span
from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.call import Call
from gyre_trainer.rotation.output_reduction import Join
from gyre_trainer.rotation.prefetch import Departure, prefetch_of
from gyre_trainer.rotation.rotation import Rotation
from gyre_trainer.rotation.saved_tensors import SavedSlice
from gyre_trainer.rotation.token_chunk import Portion
from gyre_trainer.shards.gradient_ring import Relay

_Grads = Sequence[Tensor | None]


def run(rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The module's output; a backward through it leaves averaged gradients on the home's parameters."""
    call = Call(rotation, args, kwargs)
    if call.recomputed:
        call.remember()
    return call.put_together(_Rotate.apply(Turn(rotation, call), *call.tensors))  # type: ignore[no-untyped-call]


class _Rotate(torch.autograd.Function):
    """A turn as a node of the graph. Its inputs: the home's parts, the passengers, the tensors among the arguments."""

    @staticmethod
    def forward(ctx: Any, turn: "Turn", *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.turn = turn
        ctx.set_materialize_grads(False)
        return turn.forward(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.turn.backward(grad_outputs)


@dataclass(frozen=True, slots=True)
class _Graph:
    """One slice's computation, ready for its backward.

    Attributes:
        outputs: None for one that depends on nothing that takes a gradient.
        weights: the leaves that the slice's trainable parts of the parameters are in it.
        saved: what else it keeps, unless it is used while the slice is still here.
    """

    outputs: list[tuple[GradientEdge | None, torch.dtype]]
    weights: list[Tensor]
    saved: SavedSlice | None


class Turn:
    """One call of a rotated module: once round the ring, and once more in backward."""

    def __init__(self, rotation: Rotation, call: Call) -> None:
        self._rotation = rotation
        self._layout = rotation.pieces
        self._ring = rotation.home.ring
        self._call = call
        self._spent = False
        self._keeps_graphs = call.recorded and not call.recomputed
        self._graphs: dict[int, _Graph] = {}
        self._joins: list[Join] = []
        self._version = rotation.home.version

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The slices' outputs, joined."""
        self._call.take_in(tensors)
        for round_ in range(self._layout.num_rounds):
            with Departure(self._rotation, Direction.CLOCKWISE, round_) as departure:
                for hop, (index, flat) in enumerate(chain([departure.own], departure.visitors)):
                    with slice_span(self._rotation.module, "forward", index, hop):
                        self._join(index, self._run(index, flat))
        outputs = tuple(join.result() for join in self._joins)
        if self._call.recomputed:
            self._call.let_go(outputs)
        return outputs

    def backward(self, grad_outputs: _Grads) -> list[Tensor | None]:
        """Gradients of the home's parts, complete and averaged, and this rank's own of the passengers and inputs.

        Raises:
            RotationError: the parameters changed since forward, or this backward ran before.
        """
        self._require_fresh()
        home, call = self._rotation.home, self._call
        if call.recomputed:
            call.take_back()
        layout = self._layout.only(call.trainable)
        relay = Relay(self._ring, layout, self._rotation.policy.grad_dtype or home.flat.dtype, home.flat.device)
        for step, (index, flat) in enumerate(self._visits(), 1):
            call.late.slice_grad = partial(relay.receive, index)
            with slice_span(self._rotation.module, "backward", index, step % self._ring.size):
                for portion in call.portions():
                    grads = self._differentiate(index, flat, grad_outputs, portion)
                    if layout.cuts:
                        self._add(index, grads, relay)
                    del grads  # before the next ones come
            if layout.cuts:
                relay.pass_on()
        own = iter(layout.in_rounds(1).views(relay.finish().to(home.flat.dtype), self._ring.rank)) if layout.cuts else iter(())
        self._joins.clear()
        return [next(own) if trainable else None for trainable in call.trainable] + call.finish()

    def _require_fresh(self) -> None:
        if self._rotation.home.version != self._version:
            raise RotationError(f"parameters of {self._rotation.name} changed between forward and backward")
        if self._spent:
            raise RotationError(f"backward through {self._rotation.name} ran before; it can run once after each forward")
        self._spent = True

    def _run(self, index: int, flat: Tensor) -> list[Tensor]:
        """One slice's outputs; their graph is kept where backward will want it."""
        if not self._keeps_graphs:
            return [output.detach() for output in self._call.compute(index, flat, self._call.everything())[0]]
        saved = SavedSlice(flat)
        with torch.enable_grad(), saved.recording():
            outputs, weights = self._call.compute(index, flat, self._call.everything())
        saved.flat = None
        self._graphs[index] = _Graph([_edge(output) for output in outputs], weights, saved)
        return [output.detach() for output in outputs]

    def _join(self, index: int, outputs: Sequence[Tensor]) -> None:
        if not self._joins:
            rule, dtype = self._rotation.rule, self._call.outer_dtype
            self._joins = [rule.join(place, self._layout, dtype) for place in range(len(outputs))]
        for join, output in zip(self._joins, outputs, strict=True):
            join.add(index, output)

    def _visits(self) -> Iterator[tuple[int, Tensor | None]]:
        """Numbers of pieces, and the pieces where backward reads them; in each round from the next rank's to the own one."""
        prefetch = prefetch_of(self._ring)
        prefetch.begin(self._rotation)
        for round_ in range(self._layout.num_rounds):
            if self._rotation.rule.backward_reads_weights:
                with prefetch.departure(self._rotation, round_) as departure:
                    yield from departure.visitors
                    prefetch.send_ahead(self._rotation, round_)
                    yield departure.own
            else:
                *others, own = (self._layout.piece(index, round_) for index in self._counter_clockwise())
                yield from ((piece, None) for piece in others)
                prefetch.send_ahead(self._rotation, round_)
                yield own, None

    def _counter_clockwise(self) -> Iterator[int]:
        return ((self._ring.rank + step) % self._ring.size for step in range(1, self._ring.size + 1))

    def _differentiate(self, index: int, flat: Tensor | None, grad_outputs: _Grads, portion: Portion) -> _Grads:
        """Gradients of one slice's trainable parts, but for those that come late; those of the inputs are added up."""
        graph = self._graph(index, flat, portion)
        wanted = [leaf for leaf in (*graph.weights, *portion.inputs) if leaf.requires_grad]
        edges, shares = [], []
        for (edge, dtype), join, grad_output in zip(graph.outputs, self._joins, grad_outputs, strict=True):
            if edge is not None and grad_output is not None:
                edges.append(edge)
                shares.append(portion.of(join.share(index, grad_output)).to(dtype))
        found: _Grads = [None] * len(wanted)
        if edges and wanted:
            found = torch.autograd.grad(edges, wanted, shares, allow_unused=True)
        of_inputs = iter(found[len(graph.weights) :])
        for total, leaf in zip(portion.sums, portion.inputs, strict=True):
            total.add(next(of_inputs) if leaf.requires_grad else None)
        return found[: len(graph.weights)]

    def _add(self, index: int, grads: _Grads, relay: Relay) -> None:
        """Add to the slice's gradient as soon as it is here."""
        slice_grad = relay.receive(index)
        for place, grad in enumerate(grads):
            if grad is not None:
                slice_grad.add(place, grad)
        for product in self._call.late.take():
            slice_grad.add_product(product.place, product.left, product.right, product.entry)

    def _graph(self, index: int, flat: Tensor | None, portion: Portion) -> _Graph:
        if self._keeps_graphs:
            graph = self._graphs.pop(index)
            assert graph.saved is not None
            graph.saved.flat = flat
            return graph
        assert flat is not None
        with torch.enable_grad():
            outputs, weights = self._call.compute(index, flat, portion)
        return _Graph([_edge(output) for output in outputs], weights, None)


def _edge(output: Tensor) -> tuple[GradientEdge | None, torch.dtype]:
    return get_gradient_edge(output) if output.requires_grad else None, output.dtype
