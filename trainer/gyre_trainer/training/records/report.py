"""What a finished run leaves: `report.json` and `loss.png`, from its committed history."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gyre_trainer.training.records.history import StepRecord

# The final loss is the mean of this many steps. One step's loss depends on its batch; many more
# would count steps whose weights were worse.
FINAL_STEPS = 20


@dataclass(frozen=True, slots=True)
class Report:
    """A run in figures.

    Attributes:
        steps: steps that led to the final weights.
        final_loss: the mean of the last FINAL_STEPS steps, in nats per target.
        num_tokens: targets of all ranks in all committed steps.
        tokens_per_s: targets of all ranks per second, over all committed steps, without evaluation
            and checkpoints.
        data_wait_share: the share of that time spent waiting for a batch, on the rank that waited
            longest.
        epochs: passes over the dataset, as a fraction.
        position: the stream's next position: samples consumed by all ranks.
        world_size: ranks of the last process.
        num_parameters: parameters of the whole model.
        peak_memory_bytes: the peak of each rank: of CUDA's allocator, or the process's resident
            memory.
        resumed_at: the steps at which the run was resumed.
        eval_loss: the loss of the newest evaluation; None without one.
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
    eval_loss: float | None


def write_report(report: Report, path: Path) -> None:
    """Write the report as JSON."""
    path.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")


def final_loss(records: Sequence[StepRecord]) -> float:
    """The mean loss of the last FINAL_STEPS records."""
    last = records[-FINAL_STEPS:]
    return sum(record.loss for record in last) / len(last)


def draw_loss(
    records: Sequence[StepRecord], resumed_at: Sequence[int], title: str, path: Path
) -> None:
    """Draw each step's loss, its smoothed curve, the learning rate, and the resumes, as a PNG."""
    import matplotlib as mpl  # noqa: PLC0415  # half a second, at the end of a run alone

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    steps = np.array([record.step + 1 for record in records])
    losses = np.array([record.loss for record in records])
    figure, (above, below) = plt.subplots(
        2,
        1,
        figsize=(9, 6),
        dpi=144,
        sharex=True,
        height_ratios=[4, 1],
        layout="constrained",
        facecolor="white",
    )
    above.plot(steps, losses, color="#9db8d9", linewidth=0.9, label="each step")
    above.plot(steps, smoothed(losses), color="#1f4e8c", linewidth=2.0, label="smoothed")
    end = final_loss(records)
    above.axhline(
        end,
        color="#1f4e8c",
        linewidth=0.9,
        linestyle=":",
        label=f"{end:.3f}: mean of the last {FINAL_STEPS} steps",
    )
    for index, step in enumerate(resumed_at):
        for axes in (above, below):
            axes.axvline(
                step,
                color="#c0562f",
                linewidth=1.1,
                linestyle="--",
                label=None if index else "resumed",
            )
    above.set_title(title, loc="left", fontsize=12)
    above.set_ylabel("loss, nats per token")
    above.legend(frameon=False)
    below.plot(steps, [record.lr for record in records], color="#5b7f4a", linewidth=1.4)
    below.set_ylabel("learning rate")
    below.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    below.set_xlabel("step")
    for axes in (above, below):
        _style_axes(axes)
    figure.savefig(path)
    plt.close(figure)


def smoothed(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """``values`` smoothed by a Gaussian of a fiftieth of their number, without lag."""
    width = max(1.0, len(values) / 50)
    offsets = np.arange(-int(3 * width), int(3 * width) + 1)
    weights = np.exp(-0.5 * (offsets / width) ** 2)
    sums = np.convolve(values, weights)[len(offsets) // 2 :][: len(values)]
    norms = np.convolve(np.ones_like(values), weights)[len(offsets) // 2 :][: len(values)]
    return np.asarray(sums / norms)


def _style_axes(axes: Any) -> None:
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
