"""`gyre index` and `measure` with `--engine ray`: as on one machine, byte for byte."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.waiting import until

REPOSITORY = Path(__file__).parents[3]
NUM_SHARDS = 5
# Ray's limits are for a machine that is not busy.
PATIENT = {
    "RAY_raylet_start_wait_time_s": "240",
    "RAY_agent_register_timeout_ms": "240000",
    "RAY_worker_register_timeout_seconds": "240",
}


def tar(first: int, num_samples: int, bad: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number in range(first, first + num_samples):
            document = bad if number % 100 == 7 else b"{}"
            for extension, data in (("txt", b"text %d" % number), ("json", document)):
                member = tarfile.TarInfo(f"{number:06}.{extension}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def processes_of(folder: str) -> list[str]:
    """The command lines of processes that name a folder, or whose environment does."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if folder in " ".join([*process.cmdline(), *process.environ().values()]):
                found.append(" ".join(process.cmdline()))
    return found


@pytest.fixture
def short_folder() -> Iterator[str]:
    """For Ray's sockets, whose paths may have 107 characters."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray") as folder:
        yield folder
        until(lambda: not processes_of(folder))


def test_shards_on_ray_are_those_of_one_machine(tmp_path: Path, short_folder: str) -> None:
    """Nothing is left but the index; without a folder for it, nothing begins."""
    for command, bad in (("measure", b"{}"),):
        (tmp_path / command).mkdir()
        for number in range(NUM_SHARDS):
            data = tar(100 * number, 20 + number, bad)
            (tmp_path / command / f"{number}.tar").write_bytes(data)
    chain = [{"name": "tokenize", "field": "txt", "tokenizer": "bytes"}]
    (tmp_path / "chain.json").write_text(json.dumps(chain))
    base = {**os.environ, "TMPDIR": short_folder, "HOME": short_folder}
    base |= {"PYTHONPATH": str(REPOSITORY), **PATIENT}
    for name in ("XDG_CACHE_HOME", "GYRE_ADDRESS", "GYRE_INDEX_DIR", "RAY_ADDRESS"):
        base.pop(name, None)

    def gyre(command: str, engine: str, *more: str) -> tuple[int, Any, str]:
        index_dir = {"GYRE_INDEX_DIR": str(tmp_path / f"index-{engine}")}
        arguments = [sys.executable, "-m", "gyre_client", command, str(tmp_path / command)]
        done = subprocess.run(
            [*arguments, "--json", *more, "--engine", engine],
            env={**base, **index_dir},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        return done.returncode, json.loads(done.stdout or "null"), done.stderr

    refused = subprocess.run(
        [
            sys.executable,
            "-m",
            "gyre_client",
            "measure",
            str(tmp_path / "measure"),
            "--engine",
            "ray",
        ],
        env=base,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert refused.returncode == 2
    assert "GYRE_INDEX_DIR is not set" in refused.stderr
    for command, more in (("measure", ["--transforms", str(tmp_path / "chain.json")]),):
        found = [gyre(command, engine, *more) for engine in ("ray", "local")]
        assert found[0][1], found[0][2]
        if command == "measure":
            assert found[0][1]["num_reused"] == NUM_SHARDS  # nodes did it
            assert found[1][1]["num_reused"] == 0
            for _, value, _ in found:
                del value["num_reused"]
            assert found[0][1]["lengths"]["tokens"]["greatest"] == len("text 400")
        assert found[0][:2] == found[1][:2]
    stored = [
        {
            path.name: path.read_bytes()
            for path in (tmp_path / f"index-{engine}").iterdir()
            if path.suffix in (".gyre-index", ".gyre-lengths", ".gyre-damage")
        }
        for engine in ("ray", "local")
    ]
    assert stored[0] == stored[1]
    assert len(stored[0]) >= NUM_SHARDS
