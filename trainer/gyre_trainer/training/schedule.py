"""The learning rate of a step: a linear warm-up, then one of four schedules.

constant             stays at `lr`
cosine               falls to `min_lr` at the last step, as half a cosine (arXiv 1608.03983)
linear               falls to `min_lr` at the last step, by equal amounts
warmup-stable-decay  stays at `lr`, and falls by equal amounts in the last `decay_steps`
                     (arXiv 2404.06395)
"""

import math

from gyre_trainer.training.config import OptimizerConfig


def learning_rate(step: int, num_steps: int, optimizer: OptimizerConfig) -> float:
    """The learning rate of step ``step`` of [0, num_steps).

    It grows in equal amounts to `lr` at the last warm-up step. It depends on the step alone, so a
    resumed run continues exactly.
    """
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    height = _height(step, num_steps, optimizer)
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * height


def _height(step: int, num_steps: int, optimizer: OptimizerConfig) -> float:
    """Where the rate is, from 1 at `lr` to 0 at `min_lr`."""
    if optimizer.schedule == "constant":
        return 1.0
    # The last step before the decay has the peak rate.
    last_at_peak = optimizer.warmup_steps
    if optimizer.schedule == "warmup-stable-decay":
        last_at_peak = num_steps - 1 - optimizer.decay_steps
    done = (step - last_at_peak) / max(1, num_steps - 1 - last_at_peak)
    done = min(1.0, max(0.0, done))
    if optimizer.schedule == "cosine":
        return (1 + math.cos(math.pi * done)) / 2
    return 1 - done
