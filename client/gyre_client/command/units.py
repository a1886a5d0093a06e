"""Runs units of work, by threads of this process or by tasks of Ray, and keeps their results.

A unit is independent of all others and deterministic, and its result is a small JSON object. The
results are files in a folder. So a rerun does the others, whoever was killed; one that
was done twice, as Ray may do after it lost a node, has written the same twice.

[Note: Units on Ray] A task talks to a daemon on its node: the one at the given address, or a
private one, which all tasks of the job on that node share. Units have no data in them, and return
none. Their output goes to storage that all nodes see, as the folder is. The driver only counts. It
is a separate process: Ray ends its driver when a head or raylet dies, and may never return from
`ray.shutdown`. The command says which units are left, or ends the driver.

At the end: the shards of a dataset, indexed, measured or checked in ranges, as units.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import logging
import multiprocessing
import os
import re
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from google.protobuf.json_format import MessageToDict, ParseDict
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client import __version__, errors
from gyre_client.errors import (
    DaemonFault,
    DaemonUnavailable,
    GyreError,
    InvalidRequest,
    NotInstalled,
    StorageUnavailable,
)
from gyre_client.transport.channel import Address, parse_address
from gyre_client.transport.connection import Connection
from gyre_client.transport.run import NUM_LETTERS
from gyre_client.transport.target import acquire_private

LOCAL, RAY = "local", "ray"
# A task asks Ray for this much, so that a node gets no more tasks than its memory holds. On two
# cores, two tasks took 100 MiB each and their daemon 160 MiB, with a tokenizer of 320 ids. Each
# core's process loads the tokenizer once, and up to 128 MiB of samples are in work.
TASK_MEMORY_BYTES = 1 << 30
# How often Ray repeats a task whose worker or node died. A unit that kills its workers has killed
# four then, as it would with any number.
MAX_RETRIES = 3
# Tasks that Ray has at once. It queues those for which it has no processor, and a cluster that
# grows with its queue sees them.
MAX_IN_RAY = 1000
# Units at once on one machine: one has its samples made while another one ends.
_NUM_THREADS = 2
_NUM_ATTEMPTS = 3  # of a task, with a daemon that ends or storage that stays away
_LOOK_S = 1.0  # how often the driver looks whether the command has ended
_SHUTDOWN_S = 20.0  # that Ray has to disconnect; on two cores it takes a second
_JOB, _LOCK, _RESULTS = "job.json", "lock", "results"
_CLUSTER = re.compile(r"ray://[A-Za-z0-9.\-]+:[0-9]{1,5}|ray://\[[0-9A-Fa-f:.]+\]:[0-9]{1,5}")
_MAX_REASON_CHARS = 500
_PASSING = (DaemonUnavailable, DaemonFault, StorageUnavailable)

Result = Mapping[str, Any]


class Unit(Protocol):
    """One unit; it must be picklable."""

    @property
    def number(self) -> int:
        """Its number among those of its job."""

    def run(self, connection: Connection, advance: Callable[[int, int], None]) -> Result:
        """Does the unit, and returns its result.

        `advance` is told of further finished samples and elements.
        """


@dataclass(frozen=True, slots=True)
class Daemons:
    """How a process on any node finds its daemon.

    The address is empty for a private one, which gets `environment` on top of the node's.
    """

    address: str
    user: int | str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


class UnitFolder:
    """The results of a job's units; one process at a time may be its driver.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path, job: Mapping[str, object]) -> None:
        """Makes the folder, or goes on with one of the same job.

        `job` tells a job from others, and is ready for JSON.

        Raises:
            InvalidRequest: The folder is another job's or in use, or it cannot be made.
        """
        self.path = path
        wanted = json.loads(json.dumps(job))
        try:
            (path / _RESULTS).mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidRequest(f"{path} cannot be made: {error.strerror or error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not (path / _JOB).exists():
                write_whole(path / _JOB, json.dumps(wanted))
            found = json.loads((path / _JOB).read_text())
        except BlockingIOError:
            os.close(self._lock)
            raise InvalidRequest(f"{path} is in use by another command; wait for its end") from None
        except (OSError, ValueError) as error:
            os.close(self._lock)
            raise InvalidRequest(f"{path} cannot be used: {error}. Remove it.") from error
        if found != wanted:
            os.close(self._lock)
            keys = ", ".join(key for key in wanted if found.get(key) != wanted[key]) or "more"
            raise InvalidRequest(
                f"{path} has finished parts of a job that differs in: {keys}. Give the same "
                "arguments to go on with it, or remove it to begin anew"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the results, if there are any."""
        if not self.results():
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def results(self) -> dict[int, Result]:
        """Returns the results so far, by the numbers of their units."""
        found = {}
        for path in sorted((self.path / _RESULTS).glob("*.json")):
            with contextlib.suppress(ValueError, OSError):
                found[int(path.stem)] = json.loads(path.read_text())
        return found

    def remove(self) -> None:
        """Removes everything, once the output is where it belongs."""
        shutil.rmtree(self.path, ignore_errors=True)


def unfinished_folder(target: Path) -> Path:
    """Returns where the parts of a folder are until all of them are there."""
    absolute = target.absolute()
    return absolute.with_name(f".{absolute.name}.unfinished")


def write_whole(path: Path, text: str) -> None:
    """Writes a file that appears whole, on the disk, or not at all."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)


def check_engine(engine: str) -> None:
    """Checks the name of an engine.

    Raises:
        InvalidRequest: There is none.
        NotInstalled: It needs Ray.
    """
    if engine != LOCAL and engine != RAY and not _CLUSTER.fullmatch(engine):
        raise InvalidRequest(
            f"no engine is {engine[:200]!r}; write `local`, `ray` for a Ray of this machine or the "
            "cluster at RAY_ADDRESS, or `ray://HOST:PORT` for the cluster there"
        )
    if engine != LOCAL and importlib.util.find_spec("ray") is None:
        raise NotInstalled.needs("this engine", "ray", "ray")


def run_units(
    units: Sequence[Unit],
    folder: UnitFolder,
    driver: Pipe | None,
    connection: Connection,
    daemons: Daemons,
    advance: Callable[[int, int], None],
) -> None:
    """Does all units that have no result yet; see the module.

    `advance` is told of further finished samples and elements. `connection` is to the daemon of
    this process, for `local`, and `daemons` are for tasks of Ray.

    Raises:
        GyreError: A unit failed; results of others are kept.
    """
    done = folder.results()
    left = [unit for unit in units if unit.number not in done]
    if driver is None:
        _run_here(left, folder.path, connection, advance)
        return
    try:
        driver.send((left, str(folder.path), daemons))
        while step := driver.recv():
            reason, message, num_samples, num_elements = step
            if reason:
                raise getattr(errors, reason, GyreError)(message)
            advance(num_samples, num_elements)
    except (EOFError, OSError) as error:
        raise StorageUnavailable(
            "Ray ended its driver, as when a raylet or the head dies. The same command does the "
            "rest"
        ) from error


def _run_here(
    units: Sequence[Unit],
    path: Path,
    connection: Connection,
    advance: Callable[[int, int], None],
) -> None:
    stopped, lock = threading.Event(), threading.Lock()

    def told(num_samples: int, num_elements: int) -> None:
        if stopped.is_set():
            raise InvalidRequest("another unit failed")
        with lock:
            advance(num_samples, num_elements)

    def run(unit: Unit) -> None:
        if not stopped.is_set():
            _keep(path, unit.number, unit.run(connection, told))

    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        running = [threads.submit(run, unit) for unit in units]
        try:
            for each in as_completed(running):
                each.result()
        finally:
            stopped.set()


def _keep(path: Path, number: int, result: Result) -> None:
    write_whole(path / _RESULTS / f"{number:09d}.json", json.dumps(result))


@contextlib.contextmanager
def ray_driver(engine: str) -> Iterator[Pipe | None]:
    """A pipe to the process of Ray's driver; None for `local`, threads of this process.

    A Ray of this machine ends with the context.
    """
    if engine == LOCAL:
        yield None
        return
    spawn = multiprocessing.get_context("spawn")
    ours, its = spawn.Pipe()
    folder = tempfile.mkdtemp(prefix="gyre-ray-")
    driver = spawn.Process(target=_drive, args=(engine, folder, its), daemon=True)
    driver.start()
    its.close()
    try:
        yield ours
    finally:
        ours.close()
        driver.join(_SHUTDOWN_S)
        driver.kill()  # the kernel kills a Ray that it started, too
        driver.join()
        shutil.rmtree(folder, ignore_errors=True)


def _drive(engine: str, folder: str, pipe: Pipe) -> None:
    """Does jobs by tasks of Ray, until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C, which the command gets, too
    with contextlib.suppress(EOFError, OSError):
        try:
            ray = _connected_soon(engine, folder)
        except Exception as error:  # Ray's are many
            address = os.environ.get("RAY_ADDRESS", engine) if engine == RAY else engine
            text = f"Ray at {address} cannot be used: {_last_line(error)}"
            pipe.send((InvalidRequest.__name__, text, 0, 0))
            return
        try:
            while True:
                units, path, daemons = pipe.recv()
                for step in _run_by_ray(ray, units, path, engine, daemons, pipe):
                    pipe.send(step)
                pipe.send(())
        finally:
            ray.shutdown()


def _connected_soon(engine: str, folder: str) -> Any:
    """Connects, again for some seconds while Ray has not reaped a driver that was killed."""
    for _ in range(5):
        try:
            return _connected(engine, folder)
        except Exception as error:
            if "ZombieProcess" not in str(error):
                raise
        time.sleep(1)
    return _connected(engine, folder)


def _connected(engine: str, folder: str) -> Any:
    """Returns Ray, connected to a cluster, or to one of this machine that keeps its files there."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    address = os.environ.get("RAY_ADDRESS") if engine == RAY else engine
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not address:
        # Whoever reaches its ports must know the token. Ray would write one to the home folder.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        options |= {
            "num_cpus": len(os.sched_getaffinity(0)),
            "object_store_memory": 100 << 20,  # results are small
            "include_dashboard": False,
            "_temp_dir": folder,
        }
    import ray  # noqa: PLC0415  # it reads the environment, and takes a second

    ray.init(address or "local", **options)
    return ray


def _run_by_ray(
    ray: Any, units: Sequence[Unit], path: str, engine: str, daemons: Daemons, pipe: Pipe
) -> Iterator[tuple[str, str, int, int]]:
    """Yields the class of an error and its message, or the samples and elements of a unit."""
    task = ray.remote(num_cpus=1, memory=TASK_MEMORY_BYTES, max_retries=MAX_RETRIES)(_run_on_node)
    waiting, running = iter(units), dict[Any, int]()
    while True:
        while len(running) < MAX_IN_RAY and (unit := next(waiting, None)) is not None:
            running[task.remote(unit, path, daemons)] = unit.number
        if not running:
            return
        ended, _ = ray.wait(list(running), num_returns=1, timeout=_LOOK_S)
        if pipe.poll():  # the command ended
            raise EOFError
        for each in ended:
            number = running.pop(each)
            try:
                reason, message, result = ray.get(each)
            except ray.exceptions.RayError as error:
                failure = _failure(ray, error, engine, number)
                reason, message, result = type(failure).__name__, str(failure), {}
            yield reason, message, result.get("samples", 0), result.get("elements", 0)


def _failure(ray: Any, error: Exception, engine: str, number: int) -> GyreError:
    """Returns why Ray returned no result of a unit."""
    died = ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError
    if isinstance(error, died):
        return StorageUnavailable(
            f"the Ray workers that did unit {number} died, {MAX_RETRIES + 1} of them: "
            f"{_last_line(error)}"
        )
    return InvalidRequest(
        f"Ray at {engine} could not do unit {number}: its nodes need gyre-ml with the extra `ray` "
        f"and those of the data, in this version: {_last_line(error)}"
    )


def _last_line(error: Exception) -> str:
    """Returns the last line of an error, which in Ray's has the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:_MAX_REASON_CHARS]


def _run_on_node(unit: Unit, path: str, daemons: Daemons) -> tuple[str, str, Result]:
    """Does a unit, in a worker of Ray.

    Returns:
        The class of the error and its message, both empty if there is none; and the result.
    """
    folder, node = Path(path), socket.gethostname()
    if not (folder / _JOB).exists():
        text = f"node {node} does not see {folder}; it must be on storage that all nodes share"
        return "InvalidRequest", text, {}
    kept = folder / _RESULTS / f"{unit.number:09d}.json"
    if kept.exists():  # Ray repeats the task, which had come so far
        return "", "", json.loads(kept.read_text())
    for attempt in range(_NUM_ATTEMPTS):
        try:
            with Connection(_daemon_of_node(daemons)) as connection:
                result = unit.run(connection, lambda *_: None)
            _keep(folder, unit.number, result)
        except GyreError as error:
            if not isinstance(error, _PASSING) or attempt + 1 == _NUM_ATTEMPTS:
                return type(error).__name__, f"{error} (on node {node})", {}
        else:
            return "", "", result
    raise AssertionError("the last attempt returns")


def _daemon_of_node(daemons: Daemons) -> Address:
    """Returns the address of this node's daemon; a private one is started by the first task.

    It is this worker's until the worker ends.
    """
    if daemons.address:
        return parse_address(daemons.address, daemons.user)
    import ray  # noqa: PLC0415  # this is one of its workers

    os.environ |= daemons.environment
    context = ray.get_runtime_context()
    name = f"{context.get_job_id()} {context.get_node_id()}"
    daemon = acquire_private(hashlib.sha256(name.encode()).hexdigest()[:NUM_LETTERS])
    daemon.ensure()
    return daemon.address


INDEX_DIR = "GYRE_INDEX_DIR"
# Each unit lists all shards, so that there are not as many units as shards of a large dataset.
_MAX_UNITS = 1000
_SUMS = "num_samples", "num_bytes", "num_decoded", "num_left_out", "num_damaged"
Work = Literal["index", "measure", "lint"]


@dataclass(frozen=True, slots=True)
class ShardUnit:
    """The shards `[first, stop)` of a dataset; see `units.Unit`."""

    number: int
    first: int
    stop: int
    work: Work
    dataset: pb.DatasetRef
    transforms: pb.TransformList | None

    def run(self, connection: Connection, advance: Callable[[int, int], None]) -> dict[str, Any]:
        """Does the work on the shards, whose result is in files of the daemon, or findings."""
        shards = pb.ShardRange(first=self.first, stop=self.stop)
        if self.work == "lint":
            found = findings_of(connection.lint(self.dataset, shards), lambda *_: None)
            return {"samples": self.stop - self.first, "found": MessageToDict(found)}
        measures = self.work == "measure"
        progress = connection.index(
            self.dataset, shards=shards, transforms=self.transforms, measures=measures
        )
        for _ in progress:
            pass
        return {"samples": self.stop - self.first}


def findings_of(
    messages: Iterable[pb.LintProgress], show: Callable[[pb.LintProgress, int], None]
) -> pb.LintProgress:
    """Returns the last message with the findings of all; `show` is told how many there are."""
    last, findings, num_left_out = pb.LintProgress(), list[pb.LintFinding](), 0
    for last in messages:
        findings += last.findings
        num_left_out += last.num_left_out
        show(last, len(findings) + num_left_out)
    del last.findings[:]
    last.findings.extend(findings)
    last.num_left_out = num_left_out
    return last


def run_on_shards(
    works: Sequence[Work],
    connection: Connection,
    dataset: pb.DatasetRef,
    transforms: pb.TransformList | None,
    engine: str,
    daemons: Daemons,
    show: Callable[[int, int, str], None],
) -> Mapping[int, Any]:
    """Does one kind of work after the other on all shards, by tasks of Ray.

    `show` is told how many shards are done, how many there are, and the kind of work.

    Returns:
        The results of the last kind, by the numbers of its units.

    Raises:
        InvalidRequest: There is no folder that all nodes see.
        GyreError: As `run_units`.
    """
    path = os.environ.get(INDEX_DIR)
    if not path:
        raise InvalidRequest(
            f"--engine: {INDEX_DIR} is not set. Set it to a folder of indexes that all nodes see."
        )
    counted = next(connection.index(dataset, shards=pb.ShardRange()), pb.IndexProgress())
    num_shards, step = counted.num_shards, -(-counted.num_shards // _MAX_UNITS)
    results: Mapping[int, Any] = {}
    with ray_driver(engine) as driver:
        for work in works:
            units = [
                ShardUnit(number, first, min(first + step, num_shards), work, dataset, transforms)
                for number, first in enumerate(range(0, num_shards, step))
            ]
            results = _results(units, Path(path).absolute(), driver, connection, daemons, show)
    return results


def _results(
    units: list[ShardUnit],
    path: Path,
    driver: Pipe | None,
    connection: Connection,
    daemons: Daemons,
    show: Callable[[int, int, str], None],
) -> Mapping[int, Any]:
    """Does the units, and returns their results; until all are done, a folder keeps them."""
    one = units[-1]
    chain = one.transforms.SerializeToString(deterministic=True) if one.transforms else b""
    job = {
        "command": one.work,
        "dataset": one.dataset.SerializeToString(deterministic=True).hex(),
        "transforms": chain.hex(),
        "shards": one.stop,
        "gyre": __version__,
    }
    digest = hashlib.sha256(json.dumps(job).encode()).hexdigest()[:16]
    with UnitFolder(path / f"units-{digest}", job) as folder:
        num_done = sum(each["samples"] for each in folder.results().values())

        def advance(num: int, _: int) -> None:
            nonlocal num_done
            num_done += num
            show(num_done, one.stop, one.work)

        run_units(units, folder, driver, connection, daemons, advance)
        results = folder.results()
        folder.remove()
    return results


def merged_findings(results: Mapping[int, Any]) -> pb.LintProgress:
    """Returns the findings in all shards, as one call about all of them would."""
    whole = pb.LintProgress()
    for _, result in sorted(results.items()):
        part = ParseDict(result["found"], pb.LintProgress())
        for finding in part.findings:
            if finding.HasField("sample_id"):
                finding.sample_id += whole.num_samples
        whole.findings.extend(part.findings)
        for reason, num in part.not_decoded.items():
            whole.not_decoded[reason] += num
        for name in _SUMS:
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
        whole.num_shards += result["samples"]
    if whole.num_damaged:  # ids behind an unread shard are not known
        for finding in whole.findings:
            finding.ClearField("sample_id")
    return whole
