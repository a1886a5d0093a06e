"""The report of the throughput runs: each loader's rate, and its share of waiting."""

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

from benchmarks.loader.markdown import table
from benchmarks.training.ledger import Ledger, Result
from benchmarks.training.loaders import BATCH_SIZE, NUM_WORKERS, Kind

LABELS: dict[Kind, str] = {
    "memory": "none: local files, read in the trainer",
    "ordered": f"ordered DataLoader, {NUM_WORKERS} workers",
    "rinas": f"paper-style RINAS, {NUM_WORKERS} workers",
    "full": "Gyre, `full`",
    "block": "Gyre, `block`",
}
_SHORT: dict[Kind, str] = {
    "memory": "local files",
    "ordered": "ordered",
    "rinas": "RINAS",
    "full": "Gyre, full",
    "block": "Gyre, block",
}
_COLOURS: dict[Kind, str] = {
    "memory": "#d9d9d9",
    "ordered": "#8d99ae",
    "rinas": "#66a182",
    "full": "#d1495b",
    "block": "#e88a95",
}


@dataclass(frozen=True)
class Chapter:
    """One model's turns.

    Attributes:
        label: the model's name.
        about: its description.
        rounds: by kind of loader, one result per round.
    """

    label: str
    about: str
    rounds: dict[Kind, list[Result]]

    @classmethod
    def read(
        cls, ledger: Ledger, label: str, about: str, kinds: Sequence[Kind], num_rounds: int
    ) -> "Chapter":
        """Read the chapter from the ledger."""
        return cls(
            label,
            about,
            {kind: [ledger[(r, label, kind)] for r in range(num_rounds)] for kind in kinds},
        )

    def rate(self, kind: Kind) -> float:
        """Samples/s, the median of the rounds."""
        return statistics.median(_rates(self.rounds[kind]))

    def gain(self, kind: Kind, over: Kind) -> float:
        """How much faster, as a share; the median of the ratios within rounds."""
        ratios = [
            mine / other
            for mine, other in zip(
                _rates(self.rounds[kind]), _rates(self.rounds[over]), strict=True
            )
        ]
        return statistics.median(ratios) - 1

    def wait(self, kind: Kind) -> float:
        """The share of the time spent in `next()`, the median of the rounds."""
        shares: list[float] = [
            result["wait_s"] / result["elapsed_s"] for result in self.rounds[kind]
        ]
        return statistics.median(shares)

    def disagreement(self) -> float:
        """The largest difference of first losses between loaders that bring the same batches."""
        same = [rounds for kind, rounds in self.rounds.items() if kind != "block"]
        worst = 0.0
        for results in zip(*same, strict=True):
            steps: zip[tuple[float, ...]] = zip(
                *(result["losses"] for result in results), strict=False
            )
            worst = max(worst, *(max(losses) - min(losses) for losses in steps))
        return worst


def write(chapters: Sequence[Chapter], introduction: str, out: Path) -> None:
    """Write the page and its picture."""
    loads = [
        result["load"]
        for chapter in chapters
        for results in chapter.rounds.values()
        for result in results
    ]
    busy = f"load average before a turn {min(loads):.1f} to {max(loads):.1f}"
    command = f"`python -m benchmarks.training.throughput --out {out}`"
    machine = f"{command}, {os.cpu_count()} cores, Python {platform.python_version()}; {busy}."
    lines = [
        "# Training from object storage",
        "",
        machine,
        "",
        introduction,
        "",
        f"![Samples/s and waiting]({out.name}.png)",
        "",
    ]
    for chapter in chapters:
        lines += [
            f"## {chapter.label[0].upper() + chapter.label[1:]}",
            "",
            chapter.about,
            "",
            *_table(chapter),
            "",
            _sameness(chapter),
            "",
        ]
    out.with_suffix(".md").write_text("\n".join(lines))
    _draw(chapters, out.with_suffix(".png"))


def _rates(results: Sequence[Result]) -> list[float]:
    return [result["num_steps"] * BATCH_SIZE / result["elapsed_s"] for result in results]


def _table(chapter: Chapter) -> list[str]:
    rows = []
    for kind, results in chapter.rounds.items():
        rates = _rates(results)
        steps_ms = statistics.median(
            (result["elapsed_s"] - result["wait_s"]) / result["num_steps"] * 1000
            for result in results
        )
        cpu = statistics.median(
            result["cpu_s"] / (result["num_steps"] * BATCH_SIZE) * 1000 for result in results
        )
        rows.append(
            (
                LABELS[kind],
                f"{chapter.rate(kind):,.0f}",
                f"{min(rates):,.0f}-{max(rates):,.0f}",
                "" if kind == "memory" else f"{chapter.gain(kind, 'ordered'):+.0%}",
                "" if kind == "memory" else f"{chapter.gain(kind, 'rinas'):+.0%}",
                f"{chapter.wait(kind):.0%}",
                f"{steps_ms:.1f}",
                f"{statistics.median(result['first_batch_s'] for result in results):.2f}",
                f"{cpu:.2f}",
            )
        )
    header = (
        "loader",
        "samples/s",
        "rounds",
        "over ordered",
        "over RINAS",
        "data wait",
        "step without it, ms",
        "first batch, s",
        "CPU s per 1000",
    )
    return table(header, rows)


def _sameness(chapter: Chapter) -> str:
    num_steps = min(
        len(result["losses"]) for results in chapter.rounds.values() for result in results
    )
    return (
        f"The losses of the first {num_steps} steps differ by at most {chapter.disagreement():.1g} "
        "between the loaders (except `block`, which has other batches): they brought the same "
        "samples."
    )


def _draw(chapters: Sequence[Chapter], path: Path) -> None:
    mpl.use("Agg")
    figure, axes = plt.subplots(
        2, len(chapters), figsize=(4 * len(chapters), 6), layout="constrained", squeeze=False
    )
    for (rates, waits), chapter in zip(axes.T, chapters, strict=True):
        kinds = list(chapter.rounds)
        names, colours = [_SHORT[kind] for kind in kinds], [_COLOURS[kind] for kind in kinds]
        rates.bar_label(
            rates.bar(names, [chapter.rate(kind) for kind in kinds], color=colours), fmt="{:,.0f}"
        )
        rates.set(title=chapter.label, ylabel="samples/s")
        waits.bar_label(
            waits.bar(names, [chapter.wait(kind) * 100 for kind in kinds], color=colours),
            fmt="{:.0f} %",
        )
        waits.set(ylim=(0, 110), ylabel="share of the time waiting for data, %")
        for axis in (rates, waits):
            axis.tick_params(axis="x", rotation=30)
            axis.margins(y=0.12)
    figure.savefig(path, dpi=100)
    plt.close(figure)
