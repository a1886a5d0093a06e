"""What a finished run leaves to be read: `report.json` and `loss.png`, both made of its committed history."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import numpy.typing as npt

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from gyre_trainer.training.records.history import StepRecord
from gyre_trainer.training.records.shuffle import ShuffleCheck

FINAL_STEPS = 20  # the final loss is the mean of so many


@dataclass(frozen=True, slots=True)
class Report:
    """A run in figures.

    Attributes:
        steps: on the committed lineage.
        final_loss: mean of the last FINAL_STEPS steps, in nats per target.
        tokens_per_s: targets of all ranks per second, over all committed steps; evaluation and checkpoints are left out.
        data_wait_share: of the same time, waiting for a batch, on the rank that waited longest.
        epochs: passes over the dataset, in fractions.
        position: the stream's next position: samples consumed by all ranks.
        peak_memory_bytes: of each rank: the device's allocator on CUDA, else the process's resident memory.
        resumed_at: the steps at which the run was taken up again.
        shuffle: what this process, since it started, saw of the order.
        eval_loss: of the newest evaluation; None without one.
    """

    steps: int
    final_loss: float
    num_tokens: int
    tokens_per_s: float
    data_wait_share: float
    epochs: float
    position: int
    world_size: int
    num_parameters: int
    peak_memory_bytes: tuple[int, ...]
    resumed_at: tuple[int, ...]
    shuffle: ShuffleCheck
    eval_loss: float | None


def write_report(report: Report, path: Path) -> None:
    """The report as JSON."""
    path.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")


def final_loss(records: Sequence[StepRecord]) -> float:
    """Mean loss of the last FINAL_STEPS records."""
    last = records[-FINAL_STEPS:]
    return sum(record.loss for record in last) / len(last)


def draw_loss(records: Sequence[StepRecord], resumed_at: Sequence[int], title: str, path: Path) -> None:
    """The loss of every step, smoothed as well, the learning rate below, and where the run was resumed, as a PNG."""
    steps = np.array([record.step + 1 for record in records])
    losses = np.array([record.loss for record in records])
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9, 6), dpi=144, sharex=True, height_ratios=[4, 1], layout="constrained", facecolor="white"
    )
    above.plot(steps, losses, color="#9db8d9", linewidth=0.9, label="each step")
    above.plot(steps, smooth(losses), color="#1f4e8c", linewidth=2.0, label="smoothed")
    end = final_loss(records)
    above.axhline(end, color="#1f4e8c", linewidth=0.9, linestyle=":", label=f"{end:.3f}: mean of the last {FINAL_STEPS} steps")
    for index, step in enumerate(resumed_at):
        for axes in (above, below):
            axes.axvline(step, color="#c0562f", linewidth=1.1, linestyle="--", label=None if index else "resumed")
    above.set_title(title, loc="left", fontsize=12)
    above.set_ylabel("loss, nats per token")
    above.legend(frameon=False)
    below.plot(steps, [record.lr for record in records], color="#5b7f4a", linewidth=1.4)
    below.set_ylabel("learning rate")
    below.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    below.set_xlabel("step")
    for axes in (above, below):
        _calm(axes)
    figure.savefig(path)
    plt.close(figure)


def smooth(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Each value's mean with its neighbours under a Gaussian of a fiftieth of the whole; no lag, no pull towards the ends."""
    width = max(1.0, len(values) / 50)
    offsets = np.arange(-int(3 * width), int(3 * width) + 1)
    weights = np.exp(-0.5 * (offsets / width) ** 2)
    sums = np.convolve(values, weights)[len(offsets) // 2 :][: len(values)]
    norms = np.convolve(np.ones_like(values), weights)[len(offsets) // 2 :][: len(values)]
    return np.asarray(sums / norms)


def _calm(axes: Axes) -> None:
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
