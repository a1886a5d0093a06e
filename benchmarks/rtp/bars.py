"""Peaks of several contenders as stacked bars, one panel for each number of ranks."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from gyre_trainer.accounting.counters import CATEGORIES
from matplotlib import pyplot as plt

# in the order of the categories
_COLOURS = ("#1f4e8c", "#c0562f", "#7a5195", "#d9a441", "#9db8d9")


def draw(rows: Sequence[Mapping[str, int | str]], title: str, path: Path) -> None:
    """Draw a PNG; rows have "ranks", "contender", and bytes by category."""
    nums_ranks = sorted({int(row["ranks"]) for row in rows})
    num_bars = max(sum(row["ranks"] == num_ranks for row in rows) for num_ranks in nums_ranks)
    size = 5.2 * len(nums_ranks) + 2, 0.34 * num_bars + 1.4
    figure, grid = plt.subplots(
        1, len(nums_ranks), figsize=size, dpi=144, sharex=True, squeeze=False, layout="constrained"
    )
    for axes, num_ranks in zip(grid[0], nums_ranks, strict=True):
        here = [row for row in rows if row["ranks"] == num_ranks][::-1]
        left = [0.0] * len(here)
        for category, colour in zip(CATEGORIES, _COLOURS, strict=True):
            widths = [int(row[category]) / 2**30 for row in here]
            if any(widths):
                axes.barh(
                    [str(row["contender"]) for row in here],
                    widths,
                    left=left,
                    color=colour,
                    label=str(category),
                )
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for place, total in enumerate(left):
            axes.text(total, place, f" {total:.1f}", va="center", fontsize=8)
        axes.set_title(f"{num_ranks} ranks", loc="left", fontsize=11)
        axes.set_xlabel("GiB")
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.12)
    figure.legend(
        *grid[0][0].get_legend_handles_labels(), loc="outside right center", frameon=False
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.savefig(path)
    plt.close(figure)
