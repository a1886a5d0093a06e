"""The cost of widening token ids.

uint16 ids are read as stored, and as int32 and int64, which torch computes with.

`python -m benchmarks.loader.parts.widened [--full]`
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.loader.compare import BRIEF_FORM, FULL_FORM, Form, circumstances
from benchmarks.loader.data import SEQUENCE_LENGTH, Workload, write_tokens
from benchmarks.loader.markdown import table
from benchmarks.loader.processes import Daemon, daemon
from benchmarks.loader.race import Contender, Result, race

AS_STORED = Contender("Gyre, ids as stored, uint16", "gyre", token_dtype="stored")
CONTENDERS = (
    AS_STORED,
    Contender("Gyre, ids widened to int32", "gyre", token_dtype="int32"),
    Contender("Gyre, ids widened to int64", "gyre", token_dtype="int64"),
)
HEADLINE = (
    "loader",
    "samples/s",
    "to ids as stored",
    "CPU s per 1000, job",
    "CPU s per 1000, daemon",
)


def workload(folder: Path, num_samples: int) -> Workload:
    """Write the ids of T with two bytes each."""
    path, wide = folder / "ids-uint16.bin", folder / "ids-int32.bin"
    if not path.exists():
        write_tokens(wide, num_samples * SEQUENCE_LENGTH)
        np.fromfile(wide, np.int32).astype(np.uint16).tofile(path)
        wide.unlink()
    config: dict[str, object] = {
        "uri": str(path),
        "format": "tokens",
        "dtype": "uint16",
        "sequence_length": SEQUENCE_LENGTH,
    }
    about = f"{num_samples:,} samples of {SEQUENCE_LENGTH} uint16 ids, one flat file"
    return Workload("T16", 64, num_samples, config, "", "", about)


def measure(ids: Workload, server: Daemon, form: Form) -> dict[Contender, Result]:
    """Return the medians of all, in turns; every cache line of a batch is touched."""
    return race([ids], CONTENDERS, server, form.num_rounds, form.duration_s)[ids.name]


def report(ids: Workload, results: Mapping[Contender, Result]) -> list[str]:
    """A table, as Markdown."""
    stored = results[AS_STORED]["samples_per_s"]
    rows = [
        (
            contender.label,
            f"{its['samples_per_s']:,.0f}",
            f"{its['samples_per_s'] / stored:.2f}",
            f"{its['cpu_s_per_1000']:.4f}",
            f"{its['daemon_cpu_s_per_1000']:.4f}",
        )
        for contender, its in results.items()
    ]
    return [
        f"{ids.about}, batch {ids.batch_size}; the reader touches every cache line.",
        "",
        *table(HEADLINE, rows),
        "",
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The cost of widening token ids.")
    parser.add_argument("--full", action="store_true", help="more data, three longer rounds")
    form = FULL_FORM if parser.parse_args().full else BRIEF_FORM
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as name:
        ids = workload(Path(name), form.scale.tokens)
        with daemon(Path(name), {ids.name: ids.config}) as server:
            lines = report(ids, measure(ids, server, form))
    print(
        "\n".join(
            [
                *circumstances(
                    f"python -m benchmarks.loader.parts.widened {' '.join(sys.argv[1:])}"
                ),
                *lines,
            ]
        )
    )


if __name__ == "__main__":
    main()
