"""`gyre-train memory`: a figure of the live bytes of one step over time, for each strategy."""

from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from gyre_trainer.accounting.live_bytes import CATEGORIES
from gyre_trainer.accounting.modules_table import mib
from gyre_trainer.accounting.plan_tables import StepCosts
from gyre_trainer.accounting.step_cost import StepCost

# in the order of the categories
_COLOURS = ("#1f4e8c", "#c0562f", "#7a5195", "#d9a441", "#9db8d9", "#5b7f4a")
_PHASES = {"forward": "F", "backward": "B", "update": "U"}


def draw(costs: StepCosts, title: str, path: Path) -> None:
    """Draw stacked areas by category as a PNG, with one panel for each strategy on the same axes.

    Dashed lines show where forward, backward and update begin.
    """
    figure, panels = plt.subplots(
        1,
        len(costs),
        figsize=(4 * len(costs), 4.6),
        dpi=144,
        sharey=True,
        layout="constrained",
        facecolor="white",
    )
    highest = max(cost.timeline.peak_bytes for cost in costs.values()) / 2**20
    for axes, (strategy, cost) in zip(np.atleast_1d(panels), costs.items(), strict=True):
        _draw_step(axes, cost, highest)
        axes.set_title(strategy, loc="left", fontsize=11)
    first = np.atleast_1d(panels)[0]
    first.set_ylabel("live on one rank, MiB")
    handles, names = first.get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], loc="outside right center", frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.savefig(path, format="png")
    plt.close(figure)


def _draw_step(axes: Axes, cost: StepCost, highest: float) -> None:
    timeline = cost.timeline
    moments = np.arange(len(timeline.events))
    layers = [timeline.live[:, column] / 2**20 for column in range(len(CATEGORIES))]
    axes.stackplot(moments, *layers, labels=CATEGORIES, colors=_COLOURS, step="post", linewidth=0)
    for index, event in enumerate(timeline.events):
        if event in _PHASES:
            axes.axvline(index, color="#555555", linewidth=0.7, linestyle="--")
            axes.text(index, highest * 1.11, _PHASES[event], fontsize=8, color="#555555")
    peak = timeline.peak_bytes / 2**20
    axes.annotate(
        f"{mib(timeline.peak_bytes)}",
        (timeline.peak_index, peak),
        xytext=(timeline.peak_index, highest * 1.05),
        ha="center",
        fontsize=10,
        fontweight="bold",
        arrowprops={"arrowstyle": "-", "color": "#333333", "linewidth": 0.7},
    )
    axes.set_ylim(0, highest * 1.16)
    axes.set_xlabel("allocations and releases of one step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0)
