"""Faults of an object storage while a job reads.

`python -m benchmarks.loader.storage.storms --out docs/benchmarks/NAME [--only TEXT]`

For each fault there is a daemon, a scripted object server, and a job that reads as fast as it can
and compares every byte. The server works for some seconds, then has the fault, then works again
until throughput has recovered. The script writes NAME.json, to which later parts add, and makes
NAME.md and NAME.png from it.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gyre_client import GyreError, Loader
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection

from benchmarks.loader.processes import daemon, load_average
from benchmarks.loader.storage import stormreport
from benchmarks.loader.storage.objects import BATCH_SIZE, SAMPLE_BYTES
from benchmarks.loader.storage.stormfaults import FAULTS, Fault, Scene, scene_of
from benchmarks.loader.storage.stormreport import Course

BEFORE_S, LEAST_AFTER_S, MOST_AFTER_S = 8.0, 10.0, 40.0
PAUSE_S = 0.2  # of a job that was told, until it tries again


class Job:
    """Reads until the end, whatever happens, and records the batches."""

    def __init__(self, fault: Fault, address: str, wanted: npt.NDArray[np.int32]) -> None:
        self.course = Course(fault.name, load_average())
        self._fault, self._address, self._wanted = fault, address, wanted
        self._state: dict[str, object] | None = None
        self._next_step = 0
        self.began = 0.0

    @property
    def now_s(self) -> float:
        """Seconds since the first batch."""
        return time.monotonic() - self.began if self.began else 0.0

    def read(self) -> None:
        """Read until throughput has recovered for a while, or does not recover."""
        while not self._is_over():
            try:
                self._read_session()
            except GyreError as error:
                if not self._fault.wants_errors:
                    raise
                if (told := type(error).__name__) not in self.course.errors:
                    self.course.errors.append(told)
                time.sleep(PAUSE_S)

    def _read_session(self) -> None:
        with Loader(
            "T",
            batch_size=BATCH_SIZE,
            seed=1,
            job="storm",
            address=self._address,
            reattach_timeout_s=1.0,
        ) as loader:
            if self._state:
                loader.load_state_dict(self._state)
            try:
                for batch in loader.stream():
                    self._take(batch)
                    if self._is_over():
                        return
            finally:
                self._state = loader.state_dict()

    def _take(self, batch: dict[str, torch.Tensor]) -> None:
        self.began = self.began or time.monotonic()
        ids = batch["sample_id"].numpy()
        self.course.num_wrong += not np.array_equal(batch["tokens"].numpy(), self._wanted[ids])
        self.course.arrivals.append((self.now_s, len(ids)))

    def _is_over(self) -> bool:
        since = self.now_s - self.course.end_s
        return since > MOST_AFTER_S or (
            since > LEAST_AFTER_S and stormreport.recovery_s(self.course) is not None
        )


def run(fault: Fault, folder: Path) -> Course:
    """Run one fault, from a new daemon to the recovery."""
    with scene_of(fault, folder) as scene:
        config: dict[str, object] = {
            "uri": "s3://data/*.bin",
            "format": "tokens",
            "dtype": "int32",
            "cache": fault.is_cached,
        }
        settings = {
            "endpoint": scene.server.url,
            "region": "us-east-1",
            "virtual_hosted_style_request": "false",
        }
        if not fault.storage:
            settings |= {"metadata_endpoint": scene.server.url, "imdsv1_fallback": "true"}
        config |= {"sequence_length": SAMPLE_BYTES // 4}
        config |= {f"storage.{key}": value for key, value in {**settings, **fault.storage}.items()}
        lines = [
            *fault.daemon_lines,
            *([f'cache_dir = "{scene.disk}/cache"'] if fault.is_cached else []),
        ]
        wanted = np.concatenate(
            [np.fromfile(path, np.int32) for path in sorted((scene.root / "data").iterdir())]
        )
        with daemon(folder, {"T": config}, more=lines) as serving:
            job = Job(fault, serving.address, wanted.reshape(-1, SAMPLE_BYTES // 4))
            with _troubled(job, fault, scene):
                job.read()
            job.course.requests = _requests(serving.address)
    return job.course


@contextmanager
def _troubled(job: Job, fault: Fault, scene: Scene) -> Iterator[None]:
    """Begin and end the fault while the job reads."""
    is_over = threading.Event()

    def trouble() -> None:
        while job.now_s < BEFORE_S:
            if is_over.wait(0.05):
                return
        job.course.begin_s = job.now_s
        fault.begin(scene)
        is_over.wait(fault.duration_s)
        fault.end(scene)
        job.course.end_s = job.now_s

    thread = threading.Thread(target=trouble)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _requests(address: str) -> dict[str, int]:
    with Connection(parse_address(address)) as connection:
        return {
            count.outcome: count.num_requests
            for count in connection.status().storage
            if count.kind == "read"
        }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="without a suffix")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of faults")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    stored = args.out.with_suffix(".json")
    courses = (
        {each["fault"]: each for each in json.loads(stored.read_text())} if stored.exists() else {}
    )
    with tempfile.TemporaryDirectory(prefix="gyre-storms-") as folder:
        for fault in FAULTS:
            if args.only and not any(text in fault.name for text in args.only):
                continue
            print(fault.name, file=sys.stderr, flush=True)
            course = run(fault, Path(folder))
            course.arrivals = stormreport.condensed(course.arrivals)
            courses[fault.name] = asdict(course)
            print("\n".join(stormreport.table_of([course])[2:]), file=sys.stderr, flush=True)
            stored.write_text(json.dumps(list(courses.values())))
    known = [Course(**courses[fault.name]) for fault in FAULTS if fault.name in courses]
    args.out.with_suffix(".md").write_text(stormreport.page(known, args.out.name))
    stormreport.plot(known, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
