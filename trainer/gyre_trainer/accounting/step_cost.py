"""The cost of one step for a rank: its live bytes over time, and the bytes that it sends."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from gyre_trainer.accounting.counters import (
    Category,
    LiveBytes,
    Operations,
    SentBytes,
    Timeline,
    Together,
)
from gyre_trainer.training.build import features_of
from gyre_trainer.training.collate import Examples
from gyre_trainer.training.config import TrainConfig
from gyre_trainer.training.step import Stepper

STEP = "step"


@dataclass(frozen=True, eq=False)
class StepCost:
    """The cost of one step of one rank, after the first steps have allocated what lasts.

    Attributes:
        timeline: its marks are "step", and the phases of `gyre_trainer.training.step.Phase`.
        sent_bytes: bytes that this rank sent in the step.
        operations: floating-point operations of this rank in the step.
        assumes_even_routing: whether shapes depend on which experts tokens choose, and each expert
            was assumed to be chosen equally often.
        num_operators: operators that the host started in the step.
    """

    timeline: Timeline
    sent_bytes: int
    operations: int
    assumes_even_routing: bool = False
    num_operators: int = 0


def measure_step(
    model: nn.Module,
    config: TrainConfig,
    examples: Examples,
    num_warm_up_steps: int = 1,
    num_warm_up_tokens: int = 16,
) -> StepCost:
    """Take a few steps on the same examples and measure the last one. The model is trained by them.

    The first step allocates the optimizer's states and learns the order of modules in backward.
    After it, every step of a strategy allocates and releases the same, moment by moment.

    Args:
        model: distributed over the ranks of the default process group, all of which do the same.
        config: its optimizer section decides about a step.
        examples: this rank's examples.
        num_warm_up_steps: steps before the one that is measured. Torch's own DDP needs two: it
            makes its buckets again in the second.
        num_warm_up_tokens: of each example that these steps take: what they allocate for good does
            not depend on more, where all parameters are used.
    """
    live, sent_bytes, operations = LiveBytes(), SentBytes(dist.get_world_size()), Operations()
    observer, counted = _Observer(model, live), Together(live, sent_bytes, operations)
    with live.counting_resizes(), counted, observer.hooks(), warnings.catch_warnings():
        # FSDP2 warns that writing to an output in place would be wrong; this model does not.
        warnings.filterwarnings(
            "ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning
        )
        live.label(Category.PARAMETERS, model.parameters())
        stepper = Stepper(model, config, observer.phase)
        for step in range(num_warm_up_steps):
            stepper.take(examples.shortened(num_warm_up_tokens), step)
        live.mark(STEP)
        sent_before, computed_before = sent_bytes.total, operations.total
        started_before = operations.num_operators
        stepper.take(examples, num_warm_up_steps)
        return StepCost(
            live.timeline().since(STEP),
            sent_bytes.total - sent_before,
            operations.total - computed_before,
            num_operators=operations.num_operators - started_before,
        )


class _Observer:
    """Labels storages and phases while a step runs."""

    def __init__(self, model: nn.Module, live: LiveBytes) -> None:
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
    def hooks(self) -> Iterator[None]:
        """A context: what the head and the loss allocate are logits."""
        hook = features_of(self._model).register_forward_hook(self._begin_logits)
        yield
        hook.remove()

    def _begin_logits(self, norm: nn.Module, args: Any, output: Any) -> None:
        features = output if isinstance(output, Tensor) else output[0]
        self._logits.enter_context(self._live.during(Category.LOGITS))
        if features.requires_grad:  # not where the head alone is trained
            features.register_hook(self._end_logits)

    def _end_logits(self, grad: Tensor) -> None:
        self._logits.close()
