"""Versions of Gyre against each other.

`python -m benchmarks.loader.parts.turns CHECKOUT [CHECKOUT ...] [--workloads T images]`

Each checkout has an environment of its own in `.venv`, as `make setup` makes it. A daemon of each
serves the same files, and its own client reads them: one job, four jobs of one order, four jobs of
an order each. All take turns, round by round, so a disturbance affects all alike. Ratios are to the
first checkout, in the same round. `images` are JPEG files in tar shards that become random crops;
`objects` are S10k on a server in another process, past the node cache.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.loader.compare import circumstances
from benchmarks.loader.data import FULL, SHORT, Scale, Workload, shards, tokens, write_tars
from benchmarks.loader.markdown import table
from benchmarks.loader.processes import daemon
from benchmarks.loader.race import Contender, Entry, Result
from tests.object_server.process import object_server

JOBS = (
    Contender("one job", "gyre"),
    Contender("each of four of one order", "gyre", num_jobs=4, same_seed=True),
    Contender("each of four orders", "gyre", num_jobs=4),
)
NAMES = ("T", "S10k", "S100k", "images", "objects")
HEAD = (
    "",
    "version",
    "samples/s per job",
    "to the first",
    "half of the rounds",
    "CPU s per 1000: job",
    "daemon",
    "memory of all, MiB",
    "to the first",
)


def workload(name: str, folder: Path, scale: Scale, stack: ExitStack) -> Workload:
    """The data of a name; a server that it needs runs until the stack ends."""
    if name == "T":
        return tokens(folder, scale.tokens)
    if name == "images":
        return images(folder, scale.small)
    load = shards(folder, "S10k" if name == "objects" else name, scale)
    if name != "objects":
        return load
    server = stack.enter_context(object_server(folder))
    settings = {f"storage.{key}": value for key, value in server.storage_settings.items()}
    config = {"uri": f"s3://{Path(load.tars).name}", "format": "webdataset", "cache": False}
    return replace(load, name=name, config={**config, **settings})


def images(folder: Path, num_samples: int) -> Workload:
    """JPEG files in tars; the daemon makes random crops of 224 pixels of them."""
    # imports pyarrow and Pillow
    from benchmarks.loader.samples.images import BATCH_SIZE, chain, jpeg  # noqa: PLC0415

    generator = np.random.default_rng(0)
    different = [jpeg(generator) for _ in range(200)]
    files = (different[number % 200] for number in range(num_samples))
    tars = write_tars(folder / "images", files, num_samples)
    transforms = [{**each, "field": "bin"} for each in chain("bin", antialias=True)]
    transforms[0]["to"] = "bin"  # the name that readers of tars know
    config: dict[str, object] = {"uri": tars, "format": "webdataset", "transforms": transforms}
    about = f"{num_samples:,} JPEG files as random crops"
    return Workload("images", BATCH_SIZE, num_samples, config, tars, "", about)


def measure(
    folder: Path,
    roots: Sequence[Path],
    loads: Sequence[Workload],
    num_rounds: int,
    duration_s: float,
) -> dict[str, list[Entry]]:
    """Return the entries of each of `JOBS`, by label: one for each root."""
    configs = {load.name: load.config for load in loads}
    entries: dict[str, list[Entry]] = {}
    with ExitStack() as stack:
        pythons = [str(root / ".venv/bin/python") for root in roots]
        servers = [
            stack.enter_context(daemon(folder, configs, python=python)) for python in pythons
        ]
        for job in JOBS:
            pairs = zip(pythons, roots, strict=True)
            entries[job.label] = [Entry(job, python=python, root=root) for python, root in pairs]
            for entry, server in zip(entries[job.label], servers, strict=True):
                stack.callback(entry.stop)
                entry.start(server.address)
                entry.await_start()
        for load in loads:
            for round_ in range(num_rounds):
                for label, its in entries.items():
                    rates = [
                        entry.run(load, round_, duration_s, server)["samples_per_s"]
                        for entry, server in zip(its, servers, strict=True)
                    ]
                    about = f"{load.name}  round {round_ + 1} of {num_rounds}  {label:26}"
                    print(
                        f"  {about}",
                        *(f"{rate:>11,.0f}" for rate in rates),
                        file=sys.stderr,
                        flush=True,
                    )
    return entries


def report(
    roots: Sequence[Path], loads: Sequence[Workload], entries: dict[str, list[Entry]]
) -> list[str]:
    """A table, as Markdown."""
    rows = []
    for load in loads:
        for label, its in entries.items():
            first = its[0].results[load.name]
            rows += [
                (f"{load.name}, {label}", root.name, *_row(entry.results[load.name], first))
                for root, entry in zip(roots, its, strict=True)
            ]
    return table(HEAD, rows)


def _row(results: Sequence[Result], first: Sequence[Result]) -> tuple[str, ...]:
    ratios = [
        one["samples_per_s"] / other["samples_per_s"]
        for one, other in zip(results, first, strict=True)
    ]
    low, middle, high = statistics.quantiles(ratios, n=4)
    rate, job, server, memory = (
        statistics.median(result[key] for result in results)
        for key in ("samples_per_s", "cpu_s_per_1000", "daemon_cpu_s_per_1000", "own_bytes")
    )
    first_memory = statistics.median(result["own_bytes"] for result in first)
    return (
        f"{rate:,.0f}",
        f"{middle:.2f}",
        f"{low:.2f} to {high:.2f}",
        f"{job:.4f}",
        f"{server:.4f}",
        f"{memory / 2**20:,.0f}",
        f"{memory / first_memory:.2f}",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, or write it where `--out` says."""
    parser = argparse.ArgumentParser(description="Versions of Gyre in turns.")
    parser.add_argument(
        "roots", nargs="+", type=Path, metavar="CHECKOUT", help="with an environment in .venv"
    )
    parser.add_argument(
        "--workloads",
        nargs="+",
        default=["T", "S10k"],
        choices=NAMES,
        metavar="NAME",
        help=f"of {', '.join(NAMES)}",
    )
    parser.add_argument("--short", action="store_true", help="with little data")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn")
    parser.add_argument("--out", type=Path, metavar="STEM", help="write STEM.md")
    parsed = parser.parse_args(arguments)
    roots = [root.absolute() for root in parsed.roots]
    about = circumstances(f"python -m benchmarks.loader.parts.turns {' '.join(sys.argv[1:])}")
    scale = SHORT if parsed.short else FULL
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as name, ExitStack() as stack:
        loads = [workload(each, Path(name), scale, stack) for each in parsed.workloads]
        lines = report(
            roots, loads, measure(Path(name), roots, loads, parsed.rounds, parsed.seconds)
        )
    if parsed.out:
        Path(f"{parsed.out}.md").write_text(
            "\n".join(["# Versions in turns", "", *about, "", *lines, ""])
        )
    print("\n".join([*about, "", *lines]))


if __name__ == "__main__":
    main()
