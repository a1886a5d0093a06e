"""The training loop of all runs. Its wait for data is the time spent in `next()`."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from benchmarks.training.samples import Sample

Batches = Iterator[Sample]
WEIGHT_DECAY = 0.01


@dataclass
class Pace:
    """How fast a run went.

    Attributes:
        first_batch_s: seconds until the first batch; they are not part of the other times.
        elapsed_s: seconds of all steps.
        wait_s: the part of them spent in `next()`.
        num_steps: the number of steps, that of the first batch included.
        losses: the losses of the steps, in nats.
    """

    first_batch_s: float = 0.0
    elapsed_s: float = 0.0
    wait_s: float = 0.0
    num_steps: int = 0
    losses: list[float] = field(default_factory=list)


class Trainer:
    """A model and AdamW, whose rate falls along half a cosine if the number of steps is known."""

    def __init__(self, model: nn.Module, lr: float, num_steps: int | None = None) -> None:
        self.model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=WEIGHT_DECAY)
        self._lr, self._num_steps, self._step = lr, num_steps, 0

    def step(self, batch: Sample) -> float:
        """Take one step on a batch, and return its loss."""
        if self._num_steps:
            for group in self._optimizer.param_groups:
                group["lr"] = self._lr * (1 + math.cos(math.pi * self._step / self._num_steps)) / 2
        self._step += 1
        self._optimizer.zero_grad()
        loss = self.model(batch)
        loss.backward()
        self._optimizer.step()
        return float(loss.item())

    def evaluate(self, batches: Sequence[Sample]) -> float:
        """The mean loss of batches of one size, without learning."""
        self.model.eval()
        with torch.no_grad():
            losses = [float(self.model(batch).item()) for batch in batches]
        self.model.train()
        return sum(losses) / len(losses)


def train_for(trainer: Trainer, open_batches: Callable[[], Batches], duration_s: float) -> Pace:
    """Train until ``duration_s`` seconds have passed since the first batch."""
    pace = Pace()
    began = time.perf_counter()
    batches = open_batches()
    batch = next(batches)
    first = time.perf_counter()
    pace.first_batch_s = first - began
    while True:
        pace.losses.append(trainer.step(batch))
        pace.num_steps += 1
        asked = time.perf_counter()
        pace.elapsed_s = asked - first
        if pace.elapsed_s >= duration_s:
            return pace
        batch = next(batches)
        pace.wait_s += time.perf_counter() - asked
