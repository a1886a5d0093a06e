"""A sharded parameter that a forward reads: gathered when it is read, and its gradient sent home.

[Note: Parameters that are read]

A module that rotates is called, and computes slice by slice. A parameter that a forward reads by
itself, as in `F.linear(x, self.layer.weight)`, is needed whole. While a model runs, a `StandIn` is
in its place. An operator that computes with it has the parameter gathered: the shards go round the
ring once, N-1 hops. Autograd saves the stand-in, not the values, so the whole parameter is let go
when the module that read it returns, and is gathered again when backward computes with it: N-1
hops. When its gradient is complete, that goes round the ring, and each rank keeps its shard's:
N-1 hops. These are the bytes of a module that rotates. What differs is the memory: the parameter,
and in backward its gradient, are whole on every rank for a while.

Nobody says beforehand which modules read. So in a model's first forward, whole weights of modules
that rotate are held until another module reads, or until the forward ends, and not only until their
reader returns. These are the parameters of one reader, as at any other time.

All ranks must read the same parameters in the same order, as they call the same modules.
"""

import logging
from contextlib import closing
from functools import cached_property
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor

from gyre_trainer.comm.identity import HopIdentity
from gyre_trainer.comm.ring import Direction, Ring
from gyre_trainer.comm.spans import path_of
from gyre_trainer.errors import RotationError
from gyre_trainer.shards.gradient_ring import GradientRing
from gyre_trainer.shards.layout import Layout
from gyre_trainer.shards.local_shards import with_spec
from gyre_trainer.shards.remote_slices import RemoteSlices
from gyre_trainer.shards.sharded_parameters import ShardedParameters, sharded_parameters_of

_LOG = logging.getLogger(__name__)


class Gathered:
    """One sharded parameter as it is read. See [Note: Parameters that are read].

    Attributes:
        parameter: the parameter.
        dtype: what it is read in, and travels in.
        is_read: whether anything has read it yet.
    """

    def __init__(
        self,
        parameter: DTensor,
        owner: nn.Module,
        last: str,
        reader: nn.Module,
        number: int,
        *,
        dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        """The parameter of the name ``last`` in ``owner``.

        Args:
            parameter: the parameter.
            owner: the module that has it.
            last: its name there.
            reader: the module whose forward reads it; the whole is released when that returns.
            number: its own in `Ring.modules`.
            dtype: what it is read in, and travels in; None for its own.
            grad_dtype: what its gradient travels in; None for its own dtype.
        """
        self.parameter = parameter
        self.dtype = dtype or parameter.dtype
        self.is_read = False
        self._owner, self._last, self._reader = ref(owner), last, ref(reader)
        self._number = number
        self._grad_dtype = grad_dtype or parameter.dtype
        self._whole: tuple[int, Tensor] | None = None

    @property
    def name(self) -> str:
        """The parameter's name in its model."""
        owner = self._owner()
        return self._last if owner is None else f"{path_of(owner)}.{self._last}"

    @cached_property
    def _sharded(self) -> ShardedParameters:
        sharded = sharded_parameters_of(self.parameter)  # type: ignore[arg-type]
        if sharded is None or not self.parameter.dtype.is_floating_point:
            raise RotationError(
                f"{self.name} is read by a forward that does not call the module with it, but it "
                "rests in a form that cannot be read. Keep that module whole by a rule of None."
            )
        return sharded

    @cached_property
    def _layout(self) -> Layout:
        """How the parameter travels; settled when it is read first."""
        sharded = self._sharded
        places = {id(each): place for place, each in enumerate(sharded.parameters)}
        cut = sharded.layout.cuts[places[id(self.parameter)]]
        layout = Layout((cut,), sharded.ring.size)
        return layout.in_pieces(sharded.ring.pool.largest_whole_numel)

    @property
    def version(self) -> int:
        """A number that grows with every write to the parameter."""
        return self._sharded.version

    def whole(self) -> Tensor:
        """The whole parameter, in the dtype to read it in; it must not be written to. Collective.

        It is held until another module reads a parameter, or until it is released.
        """
        version = self.version
        if self._whole is None or self._whole[0] != version:
            self._before_gathering()
            with torch.inference_mode(False), torch.no_grad():
                self._whole = version, self._gather()
            if not self.is_read:
                self.is_read = True
                _LOG.info("%s is read by a forward, and gathered for that", self.name)
        return self._whole[1]

    def release(self) -> None:
        """Hold the whole parameter no longer."""
        self._whole = None

    def take_gradient(self, stand_in: Tensor) -> None:
        """Give the parameter its share of a stand-in's gradient, averaged over the ranks."""
        grad, stand_in.grad = stand_in.grad, None
        assert grad is not None
        self.release()
        own = self._reduce(grad)
        replicas = self._sharded.replica_gradients
        if replicas is not None:
            replicas.settle()
        torch.autograd.backward([self.parameter], [with_spec(own, self.parameter._spec)])

    def _before_gathering(self) -> None:
        sharded = self._sharded
        sharded.require_here(self.parameter, self.name)
        if sharded.replica_gradients is not None and torch.is_grad_enabled():
            sharded.replica_gradients.before_training(self.name)
        _hold(sharded.ring, self._reader, self)
        if is_in_backward():
            ring = sharded.ring
            Variable._execution_engine.queue_callback(lambda: release_all(ring))

    def _gather(self) -> Tensor:
        ring, layout = self._sharded.ring, self._layout
        (cut,) = layout.cuts
        own = self.parameter._local_tensor.detach().to(self.dtype)
        if ring.size == 1:
            return own
        whole = own.new_empty(cut.shape)
        flat = own.reshape(-1)
        for round_ in range(layout.num_rounds):
            hop = HopIdentity(self._number, not is_in_backward(), False, round_, 1)
            piece = layout.piece(ring.rank, round_)
            _put(whole, layout, piece, sent := layout.piece_in(flat, piece))
            with closing(RemoteSlices(ring, sent, layout, Direction.CLOCKWISE, hop)) as remote:
                for index, part in remote:
                    _put(whole, layout, index, part)
        return whole

    def _reduce(self, grad: Tensor) -> Tensor:
        """The own shard's gradient."""
        ring, layout = self._sharded.ring, self._layout
        (cut,) = layout.cuts
        gradients = GradientRing(ring, layout, self._grad_dtype, grad.device, self._number)
        for round_ in range(layout.num_rounds):
            for step in range(1, ring.size + 1):
                piece = layout.piece((ring.rank + step) % ring.size, round_)
                start, stop = layout.bounds(cut, piece)
                gradients.receive(piece).add(0, grad.narrow(cut.dim, start, stop - start))
                gradients.send_on()
        own = gradients.finish().to(self.parameter.dtype)
        (view,) = layout.in_rounds(1).views(own, ring.rank)
        return view


def _put(whole: Tensor, layout: Layout, piece: int, flat: Tensor) -> None:
    """Write a piece to its place in the whole parameter."""
    (cut,), (part,) = layout.cuts, layout.views(flat, piece)
    start, stop = layout.bounds(cut, piece)
    whole.narrow(cut.dim, start, stop - start).copy_(part)


def is_in_backward() -> bool:
    """Whether a backward runs in this thread."""
    return torch._C._current_graph_task_id() != -1


class _Held:
    """The whole parameters that one module has read on a ring."""

    def __init__(self) -> None:
        self.reader: ref[nn.Module] | None = None
        self.parameters: list[Gathered] = []

    def release(self) -> None:
        while self.parameters:
            self.parameters.pop().release()
        self.reader = None


_HELD: WeakKeyDictionary[Ring, _Held] = WeakKeyDictionary()


def _hold(ring: Ring, reader: "ref[nn.Module]", parameter: Gathered) -> None:
    """Note that a parameter is held now; those that another module has read are released."""
    held = _HELD.setdefault(ring, _Held())
    if held.reader != reader:
        held.release()
        held.reader = reader
    held.parameters.append(parameter)


def release_all(ring: Ring) -> None:
    """Hold no whole parameter on a ring any longer."""
    if ring in _HELD:
        _HELD[ring].release()


def release_after(reader: nn.Module) -> None:
    """Hold nothing that ``reader`` has read, where no backward goes on that may read it again."""
    if is_in_backward():
        return
    for held in _HELD.values():
        if held.reader is not None and held.reader() is reader:
            held.release()
