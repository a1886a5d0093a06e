"""One optimizer step on a global batch: forward, backward, clipping, update."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from gyre_trainer.comm.ring import collective
from gyre_trainer.rotate import Adafactor, AdamW8bit, Muon, no_sync, stochastically_rounded
from gyre_trainer.training.build import blocks_of, loss_of
from gyre_trainer.training.collate import Examples
from gyre_trainer.training.config import OptimizerConfig, TrainConfig, learning_rate
from gyre_trainer.training.losses import Loss

Phase = Callable[[str], AbstractContextManager[object]]
"""Gives the context that a step enters for a phase: "forward", "backward", "clip" or "update"."""


class Stepper:
    """A model, its loss and its optimizer."""

    def __init__(self, model: nn.Module, config: TrainConfig, phase: Phase = nullcontext) -> None:
        """Make the optimizer. ``phase`` gives the context of each phase."""
        self.model = model
        self.loss = loss_of(model)
        self.optimizers = build_optimizers(model, config)
        self._config = config
        self._phase = phase

    def take(self, examples: Examples, step: int) -> Tensor:
        """Take one optimizer step on the mean gradient of all targets of the global batch.

        Args:
            examples: this rank's examples.
            step: the step's number, for the learning rate.

        Returns:
            This rank's loss, summed over its targets, in nats: a scalar.
        """
        settings = self._config.optimizer
        rate = learning_rate(step, self._config.run.steps, settings)
        for group in (group for each in self.optimizers for group in each.param_groups):
            group["lr"] = rate
        weight = 1 / _mean_num_targets(examples)
        *parts, last = examples.split(settings.accumulation_steps)
        with self._postponed_averaging():
            sums = [self._accumulate(part, weight) for part in parts]
        sums.append(self._accumulate(last, weight))
        if settings.clip_norm:
            with self._phase("clip"), collective("the norm of all gradients"):
                nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip_norm)
        with self._phase("update"):
            for optimizer in self.optimizers:
                optimizer.step()
        self.model.zero_grad()
        return torch.stack(sums).sum()

    def _postponed_averaging(self) -> AbstractContextManager[object]:
        """A context in which replicated gradients are not averaged; the last backward does it.

        FSDP2 would need memory for whole gradients, so this does nothing under FSDP2.
        """
        return no_sync(self.model) if hasattr(self.model, "grad_averaging") else nullcontext()

    def _accumulate(self, part: Examples, weight: float) -> Tensor:
        """Add the gradient of ``weight`` times the part's loss.

        Returns:
            The part's loss, summed over its targets.
        """
        with self._phase("forward"):
            loss = loss_sum(self.model, self.loss, part)
        with self._phase("backward"):
            (loss * weight).backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def loss_sum(model: nn.Module, loss: Loss, examples: Examples) -> Tensor:
    """The loss summed over these rows' targets; 0, with zero gradients, if there are none."""
    device = next(model.parameters()).device
    here, num_targets = examples.to(device), examples.num_targets()
    mean: Tensor = loss(
        here.inputs,
        here.targets,
        examples.counts if num_targets else None,  # of the host, which counts them
        here.positions,
    )
    return mean * num_targets


def _mean_num_targets(examples: Examples) -> float:
    """Targets per rank, averaged over the ranks.

    Ranks average their gradients, so with this denominator every target of the global batch counts
    the same.
    """
    if examples.counts is None:
        return examples.num_targets()
    total = torch.tensor(examples.num_targets(), dtype=torch.float64)
    with collective("the number of targets of the global batch"):
        dist.all_reduce(total)
    return max(1.0, float(total)) / dist.get_world_size()


def build_optimizers(model: nn.Module, config: TrainConfig) -> list[Optimizer]:
    """The configured optimizer, with weight decay for matrices alone; two of them for Muon.

    No decay of vectors is as Radford et al. (2019) and later models train.
    """
    settings = config.optimizer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if settings.name == "muon":
        inside = {id(each) for block in blocks_of(model) for each in block.parameters()}
        matrices = [each for each in trained if id(each) in inside and each.ndim == 2]
        others = [each for each in trained if id(each) not in inside or each.ndim != 2]
        # of the size of AdamW's updates (arXiv 2502.16982), so that both take one learning rate
        muon = Muon(
            matrices,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        return [muon, AdamW(_groups(others, settings), **_options(settings))]
    kind = _KINDS[settings.name]
    if not settings.stochastic_rounding:
        return [kind(_groups(trained, settings), **_options(settings))]
    made = stochastically_rounded(kind)
    return [made(_groups(trained, settings), rounding_seed=config.run.seed, **_options(settings))]


_KINDS: dict[str, Any] = {"adamw": AdamW, "adamw-8bit": AdamW8bit, "adafactor": Adafactor}


def _groups(parameters: Sequence[nn.Parameter], settings: OptimizerConfig) -> list[dict[str, Any]]:
    """Matrices and vectors, each with its own weight decay."""
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _options(settings: OptimizerConfig) -> dict[str, Any]:
    if settings.name == "adafactor":
        return {"lr": settings.lr}
    return {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
