"""Random numbers that a slice drew in forward, drawn again when backward computes it again."""

from collections.abc import Iterator, Sequence
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
