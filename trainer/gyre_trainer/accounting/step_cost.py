"""What one step takes of a rank: its live bytes over time, by category, and what it sends."""

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
_NUM_WARM_UP_STEPS = 2  # the optimizer's states come with the first, buffers and what is learned from a backward with it too


@dataclass(frozen=True, eq=False)
class StepCost:
    """One step of one rank, when all that lasts from step to step is there.

    Attributes:
        timeline: its marks are "step" and the phases of `gyre_trainer.training.step.Phase`.
        sent_bytes: by this rank.
    """

    timeline: Timeline
    sent_bytes: int


def measure_step(model: GPT, config: TrainConfig, examples: Examples) -> StepCost:
    """Take a few steps on the same examples and look at the last one; the model has moved afterwards.

    Args:
        model: spread over the ranks of the default process group, all of which do the same.
        config: its optimizer's section is what the step does.
        examples: this rank's.
    """
    live, sent_bytes = LiveBytes(), SentBytes(dist.get_world_size())
    observer = _Observer(model, live)
    with sent_bytes, live, observer.logits(), warnings.catch_warnings():
        # FSDP2 warns that writing to an output in place would be wrong; this model does not.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        live.label(Category.PARAMETERS, model.parameters())
        stepper = Stepper(model, config, observer.phase)
        for step in range(_NUM_WARM_UP_STEPS + 1):
            live.mark(STEP)
            before = sent_bytes.sent
            stepper.take(examples, step)
        return StepCost(live.timeline().since(STEP), sent_bytes.sent - before)


class _Observer:
    """Tells the counter what is what while a step runs."""

    def __init__(self, model: GPT, live: LiveBytes) -> None:
        self._model = model
        self._live = live
        self._logits = ExitStack()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase of the step."""
        self._live.mark(name)
        if name in ("clip", "update"):
            with self._live.during(Category.OPTIMIZER):
                yield
            return
        yield
        if name == "backward":
            self._logits.close()
            self._live.label(Category.GRADIENTS, (parameter.grad for parameter in self._model.parameters()))

    @contextmanager
    def logits(self) -> Iterator[None]:
        """Inside, what is allocated between the last norm's forward and its backward counts as logits."""
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
