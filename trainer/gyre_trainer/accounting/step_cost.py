"""What one step costs a rank: its live bytes over time, and the bytes that it sends."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from gyre_trainer.accounting.live_bytes import Category, LiveBytes, Timeline
from gyre_trainer.accounting.sent_bytes import SentBytes
from gyre_trainer.training.collate import Examples
from gyre_trainer.training.config import TrainConfig
from gyre_trainer.training.gpt import GPT
from gyre_trainer.training.step import Stepper

STEP = "step"
# The first step allocates the optimizer's states and the transient buffers, and learns the order of
# modules in backward. With fewer than two steps the measured one would still allocate some of it.
_NUM_WARM_UP_STEPS = 2


@dataclass(frozen=True, eq=False)
class StepCost:
    """The cost of one step of one rank, after the first steps have allocated what lasts.

    Attributes:
        timeline: its marks are "step" and the phases of `gyre_trainer.training.step.Phase`.
        sent_bytes: bytes that this rank sent in the step.
    """

    timeline: Timeline
    sent_bytes: int


def measure_step(model: GPT, config: TrainConfig, examples: Examples) -> StepCost:
    """Take a few steps on the same examples and measure the last one. The model is trained by them.

    Args:
        model: distributed over the ranks of the default process group, all of which do the same.
        config: its optimizer section says what a step does.
        examples: this rank's examples.
    """
    live, sent_bytes = LiveBytes(), SentBytes(dist.get_world_size())
    observer = _Observer(model, live)
    with sent_bytes, live, observer.logits(), warnings.catch_warnings():
        # FSDP2 warns that writing to an output in place would be wrong; this model does not.
        warnings.filterwarnings(
            "ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning
        )
        live.label(Category.PARAMETERS, model.parameters())
        stepper = Stepper(model, config, observer.phase)
        for step in range(_NUM_WARM_UP_STEPS + 1):
            live.mark(STEP)
            before = sent_bytes.total
            stepper.take(examples, step)
        return StepCost(live.timeline().since(STEP), sent_bytes.total - before)


class _Observer:
    """Labels storages and phases while a step runs."""

    def __init__(self, model: GPT, live: LiveBytes) -> None:
        self._model = model
        self._live = live
        self._logits = ExitStack()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context for a phase of the step."""
        self._live.mark(name)
        if name in ("clip", "update"):
            with self._live.during(Category.OPTIMIZER):
                yield
            return
        yield
        if name == "backward":
            self._logits.close()
            self._live.label(
                Category.GRADIENTS, (parameter.grad for parameter in self._model.parameters())
            )

    @contextmanager
    def logits(self) -> Iterator[None]:
        """A context: allocations from the last norm's forward to its backward are logits."""
        hook = self._model.norm.register_forward_hook(self._begin_logits)
        try:
            yield
        finally:
            hook.remove()

    def _begin_logits(self, norm: nn.Module, args: Any, output: Tensor) -> None:
        self._logits.enter_context(self._live.during(Category.LOGITS))
        output.register_hook(self._end_logits)  # type: ignore[no-untyped-call]

    def _end_logits(self, grad: Tensor) -> None:
        self._logits.close()
