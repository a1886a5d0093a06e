"""A format that an installed package brings, through a shared and a private daemon."""

import subprocess
import sys
from pathlib import Path

import pytest
from gyre_client import Loader
from gyre_client.errors import CorruptSample, GyreError

from tests.conftest import StartDaemon, to_toml

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "gyre-records"
version = "1"
[project.entry-points."gyre.formats"]
records = "gyre_records:RECORDS"
broken = "gyre_records:ABSENT"
wrong = "gyre_records:RecordsFormat"
"""
CODE = '''
"""Records of one size, of which each file says the size in its first byte."""

from dataclasses import dataclass

import numpy as np

from gyre_daemon.datasets.formats import FieldSpec, FormatEntry
from gyre_daemon.datasets.formats.base import Scan, array_of
from gyre_daemon.datasets.formats.sample_table import StridedIndex


@dataclass(frozen=True)
class RecordsOptions:
    field: str = "record"


class RecordsFormat:
    pattern = "*.records"
    unpacks_gzip = False

    def __init__(self, options):
        self._field = options.field

    @property
    def inspection(self):
        return Scan("records/1", scan, lambda found: int(found["count"][0]), check)

    def assemble(self, shards, inspected):
        spec = FieldSpec(self._field, np.dtype(np.uint8), (4,), ragged=False, codec="bytes")
        counts = np.concatenate([found["count"] for found in inspected])
        starts = [1] * len(shards)
        return StridedIndex(spec, starts, counts, stride_bytes=4, identity=b"records")


def scan(shard, file):
    assert file.read(1) == bytes([4])
    return {"count": np.array([len(file.read()) // 4])}


def check(found, file_bytes):
    if (array_of(found, "count", np.int64) != (file_bytes - 1) // 4).any():
        raise ValueError("it has another number of records")


RECORDS = FormatEntry.of(RecordsFormat, RecordsOptions)
'''


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the package."""
    source = tmp_path_factory.mktemp("source")
    (source / "gyre_records").mkdir()
    (source / "gyre_records/__init__.py").write_text(CODE)
    (source / "pyproject.toml").write_text(PROJECT)
    target = tmp_path_factory.mktemp("packages")
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
        "--no-index", "--no-compile", "--target", str(target), str(source),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return target


@pytest.fixture
def records(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.records").write_bytes(b"\x04" + (name.encode() * 4) * 10)
    return folder


def check(loader: Loader, field: str) -> None:
    with loader:
        found = sorted(row.numpy().tobytes() for batch in loader for row in batch[field])
    assert found == [b"aaaa"] * 10 + [b"bbbb"] * 10


def test_the_operator_of_a_shared_daemon_names_it(
    packages: Path, records: Path, gyred: StartDaemon
) -> None:
    daemon = gyred({}, {"PYTHONPATH": str(packages)})
    daemon.stop()
    table = {"uri": str(records), "format": "records", "field": "four"}
    with daemon.config_path.open("a") as file:
        file.write(to_toml({"datasets": {"set": table}}))
    daemon.restart()
    check(Loader("set", batch_size=4, epochs=1, address=daemon.address), "four")


def test_the_client_of_a_private_daemon_names_it(
    packages: Path, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(packages))
    check(Loader(records, format="records", batch_size=4, epochs=1), "record")
    for name, reason in (
        ("", r"of installed packages must be named: broken, records, wrong"),
        ("broken", "the format broken of the package gyre-records cannot be loaded: Attribute"),
        ("wrong", "of the package gyre-records is no FormatEntry, but type"),
        ("other", "unknown format `other`; known are .*, broken, records, wrong"),
    ):
        with pytest.raises(GyreError, match=reason):
            Loader(records, format=name or None, batch_size=4)


def test_a_private_daemon_finds_it_next_to_the_script(
    records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_formats.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    check(Loader(records, format="my_formats:RECORDS", batch_size=4, epochs=1), "record")
    with pytest.raises(GyreError, match=r"my_formats:ABSENT .* cannot be loaded: Attribute"):
        Loader(records, format="my_formats:ABSENT", batch_size=4)
    with pytest.raises(GyreError, match=r"the format :RECORDS is no `MODULE:NAME` of a class"):
        Loader(records, format=":RECORDS", batch_size=4)


def test_what_a_scan_cannot_have_found_is_refused(
    records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = "len(file.read()) // 4"
    assert found in CODE
    (tmp_path / "lying_formats.py").write_text(CODE.replace(found, f"{found} + 1"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CorruptSample, match="its scan is none of this shard: it has another num"):
        Loader(records, format="lying_formats:RECORDS", batch_size=4)
