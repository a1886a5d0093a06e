"""Gyre next to the loaders that people use: same data, same machine, interleaved rounds.

The report gives ratios of medians.

`python -m benchmarks.loader.compare [--full] [--save docs/benchmarks/NAME.md]`
"""

import argparse
import datetime
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gyre_client.transport.arguments import dataset_ref
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection

from benchmarks.loader.data import FULL, SHORT, Scale, Workload, workloads
from benchmarks.loader.markdown import table
from benchmarks.loader.mosaic import is_installed
from benchmarks.loader.processes import Daemon, daemon, load_average
from benchmarks.loader.race import Contender, Result, race
from benchmarks.loader.readers import WARMUP

ONE_JOB = (
    Contender("Gyre", "gyre"),
    Contender("DataLoader, plain, in process", "plain"),
    Contender("DataLoader, plain, 2 workers", "plain", 2),
    Contender("DataLoader, tuned, in process", "tuned"),
    Contender("DataLoader, tuned, 2 workers", "tuned", 2),
)
OTHERS = (
    Contender("DataLoader, plain, 8 workers", "plain", 8),
    Contender("DataLoader, tuned, 8 workers", "tuned", 8),
    Contender("StatefulDataLoader, tuned, in process", "stateful"),
    Contender("StatefulDataLoader, tuned, 2 workers", "stateful", 2),
    Contender("RINAS, 2 workers", "rinas", 2),
    Contender("webdataset, in process", "webdataset"),
    Contender("mosaicml-streaming, in process", "mosaic"),
)
BRIEF_OTHERS = (
    Contender("webdataset, 2 workers", "webdataset", 2),
    Contender("mosaicml-streaming, 2 workers", "mosaic", 2),
)
FOUR_JOBS = (
    Contender("Gyre, 4 jobs, same order", "gyre", num_jobs=4, same_seed=True),
    Contender("Gyre, 4 jobs, an order each", "gyre", num_jobs=4),
    Contender("DataLoader, tuned, in process, 4 jobs", "tuned", num_jobs=4),
    Contender("DataLoader, plain, in process, 4 jobs", "plain", num_jobs=4),
)
OTHER_FOUR_JOBS = (
    Contender("DataLoader, tuned, 2 workers, 4 jobs", "tuned", 2, num_jobs=4),
    Contender("DataLoader, plain, 2 workers, 4 jobs", "plain", 2, num_jobs=4),
)
HEADLINE = (
    "loader",
    "samples/s per job",
    "to DataLoader, plain",
    "to DataLoader, tuned",
    "first batch, s",
    "CPU s per 1000, job",
    "CPU s per 1000, daemon",
    "page faults per 1000, job",
    "memory, MiB",
    "files, MiB",
)
LEGEND = """\
Samples/s are those of each job. They are compared with the fastest DataLoader of as many jobs,
among its numbers of workers.

* *Plain* is the DataLoader as tutorials have it: `__getitems__` returns a list of samples, which
  are then collated.
* *Tuned* is the fastest form that we know. A batch is one gather into one tensor: `np.take` on the
  mapped token file, or one copy per sample from mapped tar shards. Indices are arrays, and nothing
  is collated. StatefulDataLoader has this form.
* RINAS has a pool of 32 threads in each worker, and samples in order of arrival.
* webdataset shuffles with a buffer of 2,000 samples over 16 shards. mosaicml-streaming shuffles as
  it does by default, in its own format (converted before). All others read a full shuffle by random
  access.

The first batch is timed from nothing but imported modules. A DataLoader first reads the headers of
all tar shards; Gyre's daemon has an index. CPU time is that of the job with its workers, and that
of the daemon. A loader that returns memory to the system after each batch pays a page fault for
each 4 KiB that it takes again; whether it does depends on its allocator's history. Memory is that
of all processes of all jobs and the daemon, each shared page counted once (PSS). *Files* are pages
of mapped files, which the page cache holds anyway.
"""


@dataclass(frozen=True)
class Form:
    """How thorough a comparison is.

    Attributes:
        scale: the size of the data.
        contenders: in the order of the table.
        num_rounds: rounds, whose medians count.
        duration_s: how long each contender reads in a round.
    """

    scale: Scale
    contenders: tuple[Contender, ...]
    num_rounds: int
    duration_s: float


BRIEF_FORM = Form(SHORT, ONE_JOB + BRIEF_OTHERS + FOUR_JOBS[:3], 1, 0.7)
FULL_FORM = Form(FULL, ONE_JOB + OTHERS + BRIEF_OTHERS + FOUR_JOBS + OTHER_FOUR_JOBS, 3, 1.0)

Rates = dict[str, dict[Contender, Result]]  # by workload


def compare(sets: Sequence[Workload], server: Daemon, form: Form) -> Rates:
    """The medians of all contenders on all workloads, page cache hot, indexes built."""
    for workload in sets:
        _make_index(workload, server)
    contenders = [each for each in form.contenders if each.kind != "mosaic" or is_installed()]
    return race(sets, contenders, server, form.num_rounds, form.duration_s)


def report(sets: Sequence[Workload], rates: Rates) -> list[str]:
    """A table of each workload, as Markdown."""
    lines = [LEGEND]
    for workload in sets:
        results = rates[workload.name]
        lines += [f"### {workload.name}: {workload.about}, batch {workload.batch_size}", ""]
        lines += [*table(HEADLINE, [_row(contender, results) for contender in results]), ""]
    return lines


def best(results: Mapping[Contender, Result], kind: str, num_jobs: int) -> float:
    """Samples/s of the fastest contender of a kind with `num_jobs` jobs, over all worker counts."""
    rates = [
        its["samples_per_s"]
        for each, its in results.items()
        if each.kind == kind and each.num_jobs == num_jobs
    ]
    return max(rates, default=float("nan"))


def _row(contender: Contender, results: Mapping[Contender, Result]) -> tuple[str, ...]:
    its = results[contender]
    ratios = [
        its["samples_per_s"] / best(results, kind, contender.num_jobs)
        for kind in ("plain", "tuned")
    ]
    return (
        contender.label,
        f"{its['samples_per_s']:,.0f}",
        *(f"{ratio:.2f}" if ratio == ratio else "-" for ratio in ratios),
        f"{its['first_batch_s']:.3f}",
        f"{its['cpu_s_per_1000']:.4f}",
        f"{its['daemon_cpu_s_per_1000']:.4f}" if contender.kind == "gyre" else "-",
        f"{its['faults_per_1000']:,.0f}",
        f"{its['own_bytes'] / 2**20:,.0f}",
        f"{its['file_bytes'] / 2**20:,.0f}",
    )


def _make_index(workload: Workload, server: Daemon) -> None:
    """Let a daemon build the index."""
    with Connection(parse_address(server.address)) as connection:
        connection.describe(dataset_ref(workload.name))


def circumstances(command: str) -> list[str]:
    """Lines that describe the machine."""
    return [
        (
            f"{datetime.date.today()}, `{command}`, {os.cpu_count()} cores, Python "
            f"{platform.python_version()}, page cache hot."
        ),
        f"Load average at the start: {load_average():.1f}.",
        "",
    ]


def main() -> None:
    """Compare on all workloads and print, or save, the tables."""
    parser = argparse.ArgumentParser(description="Compare Gyre's loader with others.")
    parser.add_argument(
        "--full", action="store_true", help="all contenders, all data, three longer rounds"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the tables there")
    parsed = parser.parse_args()
    form = FULL_FORM if parsed.full else BRIEF_FORM
    lines = [
        "# The loader beside others",
        "",
        *circumstances(f"python -m benchmarks.loader.compare {' '.join(sys.argv[1:])}"),
    ]
    rounds = (
        f"{form.num_rounds} interleaved rounds of {form.duration_s:g} s, "
        f"each after warming up: {WARMUP}"
    )
    lines[-1:] = [f"Medians of {rounds}.", ""]
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as name:
        sets = workloads(Path(name), form.scale)
        with daemon(Path(name), {workload.name: workload.config for workload in sets}) as server:
            lines += report(sets, compare(sets, server, form))
    text = "\n".join(lines)
    print(text)
    if parsed.save:
        parsed.save.write_text(text)


if __name__ == "__main__":
    main()
