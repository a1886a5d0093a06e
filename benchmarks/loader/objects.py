"""Global shuffle from object storage: `python -m benchmarks.loader.objects [--full] [--save PATH]`.

T, samples of 2 KiB in objects of 8 MiB, lies on a server in a process of its own, whose answers begin late: lognormal, p50 20
ms and p99 200 ms. Every sample is a request of its own, as a full shuffle of what does not fit a cache has it. In each round
all readers take turns, each in a new process, from nothing but imported modules.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.loader import clients
from benchmarks.loader.data import write_tokens
from benchmarks.loader.markdown import table
from benchmarks.loader.processes import cpu_s, daemon, family, load_average
from tests.object_server.process import ObjectServerProcess, object_server
from tests.object_server.script import Script

SAMPLE_BYTES, OBJECT_BYTES = 2048, 8 << 20
BATCH_SIZE = 256
FIRST_BYTE = Script(first_byte_p50_s=0.02, first_byte_p99_s=0.2)


@dataclass(frozen=True)
class Reader:
    """One way to read T.

    Attributes:
        label: for the table.
        kind: `gyre` or `rinas`.
        prefetch_batches: the window; 0 for the default.
        hedge: late requests are sent twice.
    """

    label: str
    kind: str = "gyre"
    prefetch_batches: int = 0
    hedge: bool = True


READERS = [
    Reader("paper-style RINAS, 8 workers", "rinas"),
    Reader("Gyre"),
    Reader("Gyre, no second requests", hedge=False),
    Reader("Gyre, a barrier per batch", prefetch_batches=1),
    Reader("Gyre, a barrier per batch, no second requests", prefetch_batches=1, hedge=False),
]


@dataclass(frozen=True)
class Scale:
    """How much is read.

    Attributes:
        num_samples: in the dataset.
        num_batches: that a reader takes.
        num_rounds: of all readers.
    """

    num_samples: int
    num_batches: int
    num_rounds: int


SMALL = Scale(20_480, 40, 1)
FULL = Scale(200_000, 80, 3)

Result = dict[str, float]


def write_objects(root: Path, num_samples: int) -> None:
    """The tokens in objects of 8 MiB below `root/data`."""
    whole = root / "tokens"
    root.mkdir()
    write_tokens(whole, num_samples * SAMPLE_BYTES // 4)
    (root / "data").mkdir()
    content = np.memmap(whole, np.uint8, "r")
    for number, begin in enumerate(range(0, len(content), OBJECT_BYTES)):
        content[begin : begin + OBJECT_BYTES].tofile(root / "data" / f"{number:04}.bin")
    whole.unlink()


def read(reader: Reader, server: ObjectServerProcess, folder: Path, scale: Scale, seed: int) -> Result:
    """One reader's turn, with a daemon that is new and has the dataset open."""
    num_objects = -(-scale.num_samples * SAMPLE_BYTES // OBJECT_BYTES)
    config: dict[str, object] = {"uri": f"{server.url}/data/{{0000..{num_objects - 1:04}}}.bin", "format": "tokens"}
    config |= {"dtype": "int32", "sequence_length": SAMPLE_BYTES // 4, "cache": False}
    more = [f"hedge = {json.dumps(reader.hedge)}", f"prefetch_batches = {reader.prefetch_batches}"]
    with daemon(folder, {"T": config}, more=more) as serving:
        task = {**asdict(reader), **asdict(scale), "address": serving.address, "url": server.url, "seed": seed}
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.loader.objects", "--task", json.dumps(task)]
        before_s = cpu_s([serving.pid])
        answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, stdin=subprocess.DEVNULL).stdout
        daemon_s = cpu_s([serving.pid]) - before_s
    result: Result = json.loads(answer)
    result["cpu_us_per_sample"] += daemon_s / (scale.num_batches * BATCH_SIZE) * 1e6
    return result


def perform(task: dict[str, object]) -> Result:
    """In the reader's process: open, read, and say how it went."""
    from benchmarks.loader import objectreaders  # noqa: PLC0415  (imports torch, in the readers only)

    open_batches = objectreaders.prepare(task)
    cpu_before_s, began = _own_cpu_s(), time.perf_counter()
    batches = open_batches()
    waits_s: list[float] = []
    first_batch_s = 0.0
    num_batches = int(str(task["num_batches"]))
    for _ in range(num_batches):
        asked = time.perf_counter()
        next(batches).sum()
        waits_s.append(time.perf_counter() - asked)
        first_batch_s = first_batch_s or time.perf_counter() - began
    elapsed_s = time.perf_counter() - began
    used_s = _own_cpu_s() - cpu_before_s
    later = sorted(waits_s[len(waits_s) // 5 :])
    return {
        "first_batch_s": first_batch_s,
        "samples_per_s": num_batches * BATCH_SIZE / elapsed_s,
        "cpu_us_per_sample": used_s / (num_batches * BATCH_SIZE) * 1e6,
        "p50_wait_s": later[len(later) // 2],
        "p99_wait_s": later[int(len(later) * 0.99)],
    }


def _own_cpu_s() -> float:
    """Of this process and its workers so far."""
    return cpu_s(family(os.getpid()))


def measure(scale: Scale, folder: Path) -> dict[Reader, list[Result]]:
    """All rounds."""
    results: dict[Reader, list[Result]] = {reader: [] for reader in READERS}
    write_objects(folder / "objects", scale.num_samples)
    with object_server(folder / "objects") as server:
        server.follow(FIRST_BYTE)
        for round_ in range(scale.num_rounds):
            for reader in READERS:
                print(f"round {round_ + 1}: {reader.label}", file=sys.stderr, flush=True)
                server.forget()
                result = read(reader, server, folder, scale, seed=round_)
                result["requests_per_sample"] = server.counts()["reads"] / (scale.num_batches * BATCH_SIZE)
                results[reader].append(result)
    return results


def report(results: dict[Reader, list[Result]], scale: Scale, load_before: float) -> list[str]:
    """Medians of the rounds, and ratios within them."""
    rinas = results[READERS[0]]
    rows = []
    for reader, rounds in results.items():
        middle = {name: statistics.median(result[name] for result in rounds) for name in rounds[0]}
        ratio = statistics.median(mine["samples_per_s"] / its["samples_per_s"] for mine, its in zip(rounds, rinas, strict=True))
        rows.append(
            (
                reader.label,
                f"{middle['samples_per_s']:,.0f}",
                f"{ratio:.2f}",
                f"{middle['first_batch_s']:.2f}",
                f"{middle['p50_wait_s'] * 1000:.0f}",
                f"{middle['p99_wait_s'] * 1000:.0f}",
                f"{middle['requests_per_sample']:.3f}",
                f"{middle['cpu_us_per_sample']:,.0f}",
            )
        )
    about = (
        f"{scale.num_samples:,} samples of {SAMPLE_BYTES} bytes in objects of {OBJECT_BYTES >> 20} MiB, batch {BATCH_SIZE}, "
        f"{scale.num_batches} batches per turn, medians of {scale.num_rounds} interleaved rounds. Requests per sample count "
        "what was prefetched and not taken; CPU is that of reader, workers and daemon, not of the server. "
        f"Load average at the start: {load_before:.1f}."
    )
    header = (
        "reader",
        "samples/s",
        "to RINAS",
        "first batch, s",
        "p50 wait, ms",
        "p99 wait, ms",
        "requests per sample",
        "CPU us per sample",
    )
    return [about, "", *table(header, rows)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="all of T, three rounds; otherwise a tenth, once")
    parser.add_argument("--save", type=Path, help="write the report here as well")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.task:
        print(json.dumps(perform(json.loads(args.task))))
        return
    scale, load_before = FULL if args.full else SMALL, load_average()
    with tempfile.TemporaryDirectory(prefix="gyre-objects-") as folder:
        results = measure(scale, Path(folder))
    command = "python -m benchmarks.loader.objects" + (" --full" if args.full else "")
    lines = [
        f"`{command}`, {os.cpu_count()} cores.",
        "",
        "## Full shuffle, every sample a request",
        "",
        *report(results, scale, load_before),
        "",
    ]
    lines += ["## What a request costs the daemon, by client", "", clients.report(scale.num_rounds, 4000)]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.save:
        args.save.write_text("# Object storage\n\n" + text)


if __name__ == "__main__":
    main()
