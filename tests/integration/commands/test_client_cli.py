"""The `gyre` command against a real daemon."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_client import Loader
from gyre_client.command.cli import main
from gyre_client.transport.arguments import dataset_ref
from gyre_client.transport.connection import Connection
from gyre_client.transport.target import find_target
from webdataset import TarWriter

from tests.conftest import Daemon, StartDaemon


def serve(start: StartDaemon, folder: Path) -> Daemon:
    """A daemon with 100 samples of tokens and 20 of text."""
    tokens = folder / "tokens.bin"
    np.arange(800, dtype=np.uint16).tofile(tokens)
    with TarWriter(str(folder / "texts-000.tar")) as writer:
        for n in range(20):
            writer.write(
                {"__key__": f"{n:03d}", "txt": f"text number {n}", "bin": b"\xff" + bytes([n])}
            )
    return start(
        {
            "datasets": {
                "numbers": {
                    "uri": str(tokens),
                    "format": "tokens",
                    "dtype": "uint16",
                    "sequence_length": 8,
                },
                "texts": {
                    "uri": str(folder / "texts-000.tar"),
                    "format": "webdataset",
                    "fields": ["txt", "bin"],
                },
            }
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def daemon(shared_gyred: StartDaemon, folder: Path) -> Daemon:
    return serve(shared_gyred, folder)


class Gyre:
    """Runs commands against one daemon."""

    def __init__(self, address: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._address = address
        self._capsys = capsys

    def text(self, *arguments: str) -> str:
        assert main([*arguments, "--address", self._address]) == 0
        captured = self._capsys.readouterr()
        assert captured.err == ""
        return captured.out

    def json(self, *arguments: str) -> Any:
        return json.loads(self.text(*arguments, "--json"))

    def error(self, *arguments: str) -> tuple[int, str]:
        status = main([*arguments, "--address", self._address])
        captured = self._capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("gyre: ")
        assert captured.err.count("\n") == 1
        return status, captured.err


@pytest.fixture
def gyre(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> Gyre:
    return Gyre(daemon.address, capsys)


@pytest.fixture
def fresh(gyred: StartDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Gyre:
    """A daemon that has opened no dataset."""
    return Gyre(serve(gyred, tmp_path).address, capsys)


def test_datasets(fresh: Gyre) -> None:
    found = fresh.json("datasets")
    assert [(each["name"], each["format"], each["open"]) for each in found] == [
        ("numbers", "tokens", False),
        ("texts", "webdataset", False),
    ]
    fresh.json("describe", "numbers")
    assert [each["open"] for each in fresh.json("datasets")] == [True, False]
    assert "numbers" in fresh.text("datasets")


def test_describe(gyre: Gyre) -> None:
    found = gyre.json("describe", "numbers")
    assert (found["num_samples"], found["num_shards"], found["num_bytes"]) == (100, 1, 1600)
    field = {"name": "tokens", "dtype": "uint16", "shape": [8], "ragged": False}
    more = {"token_ids": True, "categories": [], "text": False, "media_type": ""}
    assert found["fields"] == [{**field, **more}]
    assert "txt" in gyre.text("describe", "texts")


def test_plan_is_what_a_loader_reads(gyre: Gyre, daemon: Daemon) -> None:
    arguments = ["plan", "numbers", "--batch-size", "12", "--seed", "5", "--step", "2"]
    parts = [
        gyre.json(*arguments, "--rank", str(rank), "--world-size", "2")["sample_ids"]
        for rank in range(2)
    ]
    with Loader("numbers", batch_size=12, seed=5, address=daemon.address) as loader:
        batches = [next(loader)["sample_id"].tolist() for _ in range(3)]
    assert parts[0] + parts[1] == batches[2]
    assert gyre.text("plan", "numbers", "--batch-size", "12", "--tail", "pad", "--step", "8")


def test_plans_of_successive_steps_in_any_order(gyre: Gyre, daemon: Daemon) -> None:
    arguments = [
        "plan",
        "numbers",
        "--batch-size",
        "12",
        "--seed",
        "5",
        "--order",
        "block",
        "--io-block",
        "1KiB",
        "--window",
        "4",
    ]
    plans = gyre.json(*arguments, "--step", "1:4")
    assert [plan["step"] for plan in plans] == [1, 2, 3]
    with Loader(
        "numbers",
        batch_size=12,
        seed=5,
        address=daemon.address,
        order="block",
        io_block_bytes=1024,
        window_blocks=4,
    ) as loader:
        batches = [next(loader)["sample_id"].tolist() for _ in range(4)]
    assert [plan["sample_ids"] for plan in plans] == batches[1:]
    assert gyre.text(*arguments, "--step", "1:4")
    assert gyre.json("plan", "texts", "--batch-size", "5", "--step", "1", "--order", "sequential")[
        "sample_ids"
    ] == [5, 6, 7, 8, 9]


def test_the_cost_of_each_order(gyre: Gyre) -> None:
    arguments = [
        "plan",
        "numbers",
        "--cost",
        "--batch-size",
        "4",
        "--io-block",
        "512B",
        "--epochs",
        "2",
    ]
    found = gyre.json(*arguments)
    assert (found["num_samples"], found["num_bytes_served"]) == (100, 3200)
    assert [each["order"] for each in found["estimates"]] == [
        "full",
        "block",
        "full with the cache",
    ]
    assert [each["num_requests"] for each in found["estimates"][:2]] == [200, 2 * 3]
    assert gyre.text(*arguments)
    assert gyre.error("plan", "numbers", "--cost", "--batch-size", "4", "--io-block", "1B")[0] == 2
    with pytest.raises(SystemExit, match="2"):  # prices are the reader's
        gyre.text(*arguments, "--egress-price", "0.09")


def test_index(fresh: Gyre) -> None:
    first = fresh.json("index", "texts")
    fingerprint = first.pop("fingerprint")
    (shard,) = first["shards"]
    assert first == {
        "num_shards": 1,
        "num_reused": 0,
        "columns": {},
        "num_measured": 0,
        "num_samples": 20,
        "shards": {shard: "indexed"},
        "fingerprint_before": None,
        "was_appended": False,
    }
    second = fresh.json("index", "texts")
    assert (second["shards"], second["num_reused"]) == ({shard: "kept"}, 1)
    assert (second["fingerprint"], second["fingerprint_before"]) == (fingerprint, fingerprint)
    assert fingerprint in fresh.text("index", "texts")
    assert fresh.json("index", "numbers", "--checksums")["num_samples"] == 100


def test_status(gyre: Gyre, daemon: Daemon) -> None:
    assert gyre.json("status")["sessions"] == []
    with Loader(
        "numbers", batch_size=12, rank=1, world_size=2, address=daemon.address, job="train"
    ) as loader:
        next(loader)
        (session,) = gyre.json("status")["sessions"]
        assert session["reader"]["job"] == "train"
        assert session["attached"]
        assert "train" in gyre.text("status")
    assert daemon.process
    assert gyre.json("status")["pid"] == daemon.process.pid


def test_cat(gyre: Gyre) -> None:
    samples = gyre.json("cat", "texts", "--num", "5")
    assert len(samples) == 5
    for sample in samples:
        fields, n = sample["fields"], sample["sample_id"]
        assert fields["txt"] == {
            "dtype": "uint8",
            "shape": [len(f"text number {n}")],
            "value": f"text number {n}",
        }
        assert fields["bin"]["value"] == f"ff{n:02x}"
    shown = gyre.text("cat", "numbers", "--num", "1000", "--seed", "3")
    assert shown.count("tokens  uint16 [8]  [") == 100


def test_errors_are_one_line_and_tell_apart_bad_input(gyre: Gyre) -> None:
    status, text = gyre.error("describe", "wiki")
    assert status == 2
    assert "wiki" in text
    assert gyre.error("cat", "wiki")[0] == 2
    assert (
        gyre.error("plan", "numbers", "--step", "9999999999999999999", "--batch-size", "8")[0] == 2
    )
    # the operator's daemon allows no definitions
    assert gyre.error("describe", "/etc/passwd", "--format", "tokens")[0] == 1


def test_a_path_needs_no_daemon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GYRE_ADDRESS", raising=False)
    np.arange(80, dtype=np.int32).tofile(tmp_path / "tokens.bin")
    arguments = ["cat", str(tmp_path / "tokens.bin"), "--format", "tokens", "--num", "1", "--json"]
    assert main([*arguments, "--option", "sequence_length=4", "--option", "dtype=int32"]) == 0
    (sample,) = json.loads(capsys.readouterr().out)
    first = 4 * sample["sample_id"]
    assert sample["fields"]["tokens"] == {
        "dtype": "int32",
        "shape": [4],
        "value": list(range(first, first + 4)),
    }


@pytest.mark.parametrize("command", ["describe", "index", "plan", "cat", "bench", "why"])
def test_a_path_is_served_beside_a_daemon_in_the_environment(
    command: str,
    daemon: Daemon,
    private_daemon: None,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One way to name a dataset for all commands.

    `why` is refused by the private daemon, which has read nothing yet.
    """
    more = {
        "plan": ["--step", "0", "--batch-size", "4"],
        "bench": ["--batch-size", "4", "--seconds", "0.05"],
        "why": ["--step", "0"],
    }
    monkeypatch.setenv("GYRE_ADDRESS", daemon.address)
    arguments = [
        command,
        str(folder / "tokens.bin"),
        "--format",
        "tokens",
        *more.get(command, []),
    ]
    status = main(
        [*arguments, "--option", "sequence_length=4", "--option", 'dtype="uint16"', "--json"]
    )
    printed = capsys.readouterr()
    assert status == 0 or (command == "why" and "was not read yet" in printed.err)
    if command == "describe":
        assert json.loads(printed.out)["num_samples"] == 200


def test_a_name_that_is_a_file_here_may_have_been_meant_as_a_path(
    gyre: Gyre, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "numbers.bin").touch()
    status, text = gyre.error("describe", "numbers.bin")
    assert status == 2
    assert text.endswith("To read the data at this path, write ./numbers.bin\n")
    assert "./" not in gyre.error("describe", "wiki")[1]


def test_a_shared_daemon_refuses_a_path_and_says_what_to_do(gyre: Gyre, folder: Path) -> None:
    status, text = gyre.error("describe", str(folder / "tokens.bin"))
    assert status == 1
    assert "ask for one by name, or run a private daemon" in text
    assert "--format" not in gyre.error("describe", "wiki")[1]


def test_the_installed_command_starts_without_torch(daemon: Daemon) -> None:
    program = (
        "import sys; from gyre_client.command.cli import main; "
        "status = main(sys.argv[1:]); sys.exit(status or 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, "status", "--json", "--address", daemon.address]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert daemon.process
    assert json.loads(result.stdout)["pid"] == daemon.process.pid


def test_a_closed_pipe_is_no_error(daemon: Daemon) -> None:
    plan = f"plan numbers --step 0 --batch-size 100000 --address {daemon.address}"
    command = f"{sys.executable} -m gyre_client {plan} | head -c 10"
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.stdout, result.stderr) == ("step 0 beg", "")


def test_an_index_that_was_interrupted_goes_on_where_it_was(
    tmp_path: Path, private_daemon: None
) -> None:
    for shard in range(6):
        with TarWriter(str(tmp_path / f"{shard}.tar")) as writer:
            for number in range(9):
                writer.write({"__key__": f"{shard}-{number}", "txt": "text"})
    target, dataset = find_target(None), dataset_ref(str(tmp_path))
    try:
        with Connection(target.address) as connection:
            interrupted = connection.index(dataset)
            before = next(interrupted)
            interrupted.close()  # type: ignore[attr-defined]  # it is a generator
            after = list(connection.index(dataset))
    finally:
        target.release()
    assert not before.reused
    assert [each.shard for each in after if each.reused].count(before.shard) == 1
    assert (len(after), after[-1].num_samples) == (6, 54)
