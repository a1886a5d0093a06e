"""The whole comparison in one run.

`python -m benchmarks.loader.proof --out docs/benchmarks/DATE-loader` writes DATE-loader.md and its
plots. The verdict at the top compares each target with what this run measured.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.loader import compare, identical
from benchmarks.loader.compare import Form, Rates, best
from benchmarks.loader.data import Workload, workloads, write_tokens
from benchmarks.loader.markdown import table
from benchmarks.loader.parts import growth, sessions, transport, widened
from benchmarks.loader.plots import plot_growth, plot_rates, plot_sessions
from benchmarks.loader.processes import MEMORY_SLACK_BYTES, Daemon, daemon
from benchmarks.loader.race import Contender, Result
from benchmarks.loader.readers import WARMUP

MAX_DEVIATION = 0.10  # how far from the mean a job may be
MAX_FIRST_BATCH_S = 0.05


@dataclass
class Findings:
    """The results of one run."""

    sets: list[Workload]
    rates: Rates
    ids: Workload
    widened: dict[Contender, Result]
    transport: transport.Transport
    same: list[identical.Sameness]
    tokens: list[growth.Size]
    tars: list[growth.Size]
    crowds: list[sessions.Crowd]
    daemons: dict[str, Daemon]

    def lines(self, name: str, title: list[str]) -> list[str]:
        """The whole report, as Markdown."""
        tars = (
            [
                "Tar shards (the index has 16 bytes for each sample and field):",
                "",
                *growth.report(self.tars),
            ]
            if self.tars
            else []
        )
        return [
            *title,
            "## Verdict",
            "",
            *table(("target", "wanted", "measured", "holds"), self._verdict()),
            "",
            "## Beside others",
            "",
            f"![Samples/s of every loader]({name}-rates.png)",
            "",
            *compare.report(self.sets, self.rates),
            "## Token ids widened",
            "",
            *widened.report(self.ids, self.widened),
            "## The arena transport",
            "",
            *self.transport.report(),
            "## The same bytes, and the first batch",
            "",
            (
                "Batches are compared with those of a plain reader: one thread, one sample after "
                "another, `seek` and `read`."
            ),
            "",
            *identical.report(self.same),
            "## The cost of growth",
            "",
            f"![More samples]({name}-growth.png)",
            "",
            *growth.report(self.tokens),
            *tars,
            f"![More sessions]({name}-sessions.png)",
            "",
            (
                f"T, batch 64; {sessions.MAX_PROCESSES} processes at most, each with its "
                "sessions in turn."
            ),
            "",
            *sessions.report(self.crowds),
        ]

    def _verdict(self) -> Iterator[tuple[str, ...]]:
        yield from self._of_tokens()
        for workload in self.sets[1:]:
            yield from self._of_shards(workload.name)
        yield from self._of_transport()
        yield (
            "batches that differ from a plain reader's",
            "0",
            f"0 of {sum(its.num_batches for its in self.same)}",
            "yes",
        )
        for its in self.same:
            yield _at_most(
                f"{its.workload}: open to first batch, ms",
                MAX_FIRST_BATCH_S * 1e3,
                its.median_s * 1e3,
            )
        for name, server in self.daemons.items():
            limit = (server.budget_bytes + MEMORY_SLACK_BYTES) >> 20
            yield _at_most(f"{name}: daemon's memory, MiB", limit, server.peak_bytes / 2**20)

    def _of_tokens(self) -> Iterator[tuple[str, ...]]:
        results = self.rates["T"]
        solo, same, apart = _gyre(results)
        yield _at_least(
            "T, one job, to the best plain DataLoader", 3.5, _ratio(results, "plain", 1)
        )
        yield (
            "T, one job, to the best tuned DataLoader",
            "-",
            f"{_ratio(results, 'tuned', 1):.2f}",
            "-",
        )
        yield _at_least(
            "T, each of four jobs of one order, to one job",
            0.5,
            same["samples_per_s"] / solo["samples_per_s"],
        )
        yield _at_least(
            "T, four jobs of an order each, in sum, to one job",
            1.0,
            4 * apart["samples_per_s"] / solo["samples_per_s"],
        )
        yield _at_least("T, slowest of these to their mean", 1 - MAX_DEVIATION, apart["slowest"])
        yield _at_most("T, fastest of these to their mean", 1 + MAX_DEVIATION, apart["fastest"])

    def _of_shards(self, name: str) -> Iterator[tuple[str, ...]]:
        results = self.rates[name]
        for num_jobs, wanted in ((1, 2.0), (4, 6.0)):
            jobs = "one job" if num_jobs == 1 else "each of four jobs of an order each"
            about = f"{name}, {jobs}, to the best "
            yield _at_least(about + "plain DataLoader", wanted, _ratio(results, "plain", num_jobs))
            yield _at_least(about + "tuned DataLoader", wanted, _ratio(results, "tuned", num_jobs))
        _, same, _ = _gyre(results)
        for kind in ("plain", "tuned"):
            about = f"{name}, each of four jobs of one order, to the best {kind} DataLoader"
            yield _at_least(about, 6.0, same["samples_per_s"] / best(results, kind, 4))

    def _of_transport(self) -> Iterator[tuple[str, ...]]:
        its = self.transport
        yield _at_least(
            "arena transport of 8 MiB batches, to memcpy", 0.6, its.bulk["whole"] / its.memcpy
        )
        yield _at_most("daemon CPU s/GB of it", 0.15, its.daemon_s_per_gb["whole"])
        yield _at_least("descriptors/s", 20_000, its.descriptors_per_s)
        yield _at_most("their p99, ms", 0.5, its.p99_s * 1e3)


def _gyre(results: dict[Contender, Result]) -> tuple[Result, Result, Result]:
    """Gyre's results: one job, four of one order, four of an order each."""
    of = {
        (each.num_jobs, each.same_seed): its for each, its in results.items() if each.kind == "gyre"
    }
    return of[1, False], of[4, True], of[4, False]


def _ratio(results: dict[Contender, Result], kind: str, num_jobs: int) -> float:
    """The ratio of Gyre's jobs, an order each, to the fastest DataLoader of a form."""
    solo, _, apart = _gyre(results)
    return (solo if num_jobs == 1 else apart)["samples_per_s"] / best(results, kind, num_jobs)


def _at_least(what: str, wanted: float, measured: float) -> tuple[str, ...]:
    if math.isnan(measured):  # one of the two did not take part
        return what, f">= {wanted:,g}", "-", "-"
    return what, f">= {wanted:,g}", f"{measured:,.2f}", "yes" if measured >= wanted else "**no**"


def _at_most(what: str, wanted: float, measured: float) -> tuple[str, ...]:
    return what, f"<= {wanted:,g}", f"{measured:,.2f}", "yes" if measured <= wanted else "**no**"


def prove(folder: Path, form: Form, is_full: bool) -> Findings:
    """Run everything on data in `folder`."""
    _say("the data")
    sets = workloads(folder, form.scale)
    with daemon(folder, {workload.name: workload.config for workload in sets}) as server:
        _say("beside others")
        rates = compare.compare(sets, server, form)
        _say("the same bytes, the first batch")
        same = [identical.verify(workload, server, 40, 15) for workload in sets]
    _say("token ids widened")
    ids = widened.workload(folder, form.scale.tokens)
    with daemon(folder, {ids.name: ids.config}) as holder:
        wider = widened.measure(ids, holder, form)
    _say("the arena transport")
    path = folder / "transport.bin"
    write_tokens(path, transport.FILE_BYTES // transport.TOKEN_BYTES)
    with daemon(folder, transport.datasets(path)) as carrier:
        carried = transport.measure(carrier, path, 1.0 if is_full else 0.4)
    _say("more samples")
    tokens = growth.grow_tokens(folder, growth.FULL_SIZES if is_full else growth.BRIEF_SIZES)
    tars = growth.grow_tars(folder, growth.TAR_SIZES) if is_full else []
    _say("more sessions")
    counts = sessions.FULL_COUNTS if is_full else sessions.BRIEF_COUNTS
    crowds, host = sessions.crowd(folder, sets[0], counts, 1.0 if is_full else 0.5)
    daemons = {"beside others": server, "transport": carrier, "64 sessions": host}
    return Findings(sets, rates, ids, wider, carried, same, tokens, tars, crowds, daemons)


def _say(what: str) -> None:
    print(f"{what} ...", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prove, print the report, and write it with its plots where `--out` says."""
    parser = argparse.ArgumentParser(description="The loader's promises, measured in one run.")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="STEM",
        help="write STEM.md and STEM-*.png; else print the report",
    )
    parser.add_argument(
        "--brief",
        action="store_true",
        help="less data, fewer contenders, one round: two minutes instead of ten",
    )
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    form = compare.BRIEF_FORM if parsed.brief else compare.FULL_FORM
    given = " ".join(sys.argv[1:] if arguments is None else arguments)
    title = [
        "# The loader, measured",
        "",
        *compare.circumstances(f"python -m benchmarks.loader.proof {given}"),
    ]
    rounds = (
        f"{form.num_rounds} interleaved rounds of {form.duration_s:g} s, "
        f"each after warming up: {WARMUP}"
    )
    title[-1:] = [f"Rates are medians of {rounds}.", ""]
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as name:
        findings = prove(Path(name), form, not parsed.brief)
    write(findings, title, parsed.out)
    exceeding = [name for name, server in findings.daemons.items() if not server.within_budget]
    if exceeding:
        sys.exit(
            f"a daemon took more memory than its budget and {MEMORY_SLACK_BYTES >> 20} MiB: "
            f"{', '.join(exceeding)}"
        )


def write(findings: Findings, title: list[str], stem: Path | None) -> None:
    """Write the report with its plots, or print it."""
    lines = findings.lines(stem.name if stem else "", title)
    if not stem:
        print("\n".join(line for line in lines if not line.startswith("![")))
        return
    Path(f"{stem}.md").write_text("\n".join(lines))
    plot_rates(findings.sets, findings.rates, Path(f"{stem}-rates.png"))
    plot_growth(findings.tokens, Path(f"{stem}-growth.png"))
    plot_sessions(findings.crowds, Path(f"{stem}-sessions.png"))


if __name__ == "__main__":
    main()
