"""The cost of a start: CPU time of a private daemon until the first batch, and its memory.

`python -m benchmarks.loader.parts.start [--rounds 5] [--before CHECKOUT]`

One file of tokens, and 1,000 tar shards whose index was made before. Each start is a new process
with its own daemon. CPU time counts all of the daemon's processes, those that have ended too;
that of the script is without the imports of Gyre and torch. Five seconds after the first batch the
loader is idle, and the memory (PSS) of the daemon's processes is read.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from io import BytesIO
from pathlib import Path

import psutil

from benchmarks.loader.data import write_tokens
from benchmarks.loader.processes import Memory, family, load_average

NUM_TARS, SAMPLES_PER_TAR, IDLE_S = 1000, 10, 5.0
MARK = "BENCHMARK_OF_A_START"  # in the environment of a start's processes
REPOSITORY = Path(__file__).parents[3]
ROOTS = ("client", "daemon", "protos", "common", ".")


def write_tars(folder: Path) -> Path:
    """Write the shards; each sample is a number and some bytes."""
    folder.mkdir()
    for shard in range(NUM_TARS):
        with tarfile.open(folder / f"{shard:04}.tar", "w") as tar:
            for sample in range(SAMPLES_PER_TAR):
                for name, data in (("cls", b"%d" % shard), ("bin", bytes([sample]) * 500)):
                    info = tarfile.TarInfo(f"{sample:03}.{name}")
                    info.size = len(data)
                    tar.addfile(info, BytesIO(data))
    return folder


def start(uri: str, options: dict[str, object]) -> dict[str, float]:
    """Read the first batch in this process, and return its cost."""
    from gyre_client import Loader  # noqa: PLC0415

    os.environ[MARK] = str(os.getpid())
    own_before, began = time.process_time(), time.perf_counter()
    loader = Loader(uri, batch_size=16, **options)  # type: ignore[arg-type]
    batch = next(loader)
    elapsed_s, own_s = time.perf_counter() - began, time.process_time() - own_before
    assert batch
    pids = family(daemon_pid())
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)  # the process that started the daemon
    used_s = ended.ru_utime + ended.ru_stime
    used_s += sum(sum(psutil.Process(pid).cpu_times()) for pid in pids)  # ended children too
    del batch
    time.sleep(IDLE_S)
    pids = family(pids[0])
    memory = Memory.of(pids)
    loader.close()
    mib = 1 << 20
    return {
        "daemon's CPU s": used_s,
        "script's CPU s": own_s,
        "s to the first batch": elapsed_s,
        "processes, idle": len(pids),
        "own PSS, idle, MiB": memory.own_bytes / mib,
        "PSS of files, idle, MiB": memory.file_bytes / mib,
    }


def daemon_pid() -> int:
    """The private daemon's first process, by what it inherited from this one."""
    found = [
        each.pid
        for each in psutil.process_iter(["environ"])
        if (each.info["environ"] or {}).get(MARK) == str(os.getpid()) and each.pid != os.getpid()
    ]
    parents = {pid: psutil.Process(pid).ppid() for pid in found}
    return next(pid for pid, parent in parents.items() if parent not in parents)


def measured(checkout: Path, task: list[object]) -> dict[str, float]:
    """A start in a new process, with the code of a checkout."""
    roots = [str(checkout / root) for root in ROOTS[:-1]] + [str(REPOSITORY)]
    command = [sys.executable, "-W", "ignore", "-m", __spec__.name, "--task", json.dumps(task)]
    environment = os.environ | {"PYTHONPATH": ":".join(roots)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    answer = subprocess.run(
        command, stdout=subprocess.PIPE, check=True, env=environment, cwd=REPOSITORY
    ).stdout
    found: dict[str, float] = json.loads(answer.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=Path, help="another checkout, measured in turns")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        print(json.dumps(start(*json.loads(args.task))))
        return
    checkouts = {"now": REPOSITORY} | ({"before": args.before.resolve()} if args.before else {})
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    load_before = load_average()
    with tempfile.TemporaryDirectory(prefix="gyre-start-") as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = os.environ["PYTHONPYCACHEPREFIX"] = name
        tokens = {"format": "tokens", "options": {"dtype": "int32", "sequence_length": 512}}
        tasks: dict[tuple[str, str], list[object]] = {}
        for which, checkout in checkouts.items():  # each has its data: indexes may differ
            own = folder / which
            own.mkdir()
            write_tokens(own / "tokens.bin", 1 << 20)
            tasks["one file", which] = [str(own / "tokens.bin"), tokens]
            tasks["1,000 tars", which] = [str(write_tars(own / "tars")), {}]
            for what in ("one file", "1,000 tars"):
                measured(checkout, tasks[what, which])  # makes the index, and bytecode
        for _ in range(args.rounds):
            for (what, which), task in tasks.items():
                results.setdefault((what, which), []).append(measured(checkouts[which], task))
    columns = list(results)
    print("| | " + " | ".join(", ".join(column) for column in columns) + " |")
    print("|---|" + "---:|" * len(columns))
    for key in results[columns[0]][0]:
        medians = (statistics.median(each[key] for each in results[column]) for column in columns)
        print(f"| {key} | " + " | ".join(f"{each:.2f}" for each in medians) + " |")
    print(f"\nMedians of {args.rounds} rounds. Load average at the start: {load_before:.1f}.")


if __name__ == "__main__":
    main()
