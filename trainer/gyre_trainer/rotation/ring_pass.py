"""One call of a rotated module: one pass round the ring in forward, another in backward.

[Note: The backward ring]

With N ranks, forward sends the slices clockwise. Rank r computes with its own slice while slice r-1
is in flight to it, then with slice r-1 while slice r-2 is in flight, and so on: N-1 hops, each
hidden behind a computation. A rank only sends copies; its own slice is never written to. So an
evaluation between forward and backward, a second forward, or an exception cannot spoil it.

Backward sends the slices counter-clockwise: rank r computes with slice r+1, r+2, ..., and with its
own slice last, which needs no hop. The gradient of a slice follows one step behind its weights
(`gyre_trainer.shards.travel`). Slice s starts on rank s-1, which is the first to compute
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
* Rows of an embedding, from the ranks that own them to those whose tokens they are for.

[Note: Rows of an embedding]

A batch has few of a vocabulary's tokens, so an embedding's slices do not go round the ring. Each
rank says which rows it needs: one byte for each row of the vocabulary, 1 or 0. These flags go round
the ring. So messages have the same sizes on all ranks, whatever their tokens are, hops carry the
module's identity, and a row travels to a rank once, however often the rank has its token. The
owners send the rows, in ascending order. In backward each rank adds up its gradients row by row and
sends the sums to the owners, which know the rows. An owner adds what it gets in the order of the
ranks, so that sums are the same, to the bit, in every run.

No slice is copied as a whole, and a rank has at most as many rows as it has tokens. An owner sends
at most its rows to every other rank, as much as on the ring, and mostly far less.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import (
    GradientEdge,
    _engine_run_backward,
    get_gradient_edge,
    saved_tensors_hooks,
)

from gyre_trainer.comm.identity import HopIdentity, path_of, slice_span, span, with_room
from gyre_trainer.comm.ring import Direction, Ring, Stream
from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.call import Call, ComputedSlice, cast
from gyre_trainer.rotation.recomputation import Randomness, replay_of_layer
from gyre_trainer.rotation.rule import (
    DeferredGrads,
    ModuleSlice,
    OutputReduction,
    Rotation,
    RowsRule,
    parameter_at,
    swapped,
)
from gyre_trainer.shards.layout import Cut, Layout, local_of, spec_of, with_spec
from gyre_trainer.shards.travel import GradientRing, RemoteSlices, meet
from gyre_trainer.torch_internals import at_end_of_backward, is_fake, storage_number, version_of


@dataclass(frozen=True, slots=True)
class WantedRows:
    """The rows that this rank needs.

    Attributes:
        ids: their numbers in the whole parameter, ascending, each once.
        places: of each token, the place of its row among ``ids``.
        starts: for each owner, the place of its first row, and at last the number of ``ids``.
        padding: the place of the padding's row; None where no token is padding.
    """

    ids: Tensor
    places: Tensor
    starts: Sequence[int]
    padding: int | None

    def of(self, rows: Tensor, owner: int) -> Tensor:
        """Those of ``rows``, one for each of `ids`, that belong to an owner, as a view."""
        return rows[self.starts[owner] : self.starts[owner + 1]]


def wanted_rows(layout: Layout, tokens: Tensor, padding_idx: int | None) -> WantedRows:
    """The rows of ``tokens``.

    Fake tokens have no values. All are taken to differ, and to be spread evenly over the owners.

    Raises:
        IndexError: a token is not in the vocabulary. On CUDA, the device stops instead.
        TypeError: tokens are no int64 or int32, which torch refuses, too.
    """
    (cut,) = layout.cuts
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"tokens of an embedding must be int64 or int32, not {tokens.dtype}")
    if is_fake(tokens):
        return _assumed(layout, cut, tokens)
    _require_rows(tokens, cut.shape[0])
    tokens = tokens.to(torch.int64).contiguous()
    flags = torch.zeros(cut.shape[0], dtype=torch.bool, device=tokens.device)
    ids = flags.scatter_(0, tokens.view(-1), True).nonzero().view(-1)
    padding = [] if padding_idx is None else [padding_idx, padding_idx + 1]
    limits = torch.tensor([*_first_rows(layout, cut), *padding], device=tokens.device)
    starts = torch.searchsorted(ids, limits).tolist()
    place = None
    if padding:
        *starts, place, behind = starts
        place = place if place < behind else None
    return WantedRows(ids, torch.searchsorted(ids, tokens), starts, place)


def _first_rows(layout: Layout, cut: Cut) -> list[int]:
    return [*(start for start, _ in layout.all_bounds(cut)), cut.shape[0]]


def _require_rows(tokens: Tensor, num_rows: int) -> None:
    if tokens.is_cuda or not tokens.numel():
        return
    lowest, highest = map(int, torch.aminmax(tokens))
    if lowest < 0 or highest >= num_rows:
        raise IndexError(
            f"token {lowest if lowest < 0 else highest} is not in the embedding, "
            f"which has {num_rows} rows"
        )


def _assumed(layout: Layout, cut: Cut, tokens: Tensor) -> WantedRows:
    num_ids = min(tokens.numel(), cut.shape[0])
    starts = [-(-first * num_ids // cut.shape[0]) for first in _first_rows(layout, cut)]
    ids = tokens.new_zeros(num_ids, dtype=torch.int64)
    return WantedRows(ids, torch.zeros_like(tokens, dtype=torch.int64), starts, None)


class RowExchange:
    """The rows of one parameter that ranks need of each other in one call.

    See [Note: Rows of an embedding].

    Attributes:
        wanted: the rows that this rank needs.
    """

    def __init__(self, ring: Ring, layout: Layout, wanted: WantedRows, number: int) -> None:
        """``number`` is the module's in `Ring.modules`."""
        self.wanted = wanted
        self._ring = ring
        self._number = number
        (cut,) = layout.cuts
        self._num_rows = cut.shape[0]
        self._own = layout.bounds(cut, ring.rank)
        self._asked: list[Tensor] = []

    def fetch(self, shard: Tensor, dtype: torch.dtype) -> Tensor:
        """The wanted rows, in ``dtype``, of the ``shard`` of every rank. Collective.

        Raises:
            RingError: a rank is gone or too late.
            RotationError: another rank calls another module.
        """
        self._asked = self._ask(dtype)
        rows = shard.new_empty((len(self.wanted.ids), shard.shape[1]), dtype=dtype)
        self._send(
            [shard.index_select(0, asked).to(dtype) for asked in self._asked],
            [self.wanted.of(rows, owner) for owner in range(self._ring.size)],
            Stream.WEIGHTS,
        )
        return rows

    def add_up(self, grads: Tensor, total: Tensor) -> None:
        """Add all ranks' gradients of the own rows to ``total``, as their average. Collective.

        Args:
            grads: this rank's gradients of the wanted rows, which travel in their dtype.
            total: of the own shard.

        Raises:
            RingError: a rank is gone or too late.
            RotationError: another rank calls another module.
        """
        ring = self._ring
        if ring.size > 1:
            # in the dtype of gradients: a buffer of weights may be in flight for the next module
            meet(ring, total[:0], HopIdentity(self._number, False, False, 0, 0))
        found = [grads.new_empty((len(asked), grads.shape[1])) for asked in self._asked]
        parts = [self.wanted.of(grads, owner) for owner in range(ring.size)]
        self._send(parts, found, Stream.GRADIENTS)
        for asked, rows in zip(self._asked, found, strict=True):
            total.index_add_(0, asked, rows.to(total.dtype), alpha=1 / ring.size)

    def _ask(self, dtype: torch.dtype) -> list[Tensor]:
        """For each rank, the rows of the own slice that it needs, counted from the first.

        Flags travel as numbers of ``dtype``, in the buffers that slices travel in.
        """
        ring, ids = self._ring, self.wanted.ids
        numel = -(-self._num_rows // dtype.itemsize)
        outgoing, before = with_room(numel, dtype, ids.device).zero_(), None
        if not is_fake(ids):
            outgoing.view(torch.uint8).index_fill_(0, ids, 1)
        asked = [self._of_own(outgoing)] * ring.size
        for step in range(1, ring.size):
            buffer = ring.pool.take(numel, dtype, ids.device)
            hop = HopIdentity(self._number, True, False, 0, step).pack()
            ring.shift(outgoing, buffer[:numel], Direction.CLOCKWISE, Stream.WEIGHTS, hop).wait()
            if before is not None:
                ring.pool.put(before)
            outgoing, before = buffer[:numel], buffer
            asked[(ring.rank - step) % ring.size] = self._of_own(outgoing)
        if before is not None:
            ring.pool.put(before)
        return asked

    def _of_own(self, flags: Tensor) -> Tensor:
        """The rows of the own slice whose flag is set."""
        start, stop = self._own
        if is_fake(flags):
            return self.wanted.of(self.wanted.ids, self._ring.rank).clone()
        return flags.view(torch.uint8)[start:stop].nonzero().view(-1)

    def _send(self, parts: Sequence[Tensor], targets: Sequence[Tensor], stream: Stream) -> None:
        """Send ``parts[i]`` to rank i, and fill ``targets[i]`` from rank i; both may be empty."""
        others = [rank for rank in range(self._ring.size) if rank != self._ring.rank]
        outgoing = [(rank, parts[rank]) for rank in others if parts[rank].numel()]
        incoming = [(rank, targets[rank]) for rank in others if targets[rank].numel()]
        # Hops before have compared whose rows these are. Messages cost more than rows.
        under_way = self._ring.send_among(outgoing, incoming, stream)
        targets[self._ring.rank].copy_(parts[self._ring.rank])
        under_way.wait()


def run_by_rows(rotation: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The module's output; backward leaves an averaged gradient on the sharded parameter."""
    rule, sharded, module = rotation.rule, rotation.sharded, rotation.module
    assert isinstance(rule, RowsRule)
    (tokens,) = (*args, *kwargs.values())
    (cut,) = rotation.layout.cuts
    parameter = parameter_at(module, cut.name)
    sharded.require_here(parameter, cut.name)
    if torch.is_grad_enabled() and sharded.replica_gradients is not None:
        sharded.replica_gradients.before_training(path_of(module))
    wanted = wanted_rows(rotation.layout, tokens, rule.padding_idx)
    exchange = RowExchange(sharded.ring, rotation.layout, wanted, rotation.number)
    rows: Tensor = _Rows.apply(rotation, exchange, parameter)  # type: ignore[no-untyped-call]
    others = {
        name: cast(local_of(parameter_at(module, name)), rotation.policy.compute_dtype)
        for name in rotation.replicated
    }
    bounds = {cut.name: (0, len(rows))}
    with swapped(module, {cut.name: rows} | others), span(f"{path_of(module)} forward: of rows"):
        current = ModuleSlice(
            module, rotation.forward, {cut.name: rows}, bounds, DeferredGrads({}), 1, (cut,)
        )
        output = rule.of_rows(current, exchange.wanted.places, exchange.wanted.padding)
    return output.to(rotation.outer_dtype(()))


class _Rows(torch.autograd.Function):
    """From the parameter of which this rank has a shard to the rows of its tokens."""

    @staticmethod
    def forward(ctx: Any, rotation: Rotation, exchange: RowExchange, parameter: Tensor) -> Tensor:
        ctx.rotation, ctx.exchange, ctx.spec = rotation, exchange, spec_of(parameter)
        sharded = rotation.sharded
        ctx.version = sharded.version
        with span(f"{path_of(rotation.module)} forward: fetching rows"):
            (shard,) = sharded.views(sharded.flat)
            return exchange.fetch(shard.detach(), rotation.travelling_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[None, None, Tensor]:
        rotation, sharded = ctx.rotation, ctx.rotation.sharded
        if sharded.version != ctx.version:
            raise RotationError(
                f"parameters of {rotation.name} changed between forward and backward"
            )
        own, wanted = sharded.flat.dtype, rotation.policy.grad_dtype or sharded.flat.dtype
        if wanted.itemsize < grads.dtype.itemsize:
            grads = grads.to(wanted)
        with span(f"{path_of(rotation.module)} backward: sending gradients of rows"):
            total = sharded.flat.new_zeros(
                sharded.flat.numel(), dtype=torch.promote_types(own, wanted)
            )
            (shard,) = sharded.views(total)
            ctx.exchange.add_up(grads.contiguous(), shard)
        (grad,) = sharded.views(total.to(own))
        return None, None, grad if ctx.spec is None else with_spec(grad, ctx.spec)


class SlicesInFlight:
    """The slices of a rotation, or their pieces of one round, in flight. A context that closes it.

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

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


_PREFETCHES: WeakKeyDictionary[Ring, Prefetch] = WeakKeyDictionary()


def prefetch_of(ring: Ring) -> Prefetch:
    """The one prefetch of all rotations on a ring."""
    return _PREFETCHES.setdefault(ring, Prefetch())


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
    if isinstance(rotation.rule, RowsRule):
        return run_by_rows(rotation, args, kwargs)
    call = Call(rotation, args, kwargs)
    given = call.given
    if call.recomputed:
        call.find_recomputations()
    outputs = _outputs(rotation, call)
    return call.rebuild_output(outputs, given)


def _outputs(rotation: Rotation, call: Call) -> tuple[Tensor, ...]:
    layer, tensors = replay_of_layer(), list(call.tensors)
    ring_pass = RingPass(rotation, call, None if layer is None else layer.before_hops())
    outputs: tuple[Tensor, ...] = _Rotate.apply(ring_pass, *tensors)  # type: ignore[no-untyped-call]
    return outputs


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
        edges = [_edge(output) for output in computed.outputs]
        return cls(edges, computed.weights, computed.inputs, saved)


class RingPass:
    """One call of a rotated module: one pass round the ring in forward, another in backward.

    See [Note: The backward ring].
    """

    def __init__(
        self, rotation: Rotation, call: Call, start: Callable[[], None] | None = None
    ) -> None:
        """``start`` is called before anything travels in backward."""
        self._rotation = rotation
        self._start = start
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
            with SlicesInFlight(self._rotation, Direction.CLOCKWISE, round_) as slices:
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
        if self._start is not None:
            self._start()
            self._start = None  # it holds the inputs of the layer
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
        own = iter(self._own_gradients(layout, gradient_ring) if layout.cuts else ())
        self._reductions.clear()
        return [next(own) if trainable else None for trainable in call.trainable] + call.finish()

    def _own_gradients(self, layout: Layout, gradient_ring: GradientRing) -> list[Tensor]:
        flat = gradient_ring.finish().to(self._rotation.sharded.flat.dtype)
        return self._call.of_parameters(layout.in_rounds(1).views(flat, self._ring.rank))

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

        In each round the order is from the next rank's slice to the own one.
        """
        prefetch = prefetch_of(self._ring)
        prefetch.backward_begins(self._rotation)
        for round_ in range(self._layout.num_rounds):
            with prefetch.slices(self._rotation, round_) as slices:
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
            # torch.autograd.grad takes as long again for checks of its arguments
            found = _engine_run_backward(
                tuple(edges),
                tuple(slice_grads),
                False,  # the graph is not kept
                False,  # nor is one recorded
                tuple(wanted),
                True,  # some may be unused
                accumulate_grad=False,
            )
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


def _edge(output: Tensor) -> tuple[GradientEdge | None, torch.dtype]:
    return get_gradient_edge(output) if output.requires_grad else None, output.dtype
