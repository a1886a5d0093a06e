"""Gyre and RINAS on object storage.

`python -m benchmarks.loader.storage.objects [--full] [--only PART ...] [--keep FOLDER]
[--out STEM]`

A server in another process has objects of about 8 MiB. Its answers begin late: lognormal, p50 20
ms, p99 200 ms. In each round all readers take turns, each in a new process, from nothing but
imported modules. There are five parts of some minutes each. Results are kept in a folder, so the
parts can run one by one, and the report uses all results that are there.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.loader.data import write_tokens
from benchmarks.loader.processes import cpu_s, daemon, family, load_average
from benchmarks.loader.storage import clients, objectorders, objectreport
from benchmarks.loader.storage.objectreport import Findings, Result
from tests.object_server.process import ObjectServerProcess, object_server
from tests.object_server.script import Script

SAMPLE_BYTES, OBJECT_SAMPLES, BATCH_SIZE = 2048, 4096, 256  # of T
FIRST_BYTE = Script(first_byte_p50_s=0.02, first_byte_p99_s=0.2)


@dataclass(frozen=True)
class Reader:
    """One reader.

    Attributes:
        label: its name in the table.
        kind: `gyre` or `rinas`; in the part `shards` `block`, `webdataset` or `mosaic`.
        prefetch_batches: the window; 0 for the default.
        hedge: late requests are sent twice.
        share: the part of the others' batches that it reads; a slow reader need not read all.
    """

    label: str
    kind: str = "gyre"
    prefetch_batches: int = 0
    hedge: bool = True
    share: float = 1.0


READERS = [
    Reader("paper-style RINAS, 8 workers", "rinas"),
    Reader("Gyre"),
    Reader("Gyre, no second requests", hedge=False),
    Reader("Gyre, a barrier per batch", prefetch_batches=1, share=0.1),
    Reader(
        "Gyre, a barrier per batch, no second requests", prefetch_batches=1, hedge=False, share=0.1
    ),
]


@dataclass(frozen=True)
class Scale:
    """The dataset and the length of a turn.

    Attributes:
        num_samples: in the dataset.
        sample_bytes: of each.
        object_samples: in an object.
        batch_size: samples.
        num_batches: batches that a reader takes.
        num_rounds: rounds of all readers.
    """

    num_samples: int
    sample_bytes: int
    object_samples: int
    batch_size: int
    num_batches: int
    num_rounds: int

    @property
    def options(self) -> dict[str, object]:
        """Keys of the dataset's configuration."""
        return {"format": "tokens", "dtype": "int32", "sequence_length": self.sample_bytes // 4}

    @property
    def num_objects(self) -> int:
        """Number of objects."""
        return -(-self.num_samples // self.object_samples)


SCALES = {
    "T": (
        Scale(20_480, SAMPLE_BYTES, OBJECT_SAMPLES, BATCH_SIZE, 40, 1),
        Scale(200_000, SAMPLE_BYTES, OBJECT_SAMPLES, BATCH_SIZE, 100, 3),
    ),
    "S": (Scale(800, 100 << 10, 80, 64, 8, 1), Scale(2_000, 100 << 10, 80, 64, 24, 2)),
}
PARTS = ("T", "S", "orders", "shards", "clients")
SHARD_READERS = [
    Reader(objectreport.BLOCK, "block"),
    Reader(objectreport.WEBDATASET, "webdataset"),
    Reader(objectreport.MOSAIC, "mosaic"),
]


def write_objects(
    root: Path,
    num_samples: int,
    sample_bytes: int = SAMPLE_BYTES,
    object_samples: int = OBJECT_SAMPLES,
) -> None:
    """Write the tokens as objects below `root/data`."""
    whole = root / "tokens"
    root.mkdir()
    write_tokens(whole, num_samples * sample_bytes // 4)
    (root / "data").mkdir()
    content = np.memmap(whole, np.uint8, "r")
    length = object_samples * sample_bytes
    for number, begin in enumerate(range(0, len(content), length)):
        content[begin : begin + length].tofile(root / "data" / f"{number:04}.bin")
    whole.unlink()


def read(
    reader: Reader,
    server: ObjectServerProcess,
    folder: Path,
    scale: Scale,
    seed: int,
    storage: Mapping[str, str] | None = None,
    max_requests: int = 0,
) -> Result:
    """Run one reader's turn, with a new daemon that has opened the dataset.

    `storage` is the dataset's table of that name, and `max_requests` the daemon's setting; 0 for
    its default.
    """
    config: dict[str, object] = {
        "uri": f"{server.url}/data/{{0000..{scale.num_objects - 1:04}}}.bin",
        "cache": reader.kind == "block",
        **{f"storage.{key}": value for key, value in (storage or {}).items()},
    }
    more = [f"hedge = {json.dumps(reader.hedge)}", f"prefetch_batches = {reader.prefetch_batches}"]
    more += [f"max_requests = {max_requests}"] if max_requests else []
    num_batches = round(scale.num_batches * reader.share)
    num_samples = num_batches * scale.batch_size
    with daemon(folder, {"set": {**config, **scale.options}}, more=more) as serving:
        task = {
            **asdict(reader),
            **asdict(scale),
            "address": serving.address,
            "url": server.url,
            "seed": seed,
        }
        task["num_batches"] = num_batches
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "benchmarks.loader.storage.objects",
            "--task",
            json.dumps(task),
        ]
        server.forget()
        before_s, server_before_s = cpu_s(serving.pids), cpu_s([server.pid])
        answer = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, stdin=subprocess.DEVNULL
        ).stdout
        daemon_s, server_s = cpu_s(serving.pids) - before_s, cpu_s([server.pid]) - server_before_s
    result: Result = json.loads(answer)
    num_requests = server.counts()["reads"]
    result["daemon_us_per_sample"] = daemon_s / num_samples * 1e6
    result["connections"] = server.counts()["connections"]
    result["cpu_us_per_sample"] += daemon_s / num_samples * 1e6
    result["requests_per_sample"] = num_requests / num_samples
    result["server_us_per_request"] = server_s / num_requests * 1e6
    return result


def perform(task: dict[str, object]) -> Result:
    """Open and read in the reader's process, and return the figures."""
    # Imports torch, in the readers only.
    from benchmarks.loader.storage import objectreaders, shardreaders  # noqa: PLC0415

    of_shards = task["kind"] in {reader.kind for reader in SHARD_READERS}
    open_batches = (shardreaders if of_shards else objectreaders).prepare(task)
    cpu_before_s, began = _own_cpu_s(), time.perf_counter()
    batches = open_batches()
    waits_s: list[float] = []
    first_batch_s = warm_s = 0.0
    num_batches, batch_size = int(str(task["num_batches"])), int(str(task["batch_size"]))
    ids: list[npt.NDArray[np.int64]] = []
    num_warming = num_batches // 4
    for number in range(num_batches):
        if number == num_warming:
            warm_s = time.perf_counter() - began
        asked = time.perf_counter()
        batch = next(batches)
        batch.sum()
        waits_s.append(time.perf_counter() - asked)
        first_batch_s = first_batch_s or time.perf_counter() - began
        if of_shards:
            ids.append(batch[:, 0].numpy().astype(np.int64))
    elapsed_s = time.perf_counter() - began
    used_s = _own_cpu_s() - cpu_before_s
    later = sorted(waits_s[len(waits_s) // 5 :])
    found: Result = (
        {"mixing": shardreaders.mixing(ids, int(str(task["num_samples"])))} if of_shards else {}
    )
    return {
        **found,
        "first_batch_s": first_batch_s,
        "samples_per_s": num_batches * batch_size / elapsed_s,
        "steady_samples_per_s": (num_batches - num_warming) * batch_size / (elapsed_s - warm_s),
        "cpu_us_per_sample": used_s / (num_batches * batch_size) * 1e6,
        "p50_wait_s": later[len(later) // 2],
        "p99_wait_s": later[int(len(later) * 0.99)],
    }


def _own_cpu_s() -> float:
    """CPU time of this process and its workers so far."""
    return cpu_s(family(os.getpid()))


def take_turns(
    readers: Sequence[Reader], scale: Scale, server: ObjectServerProcess, folder: Path
) -> dict[str, list[Result]]:
    """Run all rounds of all readers."""
    results: dict[str, list[Result]] = {reader.label: [] for reader in readers}
    for round_ in range(scale.num_rounds):
        for reader in readers:
            print(f"round {round_ + 1}: {reader.label}", file=sys.stderr, flush=True)
            results[reader.label].append(read(reader, server, folder, scale, seed=round_))
    return results


def measure(part: str, folder: Path, *, is_full: bool) -> Findings:
    """Measure one part."""
    load_before = load_average()
    scale = SCALES["S" if part == "S" else "T"][is_full]
    if part == "clients":
        return Findings(part, load_before, {}, clients.report(scale.num_rounds, 4000))
    write_objects(folder / "objects", scale.num_samples, scale.sample_bytes, scale.object_samples)
    if part == "shards":
        subprocess.run(
            [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "benchmarks.loader.storage.shardreaders",
                str(folder / "objects"),
            ],
            check=True,
        )
        scale = replace(scale, num_batches=scale.num_samples // scale.batch_size)
    with object_server(folder / "objects") as server:
        server.follow(FIRST_BYTE)
        if part == "orders":
            data, latency = folder / "objects" / "data", FIRST_BYTE
            place = objectorders.Place(
                server, data, scale.options, scale.num_samples, scale.sample_bytes, latency
            )
            return Findings(part, load_before, objectorders.measure(place, scale.num_rounds))
        has_mosaic = importlib.util.find_spec("streaming") is not None
        shard_readers = [each for each in SHARD_READERS if each.kind != "mosaic" or has_mosaic]
        readers = shard_readers if part == "shards" else READERS
        about = (
            f"{'T' if part == 'shards' else part}: {scale.num_samples:,} samples of "
            f"{scale.sample_bytes:,} bytes in "
            f"{scale.num_objects} objects, batch {scale.batch_size}, {scale.num_batches} batches "
            "per turn (a tenth with a "
            f"barrier), medians of {scale.num_rounds} interleaved rounds."
        )
        return Findings(part, load_before, take_turns(readers, scale, server, folder), about)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the parts that are asked for, and report all that were."""
    parser = argparse.ArgumentParser(description="What object storage promises, measured.")
    parser.add_argument(
        "--full", action="store_true", help="all of the data, three rounds; otherwise a tenth, once"
    )
    parser.add_argument(
        "--only",
        nargs="*",
        choices=PARTS,
        default=PARTS,
        metavar="PART",
        help=f"of {', '.join(PARTS)}",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="where findings of parts are kept, and found again",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="STEM",
        help="write STEM.md and STEM-rates.png; else print the report",
    )
    parser.add_argument("--task", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.task:
        print(json.dumps(perform(json.loads(args.task))))
        return
    with tempfile.TemporaryDirectory(prefix="gyre-objects-") as name:
        keep: Path = args.keep or Path(name)
        keep.mkdir(parents=True, exist_ok=True)
        for part in args.only:
            (Path(name) / part).mkdir()
            findings = measure(part, Path(name) / part, is_full=args.full)
            (keep / f"{part}.json").write_text(json.dumps(asdict(findings)))
        kept = [keep / f"{part}.json" for part in PARTS]
        objectreport.write(
            [Findings(**json.loads(path.read_text())) for path in kept if path.exists()], args.out
        )


if __name__ == "__main__":
    main()
