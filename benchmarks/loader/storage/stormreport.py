"""Throughput before, during and after a fault: as numbers, as a page and as a plot."""

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt

from benchmarks.loader.markdown import table
from benchmarks.loader.plots import GYRE, OTHER

WARM_UP_S = 4.0  # of the job, not counted
# throughput is back when it is at the mark at once, and on average for so long
SPAN_S, STRETCH_S = (5.0, 0.5)
MARK = 0.95


@dataclass
class Course:
    """The course of one job.

    Attributes:
        fault: its name.
        load: load average of the machine at the start.
        begin_s: of the fault, since the job's first batch.
        end_s: of the fault; infinite while it lasts.
        arrivals: time and samples of each batch.
        num_wrong: batches with a wrong byte.
        errors: errors that the job received, each once.
        requests: the daemon's requests to the storage, by outcome.
    """

    fault: str
    load: float = 0.0
    begin_s: float = float("inf")
    end_s: float = float("inf")
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    num_wrong: int = 0
    errors: list[str] = field(default_factory=list)
    requests: dict[str, int] = field(default_factory=dict)


def condensed(arrivals: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Samples by tenths of a second."""
    tenths = Counter[float]()
    for at, num in arrivals:
        tenths[round(at, 1)] += num
    return sorted(tenths.items())


def rate(course: Course, begin_s: float, end_s: float) -> float:
    """Samples/s of an interval."""
    return sum(num for at, num in course.arrivals if begin_s <= at < end_s) / (end_s - begin_s)


def before(course: Course) -> float:
    """Samples/s without the fault."""
    return rate(course, WARM_UP_S, course.begin_s)


def recovery_s(course: Course) -> float | None:
    """How long after the end of the fault throughput has recovered and stays so for a span.

    None if it never recovers.
    """
    last = course.arrivals[-1][0]
    wanted = MARK * before(course)
    for start in np.arange(course.end_s, last - SPAN_S, 0.1):
        if (
            min(rate(course, start, start + STRETCH_S), rate(course, start, start + SPAN_S))
            >= wanted
        ):
            return float(start - course.end_s)
    return None


def extra_requests(course: Course) -> float:
    """The number of requests beyond the needed ones."""
    return sum(course.requests.values()) / course.requests["ok"] - 1


def table_of(courses: Sequence[Course]) -> list[str]:
    """A table with one row for each course."""
    rows = []
    for course in courses:
        back = recovery_s(course)
        duration_s = course.end_s - course.begin_s
        after = rate(course, course.end_s + (back or 0.0), course.arrivals[-1][0])
        rows.append(
            (
                course.fault,
                f"{duration_s:.1f}",
                f"{before(course):,.0f}",
                f"{rate(course, course.begin_s, course.end_s):,.0f}" if duration_s > 1 else "",
                f"{after:,.0f}",
                f"{after / before(course):.2f}",
                "never" if back is None else f"{back:.1f}",
                f"{100 * extra_requests(course):.1f}",
                str(course.num_wrong),
                ", ".join(course.errors) or "none",
            )
        )
    header = (
        "fault",
        "lasted, s",
        "before",
        "during",
        "after",
        "after / before",
        "s to 95 %",
        "extra requests, %",
    )
    return table((*header, "wrong batches", "errors told to the job"), rows)


def page(courses: Sequence[Course], name: str) -> str:
    """The whole page, with the plot."""
    loads = ", ".join(f"{course.load:.1f}" for course in courses)
    about = (
        f"`python -m benchmarks.loader.storage.storms --out docs/benchmarks/{name}`, in parts, "
        "2 cores, Python 3.11. One job reads "
        "samples of 2 KiB in batches of 256 under a full shuffle, as fast as it can, and "
        "compares every byte. Every "
        "sample is a request, but for the last two faults, which are of the node cache. The "
        "server is a process of its "
        "own on the same cores; its first byte is lognormal, p50 20 ms, p99 200 ms. Figures are "
        "samples/s. Throughput "
        "counts as back when it is 95 % of what it was before, at once and on average for "
        f"{SPAN_S:g} s; 'after' is from "
        "there on. Extra requests are all that were sent beyond the needed ones over the whole "
        "of the run: refused, "
        "repeated, sent twice, abandoned. A job that is told an error opens a new session at its "
        "last batch until it "
        f"reads on. Load averages at the start: {loads}."
    )
    lines = [
        "# An object storage in trouble",
        "",
        *textwrap.wrap(about, 128, break_on_hyphens=False),
        "",
        *table_of(courses),
        "",
        f"![Throughput over time, the faults shaded]({name}.png)",
    ]
    return "\n".join(lines) + "\n"


def plot(courses: Sequence[Course], path: Path) -> None:
    """Samples/s over time, one panel for each fault."""
    mpl.use("Agg")
    num_rows = -(-len(courses) // 2)
    figure, axes = plt.subplots(
        num_rows, 2, figsize=(12, 2.2 * num_rows), layout="constrained", squeeze=False
    )
    for axis, course in zip(axes.flat, courses, strict=False):
        edges = np.arange(0.0, course.arrivals[-1][0], 0.5)
        at: npt.NDArray[np.float64] = np.array(course.arrivals)
        counts, _ = np.histogram(at[:, 0], edges, weights=at[:, 1])
        axis.stairs(counts / 0.5, edges, color=GYRE)
        axis.axvspan(
            course.begin_s, max(course.end_s, course.begin_s + 0.2), color=OTHER, alpha=0.4
        )
        axis.axhline(MARK * before(course), color=OTHER, linestyle=":")
        axis.set(title=course.fault, xlabel="s", ylabel="samples/s", ylim=(0, None))
    for axis in axes.flat[len(courses) :]:
        axis.set_visible(False)
    figure.savefig(path, dpi=80)
    plt.close(figure)
