"""What the commands write: no control character of others, no traceback, whatever the streams are.

Names of datasets, fields, shards and jobs, and messages of the daemon, may hold any characters. The
tests look at the raw bytes of standard output and standard error.
"""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message
from gyre_protos.v1 import loader_pb2 as pb

from tests import stub_daemon
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
        "IndexDataset": lambda request: iter([evil(pb.IndexProgress(num_shards=1))]),
    }
    with stub:
        yield stub


COMMANDS = {
    "datasets": ["datasets"],
    "describe": ["describe", "d"],
    "index": ["index", "d"],
    "status": ["status"],
    "top": ["top", "--once"],
    "plan": ["plan", "d", "--batch-size", "2", "--step", "0"],
    "cost": ["plan", "d", "--batch-size", "2", "--cost"],
    "why": ["why", "d", "--step", "0"],
    "cat": ["cat", "d", "--num", "2"],
    "bench": ["bench", "d", "--batch-size", "2"],  # refused: no such format
}


def command(stub: StubDaemon, name: str, *more: str) -> list[str]:
    address = f"--address={stub.address}"
    return [sys.executable, "-m", "gyre_client", *COMMANDS[name], address, *more]


def run(arguments: list[str], **streams: Any) -> "subprocess.CompletedProcess[bytes]":
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.run(arguments, check=False, timeout=DEADLINE_S, **streams)


@pytest.mark.parametrize("json_too", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_text_of_a_daemon_reaches_a_terminal_raw(
    stub: StubDaemon, name: str, json_too: bool
) -> None:
    done = run(command(stub, name, *["--json"] * json_too))
    written = done.stdout + done.stderr
    assert not OBEYED.search(written), OBEYED.search(written)
    assert b"Traceback" not in written
    assert done.returncode == (2 if name == "bench" else 0), written
    if name != "plan":
        assert b"a\\u001b" in written if json_too and name != "bench" else b"a\\x1b" in written
    if json_too and name != "bench":
        assert json.loads(done.stdout)


def test_a_dataset_that_does_not_exist_is_named_without_its_control_characters(
    stub: StubDaemon,
) -> None:
    done = run(command(stub, "describe", "--option", f"x={EVIL[:8]}"))
    assert done.returncode == 2
    assert not OBEYED.search(done.stdout + done.stderr)


def on_terminal(arguments: list[str], environment: dict[str, str]) -> bytes:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        arguments, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, **environment}
    )
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 1 << 16):
            shown += part
    except OSError:  # EIO: the last process has closed the terminal
        pass
    os.close(ours)
    assert process.wait(DEADLINE_S) == 0, shown
    return shown


@pytest.mark.parametrize("name", ["describe", "status", "datasets", "index", "top", "why"])
def test_colours_are_all_that_a_terminal_obeys(stub: StubDaemon, name: str) -> None:
    shown = on_terminal(command(stub, name), {"TERM": "xterm", "COLUMNS": "60"})
    shown = COLOUR.sub(b"", shown).replace(b"\r\n", b"\n").replace(b"\r\x1b[K", b"")
    assert not OBEYED.search(shown), OBEYED.search(shown)
    assert b"\\x1b" in shown or b"\\u202e" in shown or b"\xe2\x80\xa6" in shown


@pytest.mark.parametrize("columns", ["0", "1", "-5", "x", "", "9" * 30, "1e3"])
@pytest.mark.parametrize("term", ["", "dumb", "no-such-terminal"])
def test_an_odd_terminal_is_no_traceback(stub: StubDaemon, columns: str, term: str) -> None:
    shown = on_terminal(command(stub, "status"), {"COLUMNS": columns, "TERM": term})
    assert b"Traceback" not in shown


@pytest.mark.parametrize(
    "environment",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"LC_ALL": "POSIX"},
        {"LC_ALL": "no_SUCH.locale"},
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1:strict"},
        {"PYTHONIOENCODING": "utf-16"},
    ],
)
def test_a_terminal_of_few_characters_is_no_traceback(
    stub: StubDaemon, environment: dict[str, str]
) -> None:
    stub.answers["DescribeDataset"] = lambda request: pb.DatasetDescription.FromString(
        (lambda it: (setattr(it, "uri", "/wörter/日本"), it)[1])(
            stub_daemon.description()
        ).SerializeToString()
    )
    done = run(command(stub, "describe"), env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""
    assert done.stdout


def with_closed(streams: str, arguments: list[str]) -> "subprocess.CompletedProcess[bytes]":
    return run(["/bin/sh", "-c", f'exec "$@" {streams}', "sh", *arguments])


GYRED = [sys.executable, "-m", "gyre_daemon"]


@pytest.fixture
def programs(stub: StubDaemon, tmp_path: Path) -> dict[str, list[str]]:
    config = tmp_path / "gyre.toml"
    config.write_text(f'listen = ["unix:{tmp_path}/other.sock"]\n')
    check = [*GYRED, "check-config", "--config", str(config)]
    return {
        "help": [sys.executable, "-m", "gyre_client", "--help"],
        "completion": [sys.executable, "-m", "gyre_client", "--print-completion", "bash"],
        "gyred help": [*GYRED, "serve", "--help"],
        "gyred check": check,
    } | {name: command(stub, name) for name in COMMANDS if name != "bench"}


PROGRAMS = ["help", "completion", "gyred help", "gyred check", *COMMANDS]
PROGRAMS.remove("bench")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_full_disk_is_one_sentence(programs: dict[str, list[str]], name: str) -> None:
    with Path("/dev/full").open("wb") as full:
        done = run(programs[name], stdout=full)
        assert done.returncode == 1
        assert done.stderr.count(b"\n") == 1
        assert re.match(rb"gyred?: the output cannot be written: No space left", done.stderr)
        both = run(programs[name], stdout=full, stderr=full)
        assert both.returncode == 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_reader_that_went_away_is_silent(programs: dict[str, list[str]], name: str) -> None:
    for both in (False, True):
        reader, writer = os.pipe()
        os.close(reader)
        streams = {"stdout": writer} | ({"stderr": writer} if both else {})
        done = run(programs[name], **streams)
        os.close(writer)
        assert done.returncode == 128 + signal.SIGPIPE
        assert not done.stderr


@pytest.mark.parametrize("name", PROGRAMS)
def test_closed_streams_are_no_traceback(programs: dict[str, list[str]], name: str) -> None:
    fine = with_closed("<&-", programs[name])
    assert (fine.returncode, fine.stderr) == (0, b"")
    assert fine.stdout
    closed = with_closed(">&-", programs[name])
    assert b"Traceback" not in closed.stderr
    if not name.startswith("gyred"):
        assert closed.returncode == 1
        assert closed.stderr == b"gyre: the output cannot be written: standard output is closed\n"
    assert with_closed("2>&-", programs[name]).returncode == 0
    assert with_closed("<&- >&- 2>&-", programs[name]).stdout == b""


def test_an_error_with_closed_streams(stub: StubDaemon) -> None:
    wrong = [sys.executable, "-m", "gyre_client", "status", "--address=unix:/nowhere.sock"]
    assert with_closed(">&- 2>&-", wrong).returncode == 1
    with Path("/dev/full").open("wb") as full:
        assert run(wrong, stdout=full, stderr=full).returncode == 1


@pytest.mark.parametrize("name", ["top", "describe", "index"])
def test_ctrl_c_is_130_without_a_word(stub: StubDaemon, name: str) -> None:
    called = stub.stopping

    def hang(request: Any) -> Any:
        asked.append(request)
        called.wait(20)
        return iter([])

    asked: list[Any] = []
    for method in ("DescribeDataset", "IndexDataset", "GetStatus"):
        stub.answers[method] = hang
    process = subprocess.Popen(command(stub, name), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline_s = time.monotonic() + DEADLINE_S
    while not asked:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=DEADLINE_S) == (b"", b"")
    assert process.returncode == 130
    stub.stopping.set()


@pytest.mark.parametrize("module", ["gyre_client", "gyre_daemon"])
def test_ctrl_c_during_the_imports(module: str) -> None:
    """The interrupt comes where the first module of the command line is imported."""
    program = (
        "import sys, os, signal, runpy\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name in ('gyre_client.command.cli', 'gyre_daemon.cli'):\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        f"sys.argv = ['x', '--help']\n"
        f"runpy.run_module('{module}', run_name='__main__')\n"
    )
    done = run([sys.executable, "-c", program])
    assert (done.returncode, done.stderr) == (130, b"")


def test_jobs_and_datasets_of_a_real_daemon(gyred: Any, tmp_path: Path) -> None:
    """The daemon's log for people, and its answers, with such a name of a folder and of a shard."""
    folder = tmp_path / "a\x1b[2J\u202eb"
    folder.mkdir()
    np.arange(80, dtype=np.int16).tofile(folder / "c\x1b]0;t\x07\x7f.bin")
    name = "n\x1b[31m\u202e"
    daemon = gyred(
        {
            "log_format": "json",
            "datasets": {
                name: {
                    "uri": str(folder),
                    "format": "tokens",
                    "dtype": "int16",
                    "sequence_length": 8,
                }
            },
        }
    )
    for arguments in (["datasets"], ["describe", name], ["index", name], ["cat", name], ["status"]):
        for more in ([], ["--json"]):
            done = run(
                [sys.executable, "-m", "gyre_client", *arguments, *more]
                + [f"--address={daemon.address}"]
            )
            written = done.stdout + done.stderr
            assert done.returncode == 0, written
            assert not OBEYED.search(written), (arguments, OBEYED.search(written))
    check = run([*GYRED, "check-config", "--open", "--config", str(daemon.config_path)])
    assert not OBEYED.search(check.stdout + check.stderr)
    daemon.stop()
    assert not OBEYED.search(daemon.log_path.read_bytes())
