"""A transformer's MLP by slices of its hidden width: the whole hidden activation never exists.

Also here:

* Dropout modules inside and outside of rotated modules.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gyre_trainer.comm.ring import Ring
from gyre_trainer.comm.ring_registry import ring_of
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.linear import features_of, layer_of, projections
from gyre_trainer.rotation.dropout import MASKS_ARGUMENT, DropoutMasks, Masks, new_key
from gyre_trainer.rotation.rotated_module import RotatedModule, mix_in
from gyre_trainer.rotation.rule import ModuleSlice, Rule
from gyre_trainer.shards.layout import Cut

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


class MLP(nn.Module):
    """down(gelu(up(x))), over any leading dims."""

    def __init__(self, dim: int, hidden_dim: int, *, bias: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden_dim, bias=bias)
        self.down = nn.Linear(hidden_dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """The output, shaped as ``x``."""
        output: Tensor = self.down(F.gelu(self.up(x)))
        return output


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)) (Shazeer, arXiv 2002.05202), over any leading dims."""

    def __init__(self, dim: int, hidden_dim: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden_dim, bias=bias)
        self.up = nn.Linear(dim, hidden_dim, bias=bias)
        self.down = nn.Linear(hidden_dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """The output, shaped as ``x``."""
        output: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return output


@dataclass(frozen=True)
class MLPRule(Rule):
    """For a module that applies ``ups`` to its input, an elementwise function, then ``down``.

    A slice holds the same range of the hidden width of all these layers. The forward must be linear
    in the weights of ``down``: no residual after it, and dropout only with ``drops_out``.

    Attributes:
        ups: names of the linear layers from the input to the hidden width (up, and gate where there
            is one).
        down: name of the linear layer from the hidden width to the output.
        dropouts: names of the dropout modules that act on the hidden width; others are refused
            without ``drops_out``. Their masks alone can be equal at every number of ranks.
        drops_out: whether the forward may drop out, by modules or functions: its input before
            ``ups``, the hidden width, and the output. Slices of one call drop the same entries of
            input and output.
        batch_dim: the dim of the batch in the input.
        num_packed: how many layers each of ``ups`` packs, the features of one after those of the
            other: 2 for gate and up.
    """

    ups: tuple[str, ...] = ("up",)
    down: str = "down"
    dropouts: tuple[str, ...] = ()
    batch_dim: int = 0
    num_packed: int = 1
    drops_out: bool = False

    @property
    def uses_dropout(self) -> bool:
        """Whether there is dropout."""
        return self.drops_out or bool(self.dropouts)

    @property
    def linear_in(self) -> tuple[str, ...]:
        """Weight and bias of the last layer."""
        return f"{self.down}.weight", f"{self.down}.bias"

    def cuts(self, module: nn.Module, num_slices: int) -> list[Cut]:
        """Rows of the ups, columns of the down, and a segment of its bias."""
        self.require_known_dropout(module)
        for name in self.dropouts:
            use_slice_mask(module, name)
        return projections(module, self.ups, self.down, self._sections(module))

    def require_known_dropout(self, module: nn.Module) -> None:
        """Refuse dropout that is not named, or any without ``drops_out``."""
        refuse_dropout(module, self.dropouts, allows_plain=self.drops_out)

    def _sections(self, module: nn.Module) -> tuple[int, ...]:
        if self.num_packed == 1:
            return ()
        hidden, _ = features_of(layer_of(module, self.down))
        for name in self.ups:
            _, size = features_of(layer_of(module, name))
            if size != self.num_packed * hidden:
                raise RotationError(
                    f"{type(module).__name__}.{name} has {size} output features, but the rule "
                    f"needs {self.num_packed} times the {hidden} input features of {self.down}"
                )
        return (hidden,) * self.num_packed

    def run(self, current: ModuleSlice, /, *args: Any, **kwargs: Any) -> Any:
        """The slice's contribution; dropout uses masks for its range of the width."""
        masks = kwargs.pop(MASKS_ARGUMENT, None)
        first, _ = current.bounds[f"{self.ups[0]}.weight"]
        masks = masks and masks.for_slice(first, self.batch_dim)
        with slice_masks(masks), self.dropping(current, masks, (args, kwargs)):
            return current.forward(*args, **kwargs)


def refuse_dropout(
    module: nn.Module,
    allowed: tuple[str, ...] = (),
    *,
    allows_plain: bool = False,
) -> None:
    """Refuse dropout inside that is not ``allowed``: each slice would draw its own mask.

    ``allows_plain`` is whether every `nn.Dropout` is allowed, which drops single entries.

    Raises:
        RotationError: names the dropout.
    """
    for name, child in module.named_modules():
        is_allowed = name in allowed or (allows_plain and isinstance(child, nn.Dropout))
        if isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0 and not is_allowed:
            raise RotationError(
                f"{type(module).__name__}.{name} drops out with p={child.p}; "
                "each slice would draw its own mask. Set p=0, or set p before the model is rotated "
                "if its blocks are found, or let the rule know of it: drops_out=True, or "
                "MLPRule(dropouts=...) if it acts on the hidden width."
            )


def use_slice_mask(module: nn.Module, name: str) -> None:
    """Let the dropout of this name draw its mask slice by slice.

    Raises:
        RotationError: it is no `nn.Dropout`.
    """
    dropout = dict(module.named_modules()).get(name)
    if type(dropout) is not nn.Dropout:
        raise RotationError(
            f"{type(module).__name__}.{name} is {type(dropout).__name__}, "
            "but the rule needs a Dropout there"
        )
    mix_in(dropout, SliceDropout, "Slice")
