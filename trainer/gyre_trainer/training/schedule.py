"""The learning rate of a step: linear warm-up, then half a cosine (Loshchilov & Hutter, arXiv 1608.03983)."""

import math

from gyre_trainer.training.config import OptimizerConfig


def learning_rate(step: int, num_steps: int, optimizer: OptimizerConfig) -> float:
    """The rate that step `step` of [0, num_steps) is taken with.

    It grows by equal amounts to `lr` at the last warm-up step and falls to `min_lr` at the last step; a function of the
    step alone, so that a resumed run goes on exactly.
    """
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    num_decay_steps = max(1, num_steps - 1 - optimizer.warmup_steps)
    done = min(1.0, (step - optimizer.warmup_steps) / num_decay_steps)
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * (1 + math.cos(math.pi * done)) / 2
