"""The report of the quality runs: final losses side by side, and the curves."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch

from benchmarks.loader.markdown import table
from benchmarks.training.ledger import Ledger, Result

COLOURS = ("#d1495b", "#edae49", "#66a182", "#8d99ae")
Runs = dict[str, list[Result]]


@dataclass(frozen=True)
class Chapter:
    """One model's runs.

    Attributes:
        label: the model's name.
        about: its task and its data.
        unit: the unit of its loss.
        runs: by order, one run for each seed.
    """

    label: str
    about: str
    unit: str
    runs: Runs

    @classmethod
    def read(
        cls,
        ledger: Ledger,
        label: str,
        orders: Sequence[str],
        num_seeds: int,
        about: str,
        unit: str,
    ) -> "Chapter":
        """Read the chapter from the ledger."""
        runs = {
            order: [ledger[(seed, label, order)] for seed in range(num_seeds)] for order in orders
        }
        return cls(label, about, unit, runs)


def write(chapters: Sequence[Chapter], introduction: str, out: Path) -> None:
    """Write the page and its picture."""
    call = f"python -m benchmarks.training.quality --out {out}"
    command = f"`{call}`, torch {torch.__version__}, one thread."
    lines = [
        "# What an order is worth",
        "",
        command,
        "",
        introduction,
        "",
        f"![Held-out loss of every order]({out.name}.png)",
        "",
    ]
    for chapter in chapters:
        lines += [
            f"## {chapter.label}",
            "",
            chapter.about,
            "",
            *_losses(chapter),
            "",
            _verdict(chapter),
            "",
        ]
    out.with_suffix(".md").write_text("\n".join(lines))
    _draw(chapters, out.with_suffix(".png"))


def _losses(chapter: Chapter) -> list[str]:
    finals = {order: [run["losses"][-1] for run in runs] for order, runs in chapter.runs.items()}
    best = statistics.mean(finals["full"])
    rows = []
    for order, runs in chapter.runs.items():
        quality = {
            name: statistics.mean(run["quality"][name] for run in runs)
            for name in runs[0]["quality"]
        }
        rows.append(
            (
                order,
                *(f"{loss:.3f}" for loss in finals[order]),
                f"{statistics.mean(finals[order]):.3f}",
                f"{max(finals[order]) - min(finals[order]):.3f}",
                f"{statistics.mean(finals[order]) - best:+.3f}",
                *(f"{value:.2f}" for value in quality.values()),
            )
        )
    seeds = [f"seed {seed}" for seed in range(len(finals["full"]))]
    qualities = list(next(iter(chapter.runs.values()))[0]["quality"])
    header = (
        f"order; held-out loss, {chapter.unit}",
        *seeds,
        "mean",
        "range",
        "over full",
        *qualities,
    )
    return table(header, rows)


def _verdict(chapter: Chapter) -> str:
    finals = {order: [run["losses"][-1] for run in runs] for order, runs in chapter.runs.items()}
    full = statistics.mean(finals["full"])
    others = [
        f"{order} {statistics.mean(losses) - full:+.3f}"
        for order, losses in finals.items()
        if order != "full"
    ]
    spread = max(finals["full"]) - min(finals["full"])
    return f"Beside `full`, whose own seeds are {spread:.3f} apart: {', '.join(others)}."


def _draw(chapters: Sequence[Chapter], path: Path) -> None:
    mpl.use("Agg")
    figure, axes = plt.subplots(
        1, len(chapters), figsize=(6.5 * len(chapters), 4.5), layout="constrained", squeeze=False
    )
    for axis, chapter in zip(axes[0], chapters, strict=True):
        for (order, runs), colour in zip(chapter.runs.items(), COLOURS, strict=True):
            _draw_order(axis, order, runs, colour)
        axis.set(
            title=chapter.label,
            xlabel="steps",
            ylabel=f"held-out loss, {chapter.unit}",
            yscale="log",
        )
        axis.yaxis.set_major_formatter("{x:.1f}")
        axis.yaxis.set_minor_formatter("{x:.1f}")
        axis.legend()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _draw_order(axis: Any, order: str, runs: Sequence[Result], colour: str) -> None:
    """Draw the mean of the seeds and the range between them."""
    steps = runs[0]["steps"]
    looks = list(zip(*(run["losses"] for run in runs), strict=True))
    axis.plot(steps, [statistics.mean(look) for look in looks], color=colour, label=order)
    axis.fill_between(
        steps,
        [min(look) for look in looks],
        [max(look) for look in looks],
        color=colour,
        alpha=0.25,
        linewidth=0,
    )
