"""The results about object storage, as Markdown and as a plot, with a verdict on each target."""

import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

from benchmarks.loader.markdown import table

Result = dict[str, float]

BLOCK, WEBDATASET, MOSAIC = (
    "Gyre, order `block`",
    "webdataset, 2 workers",
    "mosaicml-streaming, 2 workers",
)
RINAS, GYRE = "paper-style RINAS, 8 workers", "Gyre"
UNHEDGED, BARRIER = "Gyre, no second requests", "Gyre, a barrier per batch"
UNHEDGED_BARRIER = "Gyre, a barrier per batch, no second requests"


@dataclass(frozen=True)
class Findings:
    """The results of one part.

    Attributes:
        part: its name.
        load_before: load average of the last minute before it began.
        rounds: of each reader or row, the figures of every round.
        text: a comment; the whole result if there are no rounds.
    """

    part: str
    load_before: float
    rounds: dict[str, list[Result]]
    text: str = ""

    def median(self, row: str, figure: str) -> float:
        """The median of a row's rounds."""
        return statistics.median(each[figure] for each in self.rounds[row])

    def ratio(self, row: str, other: str, figure: str = "samples_per_s") -> float:
        """The median of the rounds' ratios of one row to another."""
        pairs = zip(self.rounds[row], self.rounds[other], strict=True)
        return statistics.median(mine[figure] / its[figure] for mine, its in pairs)


def write(found: Sequence[Findings], stem: Path | None) -> None:
    """Write the report with its plot, or print it."""
    lines = report(found, stem.name if stem else "")
    if not stem:
        print("\n".join(line for line in lines if not line.startswith("![")))
        return
    Path(f"{stem}.md").write_text("\n".join(lines) + "\n")
    plot(found, Path(f"{stem}-rates.png"))


def report(found: Sequence[Findings], name: str) -> list[str]:
    """The whole report."""
    lines = [
        "# Object storage, measured",
        "",
        (
            f"`python -m benchmarks.loader.storage.objects --full`: {os.cpu_count()} cores, shared "
            "by the server, a process of its own."
        ),
        "Its first byte is lognormal, p50 20 ms, p99 200 ms.",
        "",
        "## Verdict",
        "",
        *table(
            ("target", "wanted", "measured", "holds"),
            [row for each in found for row in _verdict(each)],
        ),
        "",
        f"![Samples/s]({name}-rates.png)",
        "",
    ]
    for each in found:
        lines += _section(each)
    return lines[:-1]


def _verdict(found: Findings) -> Iterator[tuple[str, str, str, str]]:
    if found.part == "T":
        yield _at_least("T, `full` cold, to RINAS with 8 workers", 4.0, found.ratio(GYRE, RINAS))
        yield _at_least("T, `full` cold, samples/s", 10_000, found.median(GYRE, "samples_per_s"))
        yield _at_most(
            "T, first batch after the session opens, s", 0.3, found.median(GYRE, "first_batch_s")
        )
        yield _at_least("T, the window to a barrier per batch", 2.5, found.ratio(GYRE, BARRIER))
        yield _at_least(
            "T, p99 wait without second requests to with",
            2.0,
            found.ratio(UNHEDGED, GYRE, "p99_wait_s"),
        )
        extra = found.ratio(BARRIER, UNHEDGED_BARRIER, "requests_per_sample")
        yield _at_most("T, requests with second ones to without, at the barrier", 1.06, extra)
    if found.part == "S":
        yield (
            "S, `full` cold, to RINAS with 8 workers",
            "-",
            f"{found.ratio(GYRE, RINAS):.2f}",
            "-",
        )
    if found.part == "shards":
        for other in found.rounds.keys() - {BLOCK}:
            yield (f"T, `block` to {other}", "-", f"{found.ratio(BLOCK, other):.2f}", "-")
    if found.part == "orders":
        yield _at_least(
            "T, `block` cold, samples/s", 30_000, found.median("block", "samples_per_s")
        )
        yield _at_least(
            "T, `block`, worst of displacement, spread, mixing",
            0.95,
            found.median("block", "quality"),
        )
        yield _at_most(
            "T, `block`, bytes read to the data's", 1.05, found.median("block", "bytes_to_data")
        )
        yield _at_least(
            "T, from a warm disk cache, to local files", 0.5, found.ratio("disk cache", "local")
        )
        for row in ("two jobs, full", "two jobs, block"):
            yield _at_most(
                f"T, {row}, different seeds: bytes read to the data's",
                1.0,
                found.median(row, "bytes_to_data"),
            )


def _at_least(what: str, wanted: float, measured: float) -> tuple[str, str, str, str]:
    return what, f">= {wanted:,g}", f"{measured:,.2f}", "yes" if measured >= wanted else "**no**"


def _at_most(what: str, wanted: float, measured: float) -> tuple[str, str, str, str]:
    return (
        what,
        f"<= {wanted:,g}",
        f"{measured:,.3f}",
        "yes" if round(measured, 3) <= wanted else "**no**",
    )


def _section(found: Findings) -> list[str]:
    load = f"Load average at the start: {found.load_before:.1f}."
    if found.part == "clients":
        return ["## What a request costs the daemon, by client", "", found.text, ""]
    if found.part == "orders":
        return ["## Blocks and the cache", "", load, "", *_orders(found), ""]
    if found.part == "shards":
        return [
            "## T by whole shards",
            "",
            (
                f"{found.text} Mixing is how far apart in the dataset batch-mates are, on average; "
                f"1 for a uniform shuffle. {load}"
            ),
            "",
            *_shards(found),
            "",
        ]
    note = (
        " Requests per sample count what was prefetched and not taken; CPU is that of reader, "
        "workers and daemon, in "
        "microseconds, and the server's next to it. "
    )
    return [
        f"## {found.part}: every sample a request",
        "",
        found.text + note + load,
        "",
        *_readers(found),
        "",
    ]


def _readers(found: Findings) -> list[str]:
    header = (
        "reader", "samples/s", "to RINAS", "first batch, s", "p50 wait, ms", "p99 wait, ms",
        "requests per sample",
        "CPU per sample", "server's CPU per request",
    )  # fmt: skip
    rows = [
        (
            row,
            f"{found.median(row, 'samples_per_s'):,.0f}",
            f"{found.ratio(row, RINAS):.2f}",
            f"{found.median(row, 'first_batch_s'):.2f}",
            f"{found.median(row, 'p50_wait_s') * 1000:.0f}",
            f"{found.median(row, 'p99_wait_s') * 1000:.0f}",
            f"{found.median(row, 'requests_per_sample'):.3f}",
            f"{found.median(row, 'cpu_us_per_sample'):,.0f}",
            f"{found.median(row, 'server_us_per_request'):,.0f}",
        )
        for row in found.rounds
    ]
    rates = "; ".join(
        f"{row} " + ", ".join(f"{each['samples_per_s']:,.0f}" for each in its)
        for row, its in found.rounds.items()
    )
    return [*table(header, rows), "", f"The rounds in their order, samples/s: {rates}."]


def _shards(found: Findings) -> list[str]:
    header = (
        "reader",
        "samples/s",
        "first batch, s",
        "p99 wait, ms",
        "mixing",
        "CPU us per sample",
    )
    rows = [
        (
            row,
            f"{found.median(row, 'samples_per_s'):,.0f}",
            f"{found.median(row, 'first_batch_s'):.2f}",
            f"{found.median(row, 'p99_wait_s') * 1000:.0f}",
            f"{found.median(row, 'mixing'):.2f}",
            f"{found.median(row, 'cpu_us_per_sample'):,.0f}",
        )
        for row in found.rounds
    ]
    return table(header, rows)


def _orders(found: Findings) -> list[str]:
    cold = ("block", "two jobs, full", "two jobs, block")
    header = (
        "an epoch of T, cold", "samples/s of each job", "first batch, s", "requests",
        "past the cache", "bytes to data",
        "daemon's CPU us per sample",
    )  # fmt: skip
    rows = [
        (
            row,
            f"{found.median(row, 'samples_per_s'):,.0f}",
            f"{found.median(row, 'first_batch_s'):.2f}",
            f"{found.median(row, 'requests'):,.0f}",
            f"{found.median(row, 'past'):,.0f}",
            f"{found.median(row, 'bytes_to_data'):.3f}",
            f"{found.median(row, 'cpu_us_per_sample'):.1f}",
        )
        for row in cold
    ]
    warm = [
        (
            row,
            f"{found.median(row, 'samples_per_s'):,.0f}",
            f"{found.ratio(row, 'local'):.2f}",
            f"{found.median(row, 'first_batch_s'):.3f}",
        )
        for row in ("local", "disk cache")
    ]
    return [
        *table(header, rows),
        "",
        (
            "Epochs of local files and of a disk cache that has all of T, in turn, with 64 MiB of "
            "memory for blocks:"
        ),
        "",
        *table(("where T lies", "samples/s", "to local", "first batch, s"), warm),
    ]


def plot(found: Sequence[Findings], path: Path) -> None:
    """Samples/s of every reader."""
    mpl.use("Agg")
    shown = [each for each in found if each.part in ("T", "S")]
    figure, axes = plt.subplots(
        1,
        max(1, len(shown)),
        figsize=(7 * max(1, len(shown)), 3),
        layout="constrained",
        squeeze=False,
    )
    for axis, each in zip(axes[0], shown, strict=False):
        rows = list(each.rounds)[::-1]
        bars = axis.barh(rows, [each.median(row, "samples_per_s") for row in rows], color="#d1495b")
        bars[-1].set_color("#8d99ae")
        axis.bar_label(bars, fmt=" {:,.0f}")
        axis.set(xlabel="samples/s", title=f"{each.part}, `full`, cold")
        axis.margins(x=0.2)
    figure.savefig(path, dpi=100)
    plt.close(figure)
