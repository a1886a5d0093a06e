"""Dropout modules inside and outside of rotated modules; `dropout_masks` makes their masks."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gyre_trainer.comm.ring import Ring
from gyre_trainer.comm.ring_registry import ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.rotation.backward.dropout_masks import DropoutMasks, new_key
from gyre_trainer.rotation.backward.slice_dropout import Masks
from gyre_trainer.rotation.rotated_module import RotatedModule, mix_in

_MASKS: ContextVar[Masks | None] = ContextVar("draw", default=None)


@contextmanager
def slice_masks(masks: Masks | None) -> Iterator[None]:
    """A context in which `SliceDropout` uses ``masks``; with None it drops nothing."""
    token = _MASKS.set(masks)
    try:
        yield
    finally:
        _MASKS.reset(token)


class SliceDropout:
    """Mixed in before the class of a dropout module that acts on what a rotation slices."""

    p: float
    training: bool

    def forward(self, x: Tensor) -> Tensor:
        """``x`` after dropout, for one slice."""
        masks = _MASKS.get()
        return masks.apply(x, self.p) if masks is not None and self.training and self.p else x


class EqualDropout:
    """Mixed in before the class of a dropout module outside of rotated modules.

    Its masks are equal at every number of ranks.
    """

    p: float
    training: bool
    ring: Ring
    batch_dim: int

    def forward(self, x: Tensor) -> Tensor:
        """``x`` after dropout."""
        if not self.training or not self.p:
            return x
        return DropoutMasks(new_key(), self.ring, equal=True, batch_dim=self.batch_dim).apply(
            x, self.p
        )


def use_equal_mask(dropout: nn.Module, mesh: DeviceMesh, batch_dim: int = 0) -> None:
    """Make the dropout's masks equal at every number of ranks."""
    mix_in(dropout, EqualDropout, "Equal")
    dropout.ring = ring_of(mesh)  # type: ignore[assignment]
    dropout.batch_dim = batch_dim  # type: ignore[assignment]


def use_equal_masks(model: nn.Module, mesh: DeviceMesh) -> None:
    """`use_equal_mask` for all dropout in a model that does not rotate; dim 0 is the batch.

    Raises:
        RotationError: a module draws masks in another way; the message names it.
    """
    for name, module in model.named_modules():
        if isinstance(module, SliceDropout | EqualDropout | RotatedModule):
            continue
        if type(module) is nn.Dropout:
            use_equal_mask(module, mesh)
        elif isinstance(module, nn.modules.dropout._DropoutNd) or _rate_inside(module):
            raise RotationError(
                f"{name} is {type(module).__name__} with dropout, "
                "whose masks would differ with the number of ranks; "
                'take RotationPolicy(dropout="independent") or set its dropout to 0'
            )


def _rate_inside(module: nn.Module) -> bool:
    """Whether a module, such as an LSTM, drops out by itself."""
    rate = getattr(module, "dropout", 0)
    return isinstance(rate, float) and rate > 0
