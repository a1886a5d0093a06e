"""The outputs of rotated modules inside a part of a model that backward computes again.

[Note: Parts that are computed again]

Where a module does not rotate as a whole, such as a state-space mixer or an attention with
adapters, its layers rotate one by one, and the activations between them would be kept until
backward. `torch.utils.checkpoint` around the module drops them and computes them again. But then
the layers' slices would go round the ring once more. So the part keeps what these layers returned,
and a layer that is called again in backward gives that instead: nothing more is sent, and the rank
need not wait for others. Dropped is everything else, such as the states of a scan, what rotary
positions, activation functions and adapters save, and the masks of dropout.

An output is not kept where somebody else may write to it: where the part itself wrote to it, or
returned it. If backward needs it, its layer goes round the ring again, on every rank alike. Of
whole layers (`RotationPolicy.recompute_layers`) no output is kept. Where a layer only drops out
what its last block returned, as T5's do, backward needs the mask, but no value of the block: it
does not go round again, and values that are no numbers stand for what it returned.

Experts of a list never go round once more, because they have most of a model's bytes. Backward
needs no output of theirs, where it is only weighted and added up (`weighted_outputs`,
`weighted_sums`): then it is not kept, and values that are no numbers stand for it. Else it is kept.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction

from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.backward.randomness import generators_of, set_states, states_of
from gyre_trainer.rotation.backward.weighted_outputs import as_weighing

Outputs = tuple[Tensor, ...]


@dataclass(slots=True)
class _Kept:
    """What one rotated module returned in forward.

    Attributes:
        owner: the module's rotation.
        form: the form of its output.
        outputs: detached; empty once the graph keeps them.
        versions: of the outputs, when the module returned them.
        states: of the generators of random numbers after the call.
        is_kept: whether the outputs are kept.
        is_promised: whether the module never goes round the ring again.
        likes: shape, dtype and device of the outputs, where it is promised.
    """

    owner: object
    form: Any
    outputs: list[Tensor]
    versions: list[int]
    states: list[Tensor]
    is_kept: bool = True
    is_promised: bool = False
    likes: list[tuple[torch.Size, torch.dtype, torch.device]] = field(default_factory=list)

    def stand_ins(self) -> list[Tensor]:
        """Values that are no numbers, so that nobody can use them unnoticed."""
        return [
            torch.full(shape, torch.nan, dtype=dtype, device=device)
            for shape, dtype, device in self.likes
        ]


class KeptOutputs:
    """The outputs of the rotated modules in one call of a part. See the note above.

    Tensors are saved as torch's functions save theirs, so a checkpoint around the part drops them.

    Attributes:
        is_replaying: whether backward computes the part again.
        others: the tensors that were given to `keep` beside the outputs, while it does.
        promised_nodes: of the graph, from which outputs come that must not be needed any more.
        last: the number of the last call so far, and the nodes from which its outputs come; until
            `keep`.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        keeps: bool = True,
        keeps_promised: bool = True,
        spared: int | None = None,
    ) -> None:
        """``device`` is that of the part's parameters; ``keeps`` is false for whole layers.

        ``keeps_promised`` is whether outputs that were promised are here until `keep`; ``spared``
        the number of the call that does not go round again, if `keep` says so, too.
        """
        self._spared = spared
        self.last: tuple[int, list[Any]] = -1, []
        self._keeps = keeps
        self._keeps_promised = keeps_promised
        self.promised_nodes: list[Any] = []
        self._start: Any = None
        self._generators = generators_of(device)
        self._calls: deque[_Kept] = deque()
        self._node: Any = None
        self._num_others = 0
        self.is_replaying = False
        self.others: list[Tensor] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context in which the part computes for the first time."""
        with _as_current(self):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """A context in which backward computes the part again, once.

        Raises:
            RotationError: it did so before.
        """
        saved = self._take()
        for each in self._calls:
            # Nothing else holds them, so that each is released when it was used.
            each.outputs = [saved.popleft() for _ in each.versions] if each.is_kept else []
        self.is_replaying = True
        try:
            with _as_current(self):
                yield
        finally:
            self._calls.clear()
            self.others = []
            self._start = None

    def outputs_of(
        self,
        owner: object,
        call: Any,
        compute: Callable[[], Outputs],
        inputs: Sequence[Tensor],
        *,
        is_promised: bool = False,
    ) -> Outputs:
        """What a rotated module returns: computed in forward, and the same again in backward.

        Args:
            owner: the module's rotation.
            call: the call, of which ``output_form`` is read or set.
            compute: sends the slices round the ring.
            inputs: the tensors that the outputs depend on.
            is_promised: whether the module is an expert, which does not go round again.

        Raises:
            RotationError: the part calls other modules than in forward.
        """
        if self.is_replaying:
            return self._replayed(owner, call, compute, inputs)
        number = self.last[0] + 1
        is_promised = is_promised or number == self._spared
        if not self._keeps and not is_promised:
            self._calls.append(_Kept(owner, None, [], [], [], is_kept=False))
            outputs = compute()
            self.last = number, [output.grad_fn for output in outputs if output.requires_grad]
            return outputs
        outputs = compute()
        states = states_of(self._generators)
        each = _Kept(owner, call.output_form, [], [], states, is_promised=is_promised)
        if is_promised:
            each.likes = [(output.shape, output.dtype, output.device) for output in outputs]
        if self._keeps_promised or not is_promised:
            with DisableTorchFunction():  # it is not the part that reads them
                each.outputs = [output.detach() for output in outputs]
            each.versions = [output._version for output in outputs]
        self._calls.append(each)
        self.last = number, [output.grad_fn for output in outputs if output.requires_grad]
        return outputs

    def keep(
        self,
        returned: Sequence[Tensor],
        others: Sequence[Tensor],
        *,
        keeps_promised: bool = False,
        spares: bool = False,
    ) -> None:
        """Let the graph keep ``others``, and the outputs that nobody can write to any more.

        Args:
            returned: what the part returns.
            others: see the attribute.
            keeps_promised: whether backward needs outputs that were promised.
            spares: whether it needs none of the call that is to be spared.

        Raises:
            RotationError: it needs one that the part wrote to or returned.
        """
        self.promised_nodes.clear()
        self.last = -1, []
        self._start = None
        if self._spared is not None and self._spared < len(self._calls):
            self._calls[self._spared].is_promised = spares
        storages = {tensor.untyped_storage()._cdata for tensor in returned}
        saved = [*others]
        for each in self._calls:
            is_unchanged = all(
                output._version == version and output.untyped_storage()._cdata not in storages
                for output, version in zip(each.outputs, each.versions, strict=True)
            )
            if each.is_promised and keeps_promised and not is_unchanged:
                raise RotationError(
                    "a part of a model writes to what an expert returned, or returns it, so "
                    "backward cannot compute the part again; take "
                    "RotationPolicy(recompute_parts=False), without recompute_layers"
                )
            keeps = keeps_promised if each.is_promised else self._keeps
            each.is_kept = keeps and is_unchanged
            saved += each.outputs if each.is_kept else []
            each.outputs = []
        anchor = torch.empty(0, requires_grad=True)
        self._node = _Keep.apply(anchor, *saved).grad_fn  # type: ignore[no-untyped-call]
        self._num_others = len(others)

    def start(self) -> Callable[[], None]:
        """A function that computes the part again now, if backward has not yet.

        Experts with tokens of this rank ask for tensors that do that, and those without may not. So
        each calls it before its slices travel, or ranks would replay the part at other times. It
        keeps the part's graph alive, but nothing that the part keeps refers to it.
        """
        if self._start is None:
            anchor = torch.empty(0, requires_grad=True)
            self._start = _Keep.apply(anchor, anchor.detach()).grad_fn  # type: ignore[no-untyped-call]
        node = self._start

        def replay() -> None:
            if self._node is not None:
                _ = node.saved_tensors

        return replay

    def _take(self) -> deque[Tensor]:
        """The kept outputs; `others` has the other tensors from then on."""
        if self._node is None:
            raise RotationError(
                "backward through a part of a model that it computes again ran before; it can run "
                "once after each forward"
            )
        saved = deque(self._node.saved_tensors)
        self._node = None
        self.others = [saved.popleft() for _ in range(self._num_others)]
        return saved

    def _replayed(
        self, owner: object, call: Any, compute: Callable[[], Outputs], inputs: Sequence[Tensor]
    ) -> Outputs:
        kept = self._calls.popleft() if self._calls else None
        if kept is None or kept.owner is not owner:
            raise RotationError(
                "a part of a model calls other modules when backward computes it again than in "
                "forward; take RotationPolicy(recompute_parts=False)"
            )
        if not kept.is_kept and not kept.is_promised:
            return compute()
        call.output_form = kept.form
        set_states(self._generators, kept.states)
        given = kept.outputs if kept.is_kept else kept.stand_ins()
        outputs: Outputs = _Replay.apply(given, *inputs)  # type: ignore[no-untyped-call]
        kept.outputs = []
        return outputs


class _Keep(torch.autograd.Function):
    """A node that keeps tensors for backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.clone()


class _Replay(torch.autograd.Function):
    """A rotated module's outputs in a graph that is made for its saved tensors alone."""

    @staticmethod
    def forward(ctx: Any, outputs: Sequence[Tensor], *_inputs: Tensor) -> Outputs:
        return tuple(output.detach() for output in outputs)


_CURRENT: ContextVar[KeptOutputs | None] = ContextVar("kept outputs", default=None)


@contextmanager
def _as_current(kept: KeptOutputs | None) -> Iterator[None]:
    token = _CURRENT.set(kept)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def kept_outputs() -> KeptOutputs | None:
    """Of the part that computes now, if backward will compute it again, or does."""
    return _CURRENT.get()


@contextmanager
def nothing_kept() -> Iterator[None]:
    """A context for calls that are none of the part's own, such as those that check a rule."""
    with _as_current(None), as_weighing(None):
        yield
