"""`gyre-train memory`: the live bytes of one step over time, by category, drawn for each strategy on the same axes."""

from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from gyre_trainer.accounting.live_bytes import CATEGORIES
from gyre_trainer.accounting.plan_tables import Accounts, mib
from gyre_trainer.accounting.step_cost import Account

_COLOURS = ("#1f4e8c", "#c0562f", "#7a5195", "#d9a441", "#9db8d9", "#5b7f4a")  # in the order of the categories
_PHASES = {"forward": "F", "backward": "B", "update": "U"}


def draw(taken: Accounts, title: str, path: Path) -> None:
    """Stacked areas as a PNG, one panel for each strategy; dashed lines are where forward, backward and update begin."""
    figure, panels = plt.subplots(
        1, len(taken), figsize=(4 * len(taken), 4.6), dpi=144, sharey=True, layout="constrained", facecolor="white"
    )
    highest = max(account.timeline.peak_bytes for account in taken.values()) / 2**20
    for axes, (strategy, account) in zip(np.atleast_1d(panels), taken.items(), strict=True):
        _draw_step(axes, account, highest)
        axes.set_title(strategy, loc="left", fontsize=11)
    first = np.atleast_1d(panels)[0]
    first.set_ylabel("live on one rank, MiB")
    handles, names = first.get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], loc="outside right center", frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.savefig(path)
    plt.close(figure)


def _draw_step(axes: Axes, account: Account, highest: float) -> None:
    timeline = account.timeline
    moments = np.arange(len(timeline.events))
    layers = [timeline.live[:, column] / 2**20 for column in range(len(CATEGORIES))]
    axes.stackplot(moments, *layers, labels=CATEGORIES, colors=_COLOURS, step="post", linewidth=0)
    for place, event in enumerate(timeline.events):
        if event in _PHASES:
            axes.axvline(place, color="#555555", linewidth=0.7, linestyle="--")
            axes.text(place, highest * 1.11, _PHASES[event], fontsize=8, color="#555555")
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
