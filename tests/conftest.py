"""Fixtures that several folders of tests share: a real daemon process, and datasets."""

import functools
import gc
import json
import multiprocessing.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from hypothesis import settings

from tests.preloaded.interpreter import Forked, Interpreter

gc.disable()  # until all modules of tests are imported; see `pytest_collection_finish`

START_DEADLINE_S = 150.0
COMMAND_DEADLINE_S = 120.0
SERVE = ("-m", "gyre_daemon", "serve", "--config")

# The same examples on every run, none kept, and no deadline: a slow machine is no counterexample.
settings.register_profile("gyre", derandomize=True, database=None, deadline=None)
settings.load_profile("gyre")

# The files that take longest begin first, so that no worker ends much later than the others. A file
# goes to one worker as a whole, so that its shared fixtures are set up once. All other files follow
# in the order of their names.
LONGEST_FIRST = (
    "test_rotation_parity",
    "test_formats",
    "test_hub",
    "test_kept_cursors",
    "test_client_cli",
    "test_kept_checkpoint",
    "test_rotation_switched",
    "test_rotation_plan",
    "test_tokenize",
    "test_arena",
    "test_peers",
    "test_rotation_checkpoint",
    "test_train_checkpoint",
    "test_train_eval_command",
    "test_kubernetes",
    "test_chat",
    "test_soak",
    "test_sharing",
    "test_train_run",
    "test_train_tools",
    "test_benchmarks_rtp",
    "test_train_step_cost",
    "test_pages_are_true",
    "test_train_export",
    "test_frameworks",
    "test_train_run_faults",
    "test_cached_text",
    "test_train_depth",
    "test_rotation_exact",
    "test_packing",
    "test_node_cache",
    "test_memory_is_shared_out",
    "test_client_bench",
    "test_http2_limits",
    "test_train_bad_inputs",
    "test_language_model",
    "test_rotation_layers",
    "test_rotation_faults",
    "test_client_embedded",
    "test_benchmarks_training",
    "test_elastic_mixtures",
    "test_train_boards",
    "test_tar_fields",
    "test_rotation_replicas",
    "test_train_replicas",
    "test_train_half_precision_memory",
    "test_units_on_ray",
    "test_rotation_compiled",
    "test_rotation_bytes_sent",
)


# Processes that a worker starts once for all its files: their imports take 2 to 6 CPU-seconds. With
# `--together` the files that need the same one go to one worker.
RANKS = "ranks, forked by tests/distributed/gloo_ranks.py"
RUNS = "runs of gyre-train, forked by tests/train_jobs.py"
S3 = "moto's server"
TOGETHER = {
    "tests/distributed/": RANKS,
    "tests/integration/service/test_peers.py": RANKS,
    "tests/integration/trainer/": RUNS,
    "tests/contract/formats/test_library_folders.py": S3,
    "tests/integration/datasets/test_formats.py": S3,
    "tests/integration/service/test_daemon_batches.py": S3,
    "tests/integration/service/test_node_cache.py": S3,
}


def pytest_configure() -> None:
    """Give this run a folder for temporary files, which goes with them.

    A process that is killed leaves what it made there. pytest's own folders stay where they are.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="gyre-tests-")
    Path(folder).chmod(0o1777)  # some tests run as other users
    # after multiprocessing has removed its own folder there, which has the priority -100
    multiprocessing.util.Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, -200)
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--together",
        action="store_true",
        help="give the files that need the same costly process to one worker of xdist",
    )
    parser.addoption(
        "--stop-after",
        type=float,
        metavar="SECONDS",
        help="run files in the order given, begin none after so many seconds, and name the rest",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--stop-after") is not None:
        return
    ranks = {name: rank for rank, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


STARTED_S = time.monotonic()


@pytest.hookimpl(tryfirst=True)  # before any fixture
def pytest_runtest_setup(item: pytest.Item) -> None:
    limit_s = item.config.getoption("--stop-after")
    if limit_s is not None and time.monotonic() - STARTED_S > limit_s:
        pytest.skip(f"no time was left for {item.path.stem}: .ci/nightly runs it")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a test that failed at once: the suite may go on for half an hour."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid}", file=sys.__stderr__, flush=True)


def pytest_collection_finish() -> None:
    """Keep the collector out of what all tests share, which is never garbage.

    With every module of the suite, a `gc.collect()` took half a second, in some hundred tests.
    """
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Returns two workers more than cores, because tests wait for a third of their time."""
    return len(os.sched_getaffinity(0)) + 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler that keeps files whole, as `--dist loadfile`, and those of `TOGETHER`."""
    if not config.getoption("--together"):
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    scheduling = LoadFileScheduling(config, log)
    file_of = scheduling._split_scope  # the public way, marks, changes the ids of tests

    def unit_of(nodeid: str) -> str:
        found = [name for path, name in TOGETHER.items() if nodeid.startswith(path)]
        return found[0] if found else str(file_of(nodeid))

    scheduling._split_scope = unit_of
    return scheduling


def to_toml(table: Mapping[str, Any], prefix: str = "") -> str:
    """Returns a nested table of strings, numbers, booleans, lists and lists of tables as TOML."""
    lines = [
        f"{json.dumps(key)} = {json.dumps(value)}"
        for key, value in table.items()
        if not isinstance(value, Mapping) and not _are_tables(value)
    ]
    for key, value in table.items():
        name = f"{prefix}{json.dumps(key)}"
        if isinstance(value, Mapping):
            lines += [f"\n[{name}]", to_toml(value, f"{name}.")]
        elif _are_tables(value):
            for each in value:
                lines += [f"\n[[{name}]]", to_toml(each, f"{name}.")]
    return "\n".join(lines)


def _are_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


@dataclass
class Daemon:
    """A `gyred` process of a test.

    Attributes:
        address: The address of its Unix socket, as clients write it.
        log_path: The file of its log.
        command: The arguments of `python`; the configuration's path follows them.
        interpreter: The interpreter that the first start is forked from, which is cheap; None for a
            new one.
    """

    config_path: Path
    address: str
    log_path: Path
    environment: Mapping[str, str]
    command: Sequence[str] = SERVE
    interpreter: Interpreter | None = None
    process: subprocess.Popen[bytes] | Forked | None = field(default=None, init=False)

    def start(self) -> "Daemon":
        """Starts the daemon, and waits until it is ready."""
        self.log_path.touch()
        begin = self.log_path.stat().st_size
        with self.log_path.open("ab") as log:
            self.process = self._started(log)
        deadline = time.monotonic() + START_DEADLINE_S
        while not any(event["event"] == "ready" for event in self.events(begin)):
            assert self.process.poll() is None, (
                f"the daemon ended at its start:\n{self.log_path.read_text()}"
            )
            assert time.monotonic() < deadline, (
                f"the daemon is not ready:\n{self.log_path.read_text()}"
            )
            time.sleep(0.02)
        return self

    def _started(self, log: IO[bytes]) -> subprocess.Popen[bytes] | Forked:
        environment = {**os.environ, **self.environment}
        command = [*self.command, str(self.config_path)]
        if self.interpreter and self.process is None:
            return self.interpreter.start(command, log, environment)
        return subprocess.Popen([sys.executable, *command], stderr=log, env=environment)

    def events(self, begin: int = 0) -> list[dict[str, Any]]:
        """Returns the events of its log from a byte on."""
        text = self.log_path.read_bytes()[begin:].decode()
        return [json.loads(line) for line in text.split("\n")[:-1] if line.startswith("{")]

    def stop(self, deadline_s: float = 120.0) -> int:
        """Sends SIGTERM, waits, and returns the exit status."""
        assert self.process
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(deadline_s)

    def kill(self) -> None:
        """Sends SIGKILL, and waits."""
        assert self.process
        self.process.kill()
        self.process.wait(120)

    def reconfigure(self, text: str) -> dict[str, Any]:
        """Writes a new configuration, sends SIGHUP, and returns the event of the reload."""
        assert self.process
        begin = self.log_path.stat().st_size
        self.config_path.write_text(text)
        self.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + START_DEADLINE_S
        while True:
            for event in self.events(begin):
                if event["event"].startswith("reload"):
                    return event
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def restart(self) -> "Daemon":
        """Starts again on the same address after `stop` or `kill`."""
        return self.start()


StartDaemon = Callable[..., Daemon]
GyredCommand = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """An interpreter that has imported the daemon's modules."""
    interpreter = Interpreter(["gyre_daemon.cli", "gyre_daemon.server", "uvloop", "obstore"])
    yield interpreter
    interpreter.close()


@pytest.fixture
def gyred_command(interpreter: Interpreter) -> GyredCommand:
    """`gyred_command("check-config", "--config", path)` runs `gyred` to its end.

    It is forked from the interpreter. `environment` adds variables.
    """

    def run(
        *arguments: str, environment: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        command = ("-m", "gyre_daemon", *arguments)
        return interpreter.run(command, {**os.environ, **(environment or {})}, COMMAND_DEADLINE_S)

    return run


@contextmanager
def daemons_in(folder: Path, interpreter: Interpreter) -> Iterator[StartDaemon]:
    """Give what `gyred` gives; the daemons and their indexes are in a folder."""
    daemons: list[Daemon] = []

    def start(
        config: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = SERVE,
    ) -> Daemon:
        own = folder / f"daemon-{len(daemons)}"
        own.mkdir()
        address = f"unix:{own}/run/gyre.sock"
        config_path = own / "gyre.toml"
        config_path.touch(0o600)  # some configurations hold secrets
        config_path.write_text(
            to_toml(
                {
                    "listen": [address],
                    "index_dir": str(own / "index"),
                    "drain_timeout_s": 3.0,
                    **config,
                }
            )
        )
        daemon = Daemon(config_path, address, own / "log", environment or {}, command, interpreter)
        daemons.append(daemon)
        return daemon.start()

    yield start
    for daemon in daemons:
        if daemon.process and daemon.process.poll() is None:
            try:
                daemon.stop()
            except subprocess.TimeoutExpired:
                daemon.kill()
                raise


@pytest.fixture
def gyred(tmp_path: Path, interpreter: Interpreter) -> Iterator[StartDaemon]:
    """`gyred({"datasets": {...}})` starts a daemon on a socket of its own.

    Its indexes go to a folder of the test. `environment` adds variables; `command` is what the
    interpreter runs. All daemons are stopped after the test.
    """
    with daemons_in(tmp_path, interpreter) as start:
        yield start


@pytest.fixture(scope="module")
def shared_gyred(
    tmp_path_factory: pytest.TempPathFactory, interpreter: Interpreter
) -> Iterator[StartDaemon]:
    """As `gyred`, for daemons that all tests of a file share: a start takes 0.2 CPU-seconds."""
    with daemons_in(tmp_path_factory.mktemp("daemons"), interpreter) as start:
        yield start


def write_tokens(folder: Path) -> Path:
    """Writes four shards of uint16 tokens: 1000 + 700 + 3 + 1300, each its own number."""
    tokens = np.arange(3003, dtype=np.uint16)
    for name, begin, end in (
        ("a", 0, 1000),
        ("b", 1000, 1700),
        ("c", 1700, 1703),
        ("d", 1703, 3003),
    ):
        tokens[begin:end].tofile(folder / f"{name}.bin")
    return folder


@pytest.fixture
def token_files(tmp_path: Path) -> Path:
    """A folder of the shards of `write_tokens`."""
    folder = tmp_path / "tokens"
    folder.mkdir()
    return write_tokens(folder)


@dataclass(frozen=True)
class S3Server:
    """An S3-compatible server process.

    Attributes:
        endpoint: The URL of the server.
        storage_settings: The table `[datasets.NAME.storage]` that reaches it.
        log_path: The server's log, one line per request.
    """

    endpoint: str
    storage_settings: Mapping[str, str]
    log_path: Path

    def make_bucket(self, name: str) -> None:
        """Makes a bucket; name it after the test, because tests share the server."""
        self._client.create_bucket(Bucket=name)

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Stores an object, and replaces one that is there."""
        self._client.put_object(Bucket=bucket, Key=key, Body=data)

    def delete(self, bucket: str, key: str) -> None:
        """Removes an object."""
        self._client.delete_object(Bucket=bucket, Key=key)

    def num_requests(self, method: str, substring: str) -> int:
        """Returns how many requests of a method, with a text in their path, were answered."""
        requests = re.findall(r'"(?:\x1b\[[\d;]*m)*([A-Z]+) (\S+) HTTP', self.log_path.read_text())
        return sum(verb == method and substring in target for verb, target in requests)

    @functools.cached_property
    def _client(self) -> Any:
        import boto3

        settings = self.storage_settings
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=settings["region"],
            aws_access_key_id=settings["access_key_id"],
            aws_secret_access_key=settings["secret_access_key"],
        )


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """moto's standalone server on a free port, for all tests of this worker."""
    log_path = tmp_path_factory.mktemp("s3") / "log"
    with log_path.open("wb") as log:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        # a small page, so that listings have several
        environment = {**os.environ, "MOTO_S3_DEFAULT_MAX_KEYS": "50"}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        deadline = time.monotonic() + START_DEADLINE_S
        while not (running := re.search(r"Running on (http://\S+)", log_path.read_text())):
            assert process.poll() is None, f"the server ended at its start:\n{log_path.read_text()}"
            assert time.monotonic() < deadline, f"the server is not ready:\n{log_path.read_text()}"
            time.sleep(0.05)
        settings = {
            "endpoint": running[1],
            "region": "us-east-1",
            "access_key_id": "test",
            "secret_access_key": "test",
            "virtual_hosted_style_request": "false",
        }
        yield S3Server(running[1], settings, log_path)
    finally:
        process.terminate()
        process.wait(120)
