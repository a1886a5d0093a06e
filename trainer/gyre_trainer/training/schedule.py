"""The learning rate of a step: linear warm-up, then half a cosine (arXiv 1608.03983)."""

import math

from gyre_trainer.training.config import OptimizerConfig


def learning_rate(step: int, num_steps: int, optimizer: OptimizerConfig) -> float:
    """The learning rate of step ``step`` of [0, num_steps).

    It grows in equal amounts to `lr` at the last warm-up step and falls to `min_lr` at the last
    step. It depends on the step alone, so a resumed run continues exactly.
    """
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    num_decay_steps = max(1, num_steps - 1 - optimizer.warmup_steps)
    done = min(1.0, (step - optimizer.warmup_steps) / num_decay_steps)
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * (1 + math.cos(math.pi * done)) / 2
