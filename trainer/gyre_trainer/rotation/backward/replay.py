"""When backward runs the forward of a layer again: before anything of the layer travels.

A checkpoint runs a layer again when backward asks for a tensor that it saved. Which module asks
first depends on the tokens of a rank where experts are listed: one without tokens may ask for none.
So each rotated module of the layer asks for a tensor of the layer before its slices travel in
backward, and all ranks make the same hops in the same order.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from gyre_trainer.rotation.backward.weighted_outputs import as_weighing


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
