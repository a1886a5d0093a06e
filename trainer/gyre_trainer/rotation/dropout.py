"""Random numbers that a slice drew in forward, drawn again when backward computes it again.

Dropout masks that backward finds again: each rank draws its own, for each slice from a generator
that is seeded for this slice of this call.

A call's key is drawn from torch's CPU generator. So each call has another key, and
`torch.utils.checkpoint` draws the same one again.

Dropout inside of a module that rotates as a whole: which masks its slices draw.

[Note: Dropout in slices]

Let y_j be what slice j computes, so that the module's output is the sum of all y_j. A dropout acts
on one of three kinds of tensors:

* What is computed with the first layers, such as attention's probabilities or an MLP's hidden
  width. Each slice has entries of its own, so each draws a mask of its own.
* What is computed with the last layer. Each slice has a part of every entry there, and mask * (sum
  of y_j) is the sum of mask * y_j, so all slices of one call use one mask.
* What goes into the first layers. It is whole in every slice: one mask, too.

Which one it is shows the order of the forward: a dropout is called before the first use of the
first layers' weights, after that, or after the first use of the last layer's. A use makes a tensor
of the weight, as `F.linear` does, or `x @ weight.T`. An argument of the call is dropped out as what
goes into the first layers, whenever that is. The first call in training compares the order with
what was computed from what.

A mask is that of the call's key (`DropoutMasks`), of the dropout's number in the forward, of the
rank, and of the slice where each has its own. So backward finds it again in whichever order slices
come, and a call takes one number from torch's generator, whether it is computed again or not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from hashlib import blake2b
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from gyre_trainer.comm.ring import Ring


def generators_of(device: torch.device) -> list[torch.Generator]:
    """The generators that a module with parameters on ``device`` draws from; the CPU's is first."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators


def states_of(generators: Sequence[torch.Generator]) -> list[Tensor]:
    """The states of generators, as `set_states` takes them."""
    with torch._C._DisableTorchDispatch():
        return [generator.get_state() for generator in generators]


def set_states(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    """Give generators their states of another moment."""
    with torch._C._DisableTorchDispatch():
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


class Randomness:
    """The states of torch's generators before each slice; backward draws the same numbers again."""

    def __init__(self, device: torch.device) -> None:
        """``device`` is that of the parameters; the CPU's generator is replayed, too."""
        self._generators = generators_of(device)
        self._states: dict[int, list[Tensor]] = {}

    def record(self, index: int) -> None:
        """Note the states: slice ``index`` computes now for the first time."""
        self._states[index] = states_of(self._generators)

    @contextmanager
    def replaying(self, index: int) -> Iterator[None]:
        """A context in which slice ``index`` draws the same random numbers once more."""
        now = states_of(self._generators)
        set_states(self._generators, self._states.pop(index))
        try:
            yield
        finally:
            set_states(self._generators, now)


MASKS_ARGUMENT = "_dropout_masks"  # the keyword argument that takes a call's masks to its slices


def new_key() -> int:
    """The key of one call, drawn from torch's CPU generator."""
    with torch._C._DisableTorchDispatch():  # a fake tensor has no value
        return int(torch.randint(2**62, ()))


@dataclass(frozen=True, slots=True)
class DropoutMasks:
    """The dropout masks of one call.

    Attributes:
        key: the call's key.
        ring: the ring that the batch is spread over.
        first: the index of the first entry along the last dim. It differs between slices of a
            sliced dim.
        positions: numbers the masks of one call.
    """

    key: int
    ring: Ring
    first: int = 0
    positions: Iterator[int] = field(default_factory=count)

    def for_slice(self, first: int) -> "DropoutMasks":
        """The masks of one slice, which begins at ``first`` along the last dim."""
        return replace(self, first=first, positions=count())

    def apply(self, x: Tensor, p: float) -> Tensor:
        """``x`` with each entry set to 0 with probability ``p``, else divided by 1 - p."""
        generator = torch.Generator(x.device).manual_seed(self.next_seed())
        kept = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(
            1 - p, generator=generator
        )
        return torch.where(kept, x, 0).mul_(1 / (1 - p) if p < 1 else 0.0)

    def next_seed(self) -> int:
        """The seed of the next mask."""
        return _seed(self.key, next(self.positions), self.ring.part, self.first)


def _seed(*numbers: int) -> int:
    digest = blake2b(
        b"".join(number.to_bytes(8, "little") for number in numbers), digest_size=8
    ).digest()
    return int.from_bytes(digest, "little", signed=True)


_ATTENTION = F.scaled_dot_product_attention


class Place(Enum):
    """Where a forward drops out: before its first layers, behind them, or behind its last one."""

    BEFORE = auto()
    INSIDE = auto()
    AFTER = auto()


@dataclass(frozen=True, slots=True)
class Dropout:
    """What one call drops out.

    Attributes:
        place: where in the forward.
        shape: of the tensor.
        rate: the probability of each entry to be dropped.
        takes_grad: whether the tensor takes a gradient.
    """

    place: Place
    shape: tuple[int, ...]
    rate: float
    takes_grad: bool


@dataclass(frozen=True, slots=True)
class Undropped:
    """In the place of a call's masks: nothing is dropped, and ``seen`` tells what would be."""

    seen: list[Dropout] = field(default_factory=list)

    def for_slice(self, _first: int) -> "Undropped":
        """The same for a slice."""
        return self

    def apply(self, x: Tensor, _rate: float) -> Tensor:
        """``x`` itself."""
        return x


Masks = DropoutMasks | Undropped


def may_drop_out(module: nn.Module) -> bool:
    """Whether a module is in training, or one inside alone, such as a dropout."""
    return any(each.training for each in module.modules())


def dropout_inside(
    weights: Mapping[str, Tensor], last: Sequence[str], masks: Masks, arguments: Any = ()
) -> AbstractContextManager[object]:
    """A context in which a module's forward drops out by ``masks``.

    Args:
        weights: the tensors in the place of the parameters that are cut, by name.
        last: names of those of the last layer.
        masks: of the slice.
        arguments: of the call, in any form: what of them is dropped out is whole in every slice.
    """
    closing = {id(tensor) for name, tensor in weights.items() if name in last}
    opening = {id(tensor) for tensor in weights.values()} - closing
    given = {id(each) for each in tree_leaves(arguments) if isinstance(each, Tensor)}
    return _DropoutInside(opening, closing, masks, given)


class _DropoutInside(TorchFunctionMode):
    def __init__(self, first: set[int], last: set[int], masks: Masks, given: set[int]) -> None:
        super().__init__()
        self._first, self._last, self._masks, self._given = first, last, masks, given
        self._place = Place.BEFORE

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout or func is torch.dropout:
            return self._drop(func, *args, **kwargs)
        if func is _ATTENTION:
            return self._attend(*args, **kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):  # not a weight's dtype or shape
            self._note(id(each) for each in (*args, *kwargs.values()))
        return result

    def _note(self, ids: Iterator[int]) -> None:
        for each in ids:
            if each in self._last:
                self._place = Place.AFTER
            elif each in self._first and self._place is Place.BEFORE:
                self._place = Place.INSIDE

    def _drop(
        self,
        func: Callable[..., Tensor],
        input: Tensor,  # noqa: A002  # torch's name
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        train: bool | None = None,
    ) -> Tensor:
        rate = p if (training if train is None else train) else 0.0
        if not 0.0 < rate <= 1.0:
            return func(input, p, False)  # torch refuses a wrong probability
        place = Place.BEFORE if id(input) in self._given else self._place
        if isinstance(self._masks, Undropped):
            self._see(place, tuple(input.shape), rate, input.requires_grad)
            return input.mul_(1) if inplace else input  # a trial sees that it is written to
        dropped = self._masks_at(place, self._masks).apply(input, rate)
        return input.copy_(dropped) if inplace else dropped

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **others: Any,
    ) -> Tensor:
        others["is_causal"] = is_causal
        if not dropout_p:
            return _ATTENTION(query, key, value, attn_mask, dropout_p, **others)
        if isinstance(self._masks, Undropped):
            takes_grad = any(each.requires_grad for each in (query, key, value))
            shape = *query.shape[:-1], key.shape[-2]
            self._see(self._place, shape, dropout_p, takes_grad)
            return _ATTENTION(query, key, value, attn_mask, 0.0, **others)
        with _seeded(self._masks_at(self._place, self._masks).next_seed(), query.device):
            return _ATTENTION(query, key, value, attn_mask, dropout_p, **others)

    def _masks_at(self, place: Place, masks: DropoutMasks) -> DropoutMasks:
        """Those of the slice inside, and those of all slices elsewhere; they share a count."""
        return masks if place is Place.INSIDE else replace(masks, first=0)

    def _see(self, place: Place, shape: tuple[int, ...], rate: float, takes_grad: bool) -> None:
        assert isinstance(self._masks, Undropped)
        self._masks.seen.append(Dropout(place, shape, rate, takes_grad))


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """A context in which torch's generators begin at ``seed``; afterwards they are as before."""
    generators = generators_of(device)
    before = states_of(generators)
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        set_states(generators, before)
