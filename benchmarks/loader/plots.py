"""The results as plots."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

from benchmarks.loader.compare import Rates
from benchmarks.loader.data import Workload
from benchmarks.loader.parts.growth import Size
from benchmarks.loader.parts.sessions import Crowd

GYRE, OTHER = "#d1495b", "#8d99ae"


def plot_rates(sets: Sequence[Workload], rates: Rates, path: Path) -> None:
    """Samples/s of every contender, by workload."""
    mpl.use("Agg")
    figure, axes = plt.subplots(
        1, len(sets), figsize=(6 * len(sets), 7), layout="constrained", sharey=True
    )
    for axis, workload in zip(axes, sets, strict=True):
        contenders = list(rates[workload.name])[::-1]
        values = [rates[workload.name][each]["samples_per_s"] for each in contenders]
        colours = [GYRE if each.kind == "gyre" else OTHER for each in contenders]
        bars = axis.barh([each.label for each in contenders], values, color=colours)
        axis.bar_label(bars, [f" {value:,.0f}" for value in values])
        axis.set(
            xlabel="samples/s of each job", title=f"{workload.name}, batch {workload.batch_size}"
        )
        axis.set_xlim(0, max(values) * 1.25)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def plot_growth(sizes: Sequence[Size], path: Path) -> None:
    """Plot the cost of more samples."""
    mpl.use("Agg")
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    counts = [size.num_samples for size in sizes]
    panels = (
        ("daemon's memory over idle, MiB", [size.daemon_bytes / 2**20 for size in sizes]),
        ("session open to first batch, ms", [size.first_batch_s * 1e3 for size in sizes]),
        ("order, ns per position", [size.ns_per_position for size in sizes]),
    )
    for axis, (title, values) in zip(axes, panels, strict=True):
        axis.plot(counts, values, "o-", color=GYRE)
        axis.set(xscale="log", xlabel="samples", title=title, ylim=(0, 1.3 * max(values)))
    figure.savefig(path, dpi=100)
    plt.close(figure)


def plot_sessions(crowds: Sequence[Crowd], path: Path) -> None:
    """Plot the cost of more sessions."""
    mpl.use("Agg")
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    for same_order, colour, label in ((True, GYRE, "one order"), (False, OTHER, "an order each")):
        some = [each for each in crowds if each.same_order == same_order]
        counts = [each.num_sessions for each in some]
        panels = (
            ("samples/s in sum", [each.samples_per_s for each in some]),
            ("samples/s of each", [each.samples_per_s / each.num_sessions for each in some]),
            ("daemon's memory, MiB", [each.daemon_bytes / 2**20 for each in some]),
        )
        for axis, (title, values) in zip(axes, panels, strict=True):
            axis.plot(counts, values, "o-", color=colour, label=label)
            axis.set_xscale("log", base=2)
            axis.set(xlabel="sessions", title=title)
    for axis in axes:
        axis.set_ylim(bottom=0)  # not before: it would keep the limits of the lines drawn so far
    axes[0].legend()
    figure.savefig(path, dpi=100)
    plt.close(figure)
