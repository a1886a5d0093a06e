"""Random numbers that a slice drew in forward, drawn again when backward computes it again."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def generators_of(device: torch.device) -> list[torch.Generator]:
    """The generators that a module with parameters on ``device`` draws from; the CPU's is first."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators


class Randomness:
    """The states of torch's generators before slices that drew random numbers.

    Slices that draw none cost a look at the state, and keep nothing.
    """

    def __init__(self, device: torch.device) -> None:
        """``device`` is that of the parameters; the CPU's generator is replayed, too."""
        self._generators = generators_of(device)
        self._states: dict[int, list[Tensor]] = {}

    @contextmanager
    def recording(self, index: int) -> Iterator[None]:
        """A context in which slice ``index`` computes for the first time."""
        before = self._now()
        yield
        if any(map(_differ, before, self._now())):
            self._states[index] = before

    @contextmanager
    def replaying(self, index: int) -> Iterator[None]:
        """A context in which slice ``index`` draws the same random numbers once more."""
        states = self._states.pop(index, None)
        if states is None:
            yield
            return
        now = self._now()
        self._set(states)
        try:
            yield
        finally:
            self._set(now)

    def _now(self) -> list[Tensor]:
        with torch._C._DisableTorchDispatch():
            return [generator.get_state() for generator in self._generators]

    def _set(self, states: list[Tensor]) -> None:
        with torch._C._DisableTorchDispatch():
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)


def _differ(one: Tensor, other: Tensor) -> bool:
    with torch._C._DisableTorchDispatch():
        return not torch.equal(one, other)
