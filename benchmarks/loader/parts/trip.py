"""Files of the daemon and of the client that a first batch and a steady batch run through.

A daemon serves token ids to one client. Both note each file of Gyre whose code runs, in the process
itself and in its threads; workers are not counted, nor is a function that runs as often while
no batch is asked for, such as a timer.
"""

import argparse
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

from benchmarks.loader.processes import await_ready

# Longer than a look takes, so that each timer is seen.
_IDLE_S, _NUM_BATCHES = 12.0, 500
_NUM_BYTES = 256 << 20
_DATASET = """
listen = ["unix:{folder}/gyre.sock"]
index_dir = "{folder}/index"
[datasets.tokens]
uri = "{folder}/tokens.bin"
format = "tokens"
dtype = "uint16"
sequence_length = 1024
"""


class Trip:
    """Counts calls of Gyre's functions by file, in this thread and in all that start later."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            self.calls[frame.f_code] += 1

    def functions(self, package: str) -> dict[str, int]:
        """Calls by function of a package since the last look; bodies of modules are none."""
        calls, self.calls = self.calls, Counter()
        functions: Counter[str] = Counter()
        for code, num in calls.items():
            _, found, path = code.co_filename.rpartition(f"/{package}/")
            if found and code.co_flags & inspect.CO_OPTIMIZED:
                functions[f"{path}:{code.co_qualname}"] += num
        return functions


def _serve(folder: Path) -> None:
    """Run a daemon that writes its functions to `calls.json` at each SIGUSR1."""
    trip = Trip()

    def write(*_: object) -> None:
        (folder / "new").write_text(json.dumps(trip.functions("gyre_daemon")))
        (folder / "new").rename(folder / "calls.json")

    signal.signal(signal.SIGUSR1, write)
    from gyre_daemon import cli  # noqa: PLC0415  # each call is noted, those of its start too

    sys.argv[1:] = ["serve", "--config", f"{folder}/gyre.toml"]
    cli.main()


def _calls_of_daemon(folder: Path, process: "subprocess.Popen[bytes]") -> dict[str, int]:
    process.send_signal(signal.SIGUSR1)
    while not (folder / "calls.json").exists():
        time.sleep(0.01)
    calls: dict[str, int] = json.loads((folder / "calls.json").read_text())
    (folder / "calls.json").unlink()
    return calls


def _measure(folder: Path) -> None:
    (folder / "tokens.bin").write_bytes(bytes(_NUM_BYTES))  # the page cache has all of it
    (folder / "gyre.toml").write_text(_DATASET.format(folder=folder))
    command = [sys.executable, "-m", __spec__.name, "--serve", str(folder)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log)
    try:
        await_ready(process, folder / "log")
        trip = Trip()
        from gyre_client import Loader  # noqa: PLC0415  # its threads start after the profiler

        def looked(after_s: float) -> tuple[dict[str, int], dict[str, int]]:
            time.sleep(after_s)
            return _calls_of_daemon(folder, process), trip.functions("gyre_client")

        os.environ["GYRE_ADDRESS"] = f"unix:{folder}/gyre.sock"
        idle = looked(1), looked(_IDLE_S)
        with Loader("tokens", batch_size=256, seed=1, epochs=None) as loader:
            batches = iter(loader)
            next(batches)
            _print("first", looked(1), idle[1])
            for _ in range(_NUM_BATCHES):
                next(batches)
            idle = looked(1), looked(_IDLE_S)
            for _ in range(_NUM_BATCHES):
                next(batches)
            _print("steady", looked(0), idle[1])
    finally:
        process.terminate()
        process.wait(30)


def _print(batch: str, calls: tuple[dict[str, int], ...], idle: tuple[dict[str, int], ...]) -> None:
    for name, of_batch, of_timers in zip(("daemon", "client"), calls, idle, strict=True):
        files: Counter[str] = Counter()
        for function, num in of_batch.items():
            if num > 2 * of_timers.get(function, 0):
                files[function.partition(":")[0]] += num
        print(f"\n## {batch} batch: {len(files)} files of the {name}\n")
        for path, num in sorted(files.items()):
            print(f"{num:8} {path}")


def main() -> None:
    """Measure, or serve as the daemon that is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    folder = parser.parse_args().serve
    if folder:
        _serve(folder)
        return
    with tempfile.TemporaryDirectory(prefix="gyre-") as home:
        _measure(Path(home))


if __name__ == "__main__":
    main()
