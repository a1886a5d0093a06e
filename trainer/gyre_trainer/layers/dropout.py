"""Dropout modules around and inside of what rotates; `gyre_trainer.rotation.dropout_masks` makes their masks."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gyre_trainer.comm.ring import Ring, ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.dropout_masks import Draw, fresh_key
from gyre_trainer.rotation.rotated_module import RotatedModule, mix_in

_DRAW: ContextVar[Draw | None] = ContextVar("draw", default=None)


@contextmanager
def drawing(draw: Draw | None) -> Iterator[None]:
    """Inside, `SliceDropout` draws from there; from nowhere it drops nothing."""
    token = _DRAW.set(draw)
    try:
        yield
    finally:
        _DRAW.reset(token)


class SliceDropout:
    """Mixed in before the class of dropout that acts on what a rotation slices."""

    p: float
    training: bool

    def forward(self, x: Tensor) -> Tensor:
        """As dropout, on one slice."""
        draw = _DRAW.get()
        return draw.drop(x, self.p) if draw is not None and self.training and self.p else x


class EqualDropout:
    """Mixed in before the class of dropout outside of what rotates: its masks are the same at every number of ranks."""

    p: float
    training: bool
    ring: Ring
    batch_dim: int

    def forward(self, x: Tensor) -> Tensor:
        """As dropout."""
        if not self.training or not self.p:
            return x
        return Draw(fresh_key(), self.ring, equal=True, batch_dim=self.batch_dim).drop(x, self.p)


def share_mask(dropout: nn.Module, mesh: DeviceMesh, batch_dim: int = 0) -> None:
    """From now on the dropout's masks are the same at every number of ranks."""
    mix_in(dropout, EqualDropout, "Equal")
    dropout.ring = ring_of(mesh)  # type: ignore[assignment]
    dropout.batch_dim = batch_dim  # type: ignore[assignment]


def share_masks(model: nn.Module, mesh: DeviceMesh) -> None:
    """`share_mask` for all dropout in a model that does not rotate; what is dropped has the batch in front.

    Raises:
        RotationError: a module draws masks in another way; names it.
    """
    for name, module in model.named_modules():
        if isinstance(module, SliceDropout | EqualDropout | RotatedModule):
            continue
        if type(module) is nn.Dropout:
            share_mask(module, mesh)
        elif isinstance(module, nn.modules.dropout._DropoutNd) or _rate_inside(module):
            raise RotationError(
                f"{name} is {type(module).__name__} with dropout, whose masks would differ with the number of ranks; "
                'take RotationPolicy(dropout="independent") or set its dropout to 0'
            )


def _rate_inside(module: nn.Module) -> bool:
    """Whether a module, such as an LSTM, drops out by itself."""
    rate = getattr(module, "dropout", 0)
    return isinstance(rate, float) and rate > 0
