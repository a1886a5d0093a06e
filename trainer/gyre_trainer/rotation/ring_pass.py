"""One call of a rotated module: one pass round the ring in forward, another in backward.

[Note: The backward ring]

With N ranks, forward sends the slices clockwise. Rank r computes with its own slice while slice r-1
is in flight to it, then with slice r-1 while slice r-2 is in flight, and so on: N-1 hops, each
hidden behind a computation. A rank only sends copies; its own slice is never written to. So an
evaluation between forward and backward, a second forward, or an exception cannot spoil it.

Backward sends the slices counter-clockwise: rank r computes with slice r+1, r+2, ..., and with its
own slice last, which needs no hop. The gradient of a slice follows one step behind its weights
(`gyre_trainer.shards.layout`). Slice s starts on rank s-1, which is the first to compute
with it, and its gradient moves with it to s-2, s-3, ..., so each rank adds its contribution, and
after N-1 hops the gradient reaches rank s, which adds the last one. Weights take N-1 hops in
forward and N-1 in backward, gradients N-1: 3 (N-1)/N of the parameters' bytes, the minimum.

Two things hide the hops of backward. The gradient's buffer arrives while the slice's backward
computes, and weight gradients are formed last, straight into it (`DeferredGrads`). And the first
hop of the next module starts while this module computes with its own slice (`Prefetch`). What
autograd would save of a remote slice is replaced by its place in the slice and found again when the
slice comes a second time (`SavedTensors`), so a module needs no backward written for it and no
remote slice outlives its use.

Also here:

* Hops of backward that start ahead of time, while the previous module still computes.
* The tensors that autograd saves for a slice between forward and backward.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from gyre_trainer.comm.identity import HopIdentity, slice_span
from gyre_trainer.comm.ring import Direction, Ring
from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.call import Call, ComputedSlice
from gyre_trainer.rotation.recomputation import Randomness
from gyre_trainer.rotation.rule import OutputReduction, Rotation
from gyre_trainer.shards.layout import GradientRing, RemoteSlices
from gyre_trainer.torch_internals import at_end_of_backward, gradients, storage_number, version_of


class SlicesInFlight:
    """The slices of a rotation, or their pieces of one round, in flight until it is closed.

    Attributes:
        own: the number of the own piece, and the piece as it travels.
        remote: the pieces of the other ranks; the first hop has started.
        version: the version of the sharded parameters when the own piece was sent.
    """

    def __init__(self, rotation: Rotation, direction: Direction, round_: int) -> None:
        ring, pieces = rotation.sharded.ring, rotation.pieces
        self._pool = ring.pool
        forward = direction is Direction.CLOCKWISE
        flat, self._buffer = rotation.own_piece(round_)
        self.own = pieces.piece(ring.rank, round_), flat
        hop = HopIdentity(rotation.number, forward, False, round_, 1)
        self.remote = RemoteSlices(ring, flat, pieces, direction, hop)
        self.version = rotation.sharded.version

    def close(self) -> None:
        """Wait for the hops in flight, and put the buffers back."""
        buffer, self._buffer = self._buffer, None
        try:
            self.remote.close()
        finally:
            if buffer is not None:
                self._pool.put(buffer)


class Prefetch:
    """Starts the first hop of the next round or rotation while the present one still computes.

    The order of rotations in backward is learned from the last backward. All ranks learn the same
    order, since all make the same calls in the same order. If the expectation was wrong, the hop is
    made again.
    """

    def __init__(self) -> None:
        self._next_rotation: WeakKeyDictionary[Rotation, ref[Rotation]] = WeakKeyDictionary()
        self._last: Rotation | None = None
        self._ready: tuple[Rotation, int, SlicesInFlight] | None = None

    def backward_begins(self, rotation: Rotation) -> None:
        """Note that the backward of ``rotation`` begins."""
        if self._last is not None:
            self._next_rotation[self._last] = ref(rotation)
        self._last = rotation
        at_end_of_backward(self._backward_ended)

    def slices(self, rotation: Rotation, round_: int) -> SlicesInFlight:
        """The slices that were started ahead of time, or new ones."""
        if self._ready is not None:
            expected_rotation, expected_round, slices = self._ready
            self._ready = None
            if (
                expected_rotation is rotation
                and expected_round == round_
                and slices.version == rotation.sharded.version
            ):
                return slices
            slices.close()
        return SlicesInFlight(rotation, Direction.COUNTER_CLOCKWISE, round_)

    def start_next(self, rotation: Rotation, round_: int) -> None:
        """Start the round or rotation after this round; call it after the remote slices."""
        if round_ + 1 < rotation.pieces.num_rounds:
            next_rotation: Rotation | None = rotation
        else:
            known = self._next_rotation.get(rotation)
            next_rotation, round_ = known() if known is not None else None, -1
        if next_rotation is None:
            _reserve_buffers(rotation)
        else:
            self.cancel()
            self._ready = (
                next_rotation,
                round_ + 1,
                SlicesInFlight(next_rotation, Direction.COUNTER_CLOCKWISE, round_ + 1),
            )

    def cancel(self) -> None:
        """End all that was started ahead of time."""
        if self._ready is not None:
            self._ready[2].close()
            self._ready = None

    def _backward_ended(self) -> None:
        """Cancel all that was started: the next step has other weights."""
        self.cancel()
        self._last = None


def _reserve_buffers(rotation: Rotation) -> None:
    """Let the pool allocate the buffers that `start_next` will take in the second backward.

    The first backward starts no hop ahead of time.
    """
    sharded, dtype = rotation.sharded, rotation.travelling_dtype
    if sharded.ring.size > 1:
        num_buffers = 2 if rotation.sends_copy else 1  # for the remote and the own slice
        buffers = [
            sharded.ring.pool.take(rotation.pieces.numel(0), dtype, sharded.flat.device)
            for _ in range(num_buffers)
        ]
        for buffer in buffers:
            sharded.ring.pool.put(buffer)


# The one prefetch of all rotations on a ring.
_PREFETCHES: WeakKeyDictionary[Ring, Prefetch] = WeakKeyDictionary()


class _WeightView(NamedTuple):
    """The place of a saved view of the weights in the slice's buffer."""

    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class _SavedTensor(NamedTuple):
    """Any other saved tensor, and its version when it was saved."""

    tensor: Tensor
    version: int


class SavedTensors:
    """The saved tensors of one slice's graph; views of its weights are saved without memory.

    In backward such a view is made again on the buffer that then holds the slice.

    Attributes:
        flat: the slice's weights while they are on this rank; None while they are elsewhere.
    """

    def __init__(self, flat: Tensor, name: str) -> None:
        """``flat`` is the slice's weights, and ``name`` the module's, for messages."""
        self.flat: Tensor | None = flat
        self._storage = storage_number(flat)
        self._name = name

    def recording(self) -> saved_tensors_hooks:
        """A context in which autograd saves its tensors here."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> _WeightView | _SavedTensor:
        # the caller holds the slice while it records, so no other storage has this number
        if storage_number(tensor) == self._storage:
            return _WeightView(int(tensor.storage_offset()), tensor.size(), tensor.stride())
        return _SavedTensor(tensor.detach(), version_of(tensor))

    def _unpack(self, saved: _WeightView | _SavedTensor) -> Tensor:
        if isinstance(saved, _WeightView):
            if self.flat is None:
                raise RotationError(
                    f"backward reads weights of {self._name} that are not on this rank: a "
                    "tensor left a slice by another way than the module's output, such as an "
                    "attribute, a list or a cache"
                )
            return self.flat.as_strided(saved.size, saved.stride, saved.offset)
        if version_of(saved.tensor) != saved.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(saved.tensor.shape)} that backward needs "
                "was modified in place after forward"
            )
        return saved.tensor


_Grads = Sequence[Tensor | None]


def run(rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The module's output; backward leaves averaged gradients on the sharded parameters."""
    return rotation.rule.call(rotation, args, kwargs, _run_by_slices)


def _run_by_slices(rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    call = Call(rotation, args, kwargs)
    given = call.given
    if call.recomputed:
        call.find_recomputations()
    outputs = _Rotate.apply(RingPass(rotation, call), *call.tensors)  # type: ignore[no-untyped-call]
    assert call.output_form is not None
    return call.output_form.filled(outputs, given)  # an argument that slices return is the caller's


class _Rotate(torch.autograd.Function):
    """A ring pass as a node of the graph; its inputs are those of `Call.tensors`."""

    @staticmethod
    def forward(ctx: Any, ring_pass: "RingPass", *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ring_pass = ring_pass
        ctx.set_materialize_grads(False)
        return ring_pass.forward(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.ring_pass.backward(grad_outputs)


@dataclass(frozen=True, slots=True)
class _Graph:
    """One slice's computation, ready for its backward.

    Attributes:
        outputs: the edge and dtype of each output; the edge is None where the output needs no
            gradient.
        weights: the leaves that stand for the slice's trainable shards.
        inputs: those that stand for the call's inputs.
        saved: the graph's saved tensors; None where backward follows while the slice is still here.
    """

    outputs: list[tuple[GradientEdge | None, torch.dtype]]
    weights: list[Tensor]
    inputs: list[Tensor]
    saved: SavedTensors | None

    @classmethod
    def of(cls, computed: ComputedSlice, saved: SavedTensors | None) -> "_Graph":
        """The graph of a computation, whose outputs are not kept."""
        edges = [
            (get_gradient_edge(output) if output.requires_grad else None, output.dtype)
            for output in computed.outputs
        ]
        return cls(edges, computed.weights, computed.inputs, saved)


class RingPass:
    """One call of a rotated module: one pass round the ring in forward, another in backward.

    See [Note: The backward ring].
    """

    def __init__(self, rotation: Rotation, call: Call) -> None:
        self._rotation = rotation
        self._layout = rotation.pieces
        self._ring = rotation.sharded.ring
        self._call = call
        self._spent = False
        self._keeps_graphs = call.recorded and not call.recomputed
        self._graphs: dict[int, _Graph] = {}
        self._reductions: list[OutputReduction] = []
        self._version = rotation.sharded.version
        self._randomness = Randomness(rotation.sharded.flat.device) if call.recomputed else None

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The reduced outputs of the slices."""
        self._call.detach_inputs(tensors)
        for round_ in range(self._layout.num_rounds):
            with closing(SlicesInFlight(self._rotation, Direction.CLOCKWISE, round_)) as slices:
                for hop, (index, flat) in enumerate(chain([slices.own], slices.remote)):
                    with slice_span(self._rotation.module, "forward", index, hop):
                        self._reduce(index, self._run(index, flat))
        outputs = tuple(reduction.result() for reduction in self._reductions)
        if self._call.recomputed:
            self._call.release_inputs()
        return outputs

    def backward(self, grad_outputs: _Grads) -> list[Tensor | None]:
        """The gradients of `Call.tensors`: averaged for shards, this rank's own for all others.

        Raises:
            RotationError: the parameters changed since forward, or this backward ran before.
            RingError: a hop failed.
        """
        self._require_fresh()
        sharded, call = self._rotation.sharded, self._call
        if call.recomputed:
            call.restore_inputs()
        layout = self._layout.only(call.trainable)
        dtype = self._rotation.policy.grad_dtype or sharded.flat.dtype
        gradient_ring = GradientRing(
            self._ring, layout, dtype, sharded.flat.device, self._rotation.number
        )
        for step, (index, flat) in enumerate(self._backward_slices(), 1):
            call.deferred.slice_grad = partial(gradient_ring.receive, index)
            with slice_span(self._rotation.module, "backward", index, step % self._ring.size):
                grads = self._differentiate(index, flat, grad_outputs)
                if layout.cuts:
                    self._add(index, grads, gradient_ring)
                del grads  # the next slice's must not exist with them
            if layout.cuts:
                gradient_ring.send_on()
        own: Iterator[Tensor] = iter(())
        if layout.cuts:
            flat = gradient_ring.finish().to(sharded.flat.dtype)
            own = iter(call.of_parameters(layout.in_rounds(1).views(flat, self._ring.rank)))
        self._reductions.clear()
        return [next(own) if trainable else None for trainable in call.trainable] + call.finish()

    def _require_fresh(self) -> None:
        if self._rotation.sharded.version != self._version:
            raise RotationError(
                f"parameters of {self._rotation.name} changed between forward and backward"
            )
        if self._spent:
            raise RotationError(
                f"backward through {self._rotation.name} ran before; "
                "it can run once after each forward"
            )
        self._spent = True

    def _run(self, index: int, flat: Tensor) -> list[Tensor]:
        """One slice's outputs, detached. Their graph is kept where backward needs it."""
        if not self._keeps_graphs:
            if self._randomness is not None:
                self._randomness.record(index)
            return [output.detach() for output in self._call.compute(index, flat).outputs]
        saved = SavedTensors(flat, self._rotation.name)
        with torch.enable_grad(), saved.recording():
            computed = self._call.compute(index, flat)
        saved.flat = None
        self._graphs[index] = _Graph.of(computed, saved)
        return [output.detach() for output in computed.outputs]

    def _reduce(self, index: int, outputs: Sequence[Tensor]) -> None:
        if not self._reductions:
            rule, dtype = self._rotation.rule, self._call.outer_dtype
            self._reductions = [
                rule.output_reduction(position, self._layout, dtype)
                for position in range(len(outputs))
            ]
        for reduction, output in zip(self._reductions, outputs, strict=True):
            reduction.add(index, output)

    def _backward_slices(self) -> Iterator[tuple[int, Tensor]]:
        """Number and piece of each slice in backward's order.

        In each round the order is from the slice of rank + 1 to the own one.
        """
        prefetch = _PREFETCHES.setdefault(self._ring, Prefetch())
        prefetch.backward_begins(self._rotation)
        for round_ in range(self._layout.num_rounds):
            with closing(prefetch.slices(self._rotation, round_)) as slices:
                yield from slices.remote
                prefetch.start_next(self._rotation, round_)
                yield slices.own

    def _differentiate(self, index: int, flat: Tensor, grad_outputs: _Grads) -> _Grads:
        """Gradients of one slice's trainable shards, except deferred ones; adds the inputs'."""
        call, graph = self._call, self._graph(index, flat)
        wanted = [leaf for leaf in (*graph.weights, *graph.inputs) if leaf.requires_grad]
        edges, slice_grads = [], []
        for (edge, dtype), reduction, grad_output in zip(
            graph.outputs, self._reductions, grad_outputs, strict=True
        ):
            if edge is not None and grad_output is not None:
                edges.append(edge)
                slice_grads.append(reduction.grad_of_slice(index, grad_output).to(dtype))
        found: _Grads = [None] * len(wanted)
        if edges and wanted:
            found = gradients(edges, slice_grads, wanted)
        call.add_grads(index, iter(found[len(graph.weights) :]))
        return found[: len(graph.weights)]

    def _add(self, index: int, grads: _Grads, gradient_ring: GradientRing) -> None:
        """Add to the slice's gradient when it has arrived."""
        slice_grad = gradient_ring.receive(index)
        for position, grad in enumerate(grads):
            if grad is not None:
                slice_grad.add(position, grad)
        for product in self._call.deferred.take_products():
            slice_grad.add_product(product.position, product.left, product.right, product.entry)

    def _graph(self, index: int, flat: Tensor) -> _Graph:
        if self._keeps_graphs:
            graph = self._graphs.pop(index)
            assert graph.saved is not None
            graph.saved.flat = flat
            return graph
        assert self._randomness is not None
        with torch.enable_grad(), self._randomness.replaying(index):
            computed = self._call.compute(index, flat)
        return _Graph.of(computed, None)
