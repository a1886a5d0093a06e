"""What the commands write: no control character of others, no traceback, whatever the streams are.

Names of datasets, fields, shards and jobs, and messages of the daemon, may hold any characters. The
tests look at the raw bytes of standard output and standard error.
"""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from google.protobuf.message import Message
from gyre_client.command.cli import main
from gyre_protos.program import run_program
from gyre_protos.v1 import loader_pb2 as pb

from tests import stub_daemon
from tests.conftest import StartDaemon
from tests.stub_daemon import StubDaemon, batches, frame, group, payload

# A title, a cleared screen, C1's CSI, DEL, text from right to left, lines, a half of a pair, a byte
# order mark, an emoji's joiner, and a bell.
EVIL = "a\x1b]0;t\x07\x1b[2J\x9b31m\x7f\u202eb\u2066c\u2028d\u2029e\x85f\ufeffg\u200dh\ni\rj\tk\0l"
# Bytes that a terminal obeys, and in UTF-8 those that turn or break lines.
OBEYED = re.compile(
    rb"[\x00-\x09\x0b-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80[\xa8-\xae]|\xe2\x81[\xa6-\xa9]|\xef\xbb\xbf"
)
COLOUR = re.compile(rb"\x1b\[[0-9;]*m")
DEADLINE_S = 120


def evil(message: Message) -> Any:
    """Puts such characters into each string of a message."""
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.type == field.TYPE_STRING and not field.is_repeated:
            setattr(message, field.name, EVIL + value)
        elif field.type == field.TYPE_STRING:
            value.append(EVIL)
        elif field.message_type and field.is_repeated and hasattr(value, "add"):
            evil(value[0] if value else value.add())
        elif field.message_type and not field.is_repeated:
            evil(value)
            value.SetInParent()
    return message


def description() -> pb.DatasetDescription:
    found = stub_daemon.description()
    found.name = found.uri = found.format = found.fingerprint = EVIL
    found.fields[1].name = EVIL
    return found


def index_progress() -> Iterator[pb.IndexProgress]:
    """A shard that was scanned, one of a column that was read, and one that was measured."""
    scanned = evil(pb.IndexProgress(num_shards=1))
    scanned.ClearField("measured")
    scanned.ClearField("column")
    yield scanned
    yield pb.IndexProgress(num_shards=1, column=evil(pb.ColumnProgress()))
    yield pb.IndexProgress(num_shards=1, measured=evil(pb.MeasuringProgress()))


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[StubDaemon]:
    """A daemon all of whose strings are such."""
    stub = StubDaemon(tmp_path)
    stub.shares = False
    wrong = group(0)
    wrong.inline.SetInParent()
    wrong.layouts[0].tensors[2].name = EVIL
    wrong.layouts[0].tensors[3].name = f"{EVIL}.offsets"
    data = bytearray(payload())
    data[128:136] = "\x1b[2J\x9b\x7f".encode()[:8].ljust(8, b"!")
    stub.frames = [frame(bytes(data))]
    stub.responses = lambda stub, session: iter([batches(wrong)])

    def opened(request: pb.OpenSessionRequest) -> pb.SessionOpened:
        found = stub.session(request)
        found.fingerprint = EVIL
        found.fields[1].name = EVIL
        return found

    stub.answers |= {
        "OpenSession": opened,
        "DescribeDataset": lambda request: description(),
        "ListDatasets": lambda request: evil(pb.ListDatasetsResponse()),
        "GetStatus": lambda request: evil(pb.DaemonStatus()),
        "ExplainStep": lambda request: evil(pb.ExplainStepResponse()),
        "PlanStep": lambda request: pb.PlanStepResponse(sample_ids=[1, 2]),
        "PlanCost": lambda request: evil(pb.PlanCostResponse()),
        "IndexDataset": lambda request: index_progress(),
        "LintDataset": lambda request: iter([evil(pb.LintProgress(num_shards=1))]),
    }
    with stub:
        yield stub


COMMANDS = {
    "datasets": ["datasets"],
    "describe": ["describe", "d"],
    "index": ["index", "d"],
    "lint": ["lint", "d"],
    "status": ["status"],
    "top": ["top", "--once"],
    "plan": ["plan", "d", "--batch-size", "2", "--step", "0"],
    "cost": ["plan", "d", "--batch-size", "2", "--cost"],
    "why": ["why", "d", "--step", "0"],
    "cat": ["cat", "d", "--num", "2"],
    "bench": ["bench", "d", "--batch-size", "2"],  # fails: the daemon sends one batch
}


def command(stub: StubDaemon, name: str, *more: str) -> list[str]:
    return [*COMMANDS[name], f"--address={stub.address}", *more]


class Written(NamedTuple):
    """What a program wrote, and its exit status."""

    status: int
    stdout: bytes
    stderr: bytes


def outside(module: str, arguments: Sequence[str], **options: Any) -> Written:
    """Runs a program in a process of its own."""
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    line = [sys.executable, "-m", module, *arguments]
    done: subprocess.CompletedProcess[bytes] = subprocess.run(
        line, check=False, timeout=DEADLINE_S, **streams
    )
    return Written(done.returncode, done.stdout or b"", done.stderr or b"")


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Written]]:
    """Runs `gyre` in this process, which is quicker, with other standard streams."""
    before = signal.getsignal(signal.SIGINT)

    def run(arguments: Sequence[str], stdout: Path | int | None = None) -> Written:
        paths = [stdout if stdout is not None else tmp_path / "stdout", tmp_path / "stderr"]
        with contextlib.ExitStack() as stack:
            for name, path in zip(("stdout", "stderr"), paths, strict=True):
                file = stack.enter_context(open(path, "w", encoding="utf-8"))  # noqa: PTH123
                monkeypatch.setattr(sys, name, file)
            status = run_program("gyre", lambda: main(arguments))
        monkeypatch.undo()
        own = b"" if stdout is not None else (tmp_path / "stdout").read_bytes()
        return Written(status, own, (tmp_path / "stderr").read_bytes())

    yield run
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_text_of_a_daemon_reaches_a_terminal_raw(
    stub: StubDaemon, inside: Callable[..., Written], name: str, as_json: bool
) -> None:
    done = inside(command(stub, name, *["--json"] * as_json))
    written = done.stdout + done.stderr
    assert not OBEYED.search(written), OBEYED.search(written)
    assert done.status == {"bench": 1, "lint": 1}.get(name, 0), written
    if name not in ("plan", "bench"):
        escape = b"a\\u001b" if as_json else b"a\\x1b"
        assert escape in written
    if as_json and name != "bench":
        assert json.loads(done.stdout)


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, Callable[[], bytes]]]:
    """A pseudo-terminal to write to, and what was written to it once it is closed."""
    ours, theirs = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # EIO: nobody has the terminal open any more
            while part := os.read(ours, 1 << 16):
                shown.append(part)

    reader = threading.Thread(target=read)
    reader.start()

    def all_shown() -> bytes:
        reader.join(DEADLINE_S)
        return b"".join(shown)

    yield theirs, all_shown
    reader.join(DEADLINE_S)
    os.close(ours)


@pytest.mark.parametrize("name", ["describe", "status", "datasets", "index", "cat", "why"])
def test_colours_are_all_that_a_terminal_obeys(
    stub: StubDaemon,
    inside: Callable[..., Written],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with terminal() as (theirs, all_shown):
        assert inside(command(stub, name), stdout=theirs).status == 0
        shown = COLOUR.sub(b"", all_shown()).replace(b"\r\n", b"\n")
    assert b"\\x1b" in shown
    assert not OBEYED.search(shown), OBEYED.search(shown)


@pytest.mark.parametrize("columns", ["0", "1", "-5", "x", "", "9" * 30, "1e3"])
@pytest.mark.parametrize("term", ["", "dumb", "no-such-terminal"])
def test_an_odd_terminal_is_no_error(
    stub: StubDaemon, inside: Callable[..., Written], columns: str, term: str
) -> None:
    with pytest.MonkeyPatch.context() as environment, terminal() as (theirs, _):
        environment.setenv("COLUMNS", columns)
        environment.setenv("TERM", term)
        assert inside(command(stub, "status"), stdout=theirs) == (0, b"", b"")


@pytest.mark.parametrize(
    "environment",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"LC_ALL": "no_SUCH.locale", "PYTHONIOENCODING": "latin-1:strict"},
    ],
)
def test_a_terminal_of_few_characters_is_no_error(
    stub: StubDaemon, environment: dict[str, str]
) -> None:
    found = stub_daemon.description()
    found.uri = "/w\u00f6rter/\u65e5\u672c"
    stub.answers["DescribeDataset"] = lambda request: found
    done = outside("gyre_client", command(stub, "describe"), env={**os.environ, **environment})
    assert (done.status, done.stderr) == (0, b"")
    assert b"\\u65e5\\u672c" in done.stdout


PRINTING = [*(name for name in COMMANDS if name != "bench"), "help"]


@pytest.mark.parametrize("name", PRINTING)
def test_a_full_disk_is_one_sentence(
    stub: StubDaemon, inside: Callable[..., Written], name: str
) -> None:
    arguments = ["--help"] if name == "help" else command(stub, name)
    done = inside(arguments, stdout=Path("/dev/full"))
    sentence = b"gyre: the output cannot be written: No space left on device\n"
    assert (done.status, done.stderr) == (1, sentence)


@pytest.mark.parametrize("name", PRINTING)
def test_a_reader_that_went_away_is_silent(
    stub: StubDaemon, inside: Callable[..., Written], name: str
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    arguments = ["--help"] if name == "help" else command(stub, name)
    assert inside(arguments, stdout=writer) == (128 + signal.SIGPIPE, b"", b"")


@pytest.fixture
def programs(stub: StubDaemon, tmp_path: Path) -> dict[str, list[str]]:
    """A command line of each program that prints."""
    config = tmp_path / "gyre.toml"
    np.arange(80, dtype=np.int16).tofile(tmp_path / "tokens.bin")
    config.write_text(
        f'listen = ["unix:{tmp_path}/other.sock"]\n[datasets.tokens]\nuri = "tokens.bin"\n'
        'format = "tokens"\ndtype = "int16"\nsequence_length = 8\n'
    )
    return {
        "gyre": ["gyre_client", *command(stub, "describe")],
        "gyred": ["gyre_daemon", "check-config", "--config", str(config)],
    }


@pytest.mark.parametrize("name", ["gyre", "gyred"])
def test_streams_of_a_process_that_are_full_gone_or_closed(
    programs: dict[str, list[str]], name: str
) -> None:
    module, *arguments = programs[name]
    with Path("/dev/full").open("wb") as full:
        sentence = f"{name}: the output cannot be written: No space left on device\n".encode()
        assert outside(module, arguments, stdout=full) == (1, b"", sentence)
        assert outside(module, arguments, stdout=full, stderr=full).status == 1
    reader, writer = os.pipe()
    os.close(reader)
    gone = outside(module, arguments, stdout=writer, stderr=writer)
    os.close(writer)
    assert gone.status == 128 + signal.SIGPIPE

    def closed(streams: str) -> Written:
        line = ["/bin/sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, "-m", module]
        done = subprocess.run(
            [*line, *arguments], check=False, timeout=DEADLINE_S, capture_output=True
        )
        return Written(done.returncode, done.stdout, done.stderr)

    assert closed("<&-")[::2] == (0, b"")
    sentence = b"gyre: the output cannot be written: standard output is closed\n"
    assert closed(">&-") == ((1, b"", sentence) if name == "gyre" else (0, b"", b""))
    assert closed("<&- >&- 2>&-")[1:] == (b"", b"")


def test_ctrl_c_is_130_without_a_word(stub: StubDaemon) -> None:
    asked = threading.Event()

    def hang(request: pb.DescribeDatasetRequest) -> pb.DatasetDescription:
        asked.set()
        stub.stopping.wait(DEADLINE_S)
        return pb.DatasetDescription()

    stub.answers["DescribeDataset"] = hang
    line = [sys.executable, "-m", "gyre_client", *command(stub, "describe")]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert asked.wait(DEADLINE_S)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=DEADLINE_S) == (b"", b"")
    assert process.returncode == 130


@pytest.mark.parametrize("module", ["gyre_client", "gyre_daemon"])
def test_ctrl_c_during_the_imports(module: str) -> None:
    """The interrupt comes where the module of the command line is imported."""
    program = (
        "import sys, os, signal, runpy\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name in ('gyre_client.command.cli', 'gyre_daemon.cli'):\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv = ['x', '--help']\n"
        f"runpy.run_module('{module}', run_name='__main__')\n"
    )
    line = [sys.executable, "-c", program]
    done = subprocess.run(line, check=False, timeout=DEADLINE_S, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_names_of_a_real_daemon(
    gyred: StartDaemon, inside: Callable[..., Written], tmp_path: Path
) -> None:
    """Answers, log and check of a daemon with such names of a dataset and of a shard."""
    shard = tmp_path / "c\x1b]0;t\x07\x7f\u202e.bin"
    np.arange(80, dtype=np.int16).tofile(shard)
    name = "n\x1b[31m\u202e"
    tokens = {"uri": str(tmp_path), "format": "tokens", "dtype": "int16", "sequence_length": 8}
    daemon = gyred({"datasets": {name: tokens}})
    for arguments in (["datasets"], ["describe", name], ["index", name], ["cat", name], ["status"]):
        for more in ([], ["--json"]):
            done = inside([*arguments, *more, f"--address={daemon.address}"])
            written = done.stdout + done.stderr
            assert done.status == 0, written
            assert not OBEYED.search(written), (arguments, OBEYED.search(written))
    check = outside("gyre_daemon", ["check-config", "--config", str(daemon.config_path)])
    assert not OBEYED.search(check.stdout + check.stderr)
    daemon.stop()
    assert not OBEYED.search(daemon.log_path.read_bytes())
