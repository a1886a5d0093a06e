"""Formats and file systems that a script hands over as classes, to its private daemon."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
from gyre_client import Loader
from gyre_client.errors import GyreError, InvalidRequest

from tests.conftest import StartDaemon

pytestmark = pytest.mark.usefixtures("private_daemon")

CLASSES = '''
from dataclasses import dataclass

import fsspec
import numpy as np
from gyre_daemon.datasets.formats import FieldSpec
from gyre_daemon.datasets.formats.base import Scan, array_of
from gyre_daemon.datasets.formats.sample_table import StridedIndex

SIZE = 4


class Records:
    """Records of one size."""

    pattern = "*.records"
    unpacks_gzip = False

    @dataclass(frozen=True)
    class Options:
        field: str = "record"

    def __init__(self, options):
        self.field = options.field

    @property
    def inspection(self):
        return Scan("records/1", self.scan, lambda found: int(found["count"][0]), self.check)

    def scan(self, shard, file):
        return {"count": np.array([len(file.read()) // SIZE])}

    def check(self, found, file_bytes):
        if (array_of(found, "count", np.int64) != file_bytes // SIZE).any():
            raise ValueError("it has another number of records")

    def assemble(self, shards, inspected):
        spec = FieldSpec(self.field, np.dtype(np.uint8), (SIZE,), ragged=False, codec="bytes")
        counts = np.concatenate([found["count"] for found in inspected])
        return StridedIndex(spec, [0] * len(shards), counts, stride_bytes=SIZE, identity=b"r")


class Shelf(fsspec.AbstractFileSystem):
    """A file of ten records for each letter."""

    protocol = "shelf"

    def __init__(self, letters, **arguments):
        super().__init__(**arguments)
        self.files = {f"set/{each}.records": each.encode() * 40 for each in letters}

    def ls(self, path, detail=True, **_):
        path = self._strip_protocol(path)
        found = [
            {"name": name, "size": len(data), "type": "file"}
            for name, data in self.files.items()
            if name == path or name.startswith(f"{path}/")
        ]
        if not found and path:
            raise FileNotFoundError(path)
        folder = [{"name": "set", "size": 0, "type": "directory"}]
        found = found if path else folder
        return found if detail else [each["name"] for each in found]

    def cat_file(self, path, start=None, end=None, **_):
        return self.files[self._strip_protocol(path)][start:end]
'''
TORCHRUN = (
    CLASSES
    + """
import torch.distributed as dist
from gyre_client import Loader

if __name__ == "__main__":
    dist.init_process_group("gloo")
    options = {"storage": {"letters": "ab"}, "field": "letters"}
    with Loader(
        "shelf://set", format=Records, storage=Shelf, options=options, batch_size=4
    ) as loader:
        rows = [bytes(row).decode() for batch in loader for row in batch["letters"].numpy()]
        of_ranks = [None, None]
        dist.all_gather_object(of_ranks, rows)
        shown, daemons = [None, None], repr(loader._place.target.private.pid)
        dist.all_gather_object(shown, daemons)
    if dist.get_rank() == 0:
        print(sorted(sum(of_ranks, [])) == ["aaaa"] * 10 + ["bbbb"] * 10, len(set(shown)))
        print(loader.format)
    dist.destroy_process_group()
"""
)
# Cells of a notebook: Python knows no file of theirs.
CELLS = (
    CLASSES
    + """
def letters():
    options = {"storage": {"letters": "ab"}}
    with Loader(
        "shelf://set", format=Records, storage=Shelf, options=options, batch_size=4
    ) as loader:
        rows = {bytes(row).decode() for batch in loader for row in batch["record"]}
        return loader.num_samples, sorted(rows)
"""
)
NOTEBOOK = f"""
import __main__
from gyre_client import Loader

cells = {CELLS!r}
exec(compile(cells, "<cell 1>", "exec"), vars(__main__))
open_all_the_time = Loader("shelf://set", format=Records, storage=Shelf, batch_size=4,
                           options={{"storage": {{"letters": "ab"}}}})
print(letters())
exec(compile(cells.replace("SIZE = 4", "SIZE = 8"), "<cell 2>", "exec"), vars(__main__))
print(letters())
exec(compile(cells.replace("each.encode()", "each.upper().encode()"), "<cell 3>", "exec"),
     vars(__main__))
print(letters())
open_all_the_time.close()
"""


def run(*arguments: str, folder: Path) -> str:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    ).stdout


def test_classes_of_a_script_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TORCHRUN)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert run(*torchrun, "train.py", folder=tmp_path) == "True 1\nRecords\n"


def test_a_cell_that_is_edited_is_read_anew(tmp_path: Path) -> None:
    """Another size of records, then other bytes, although the old Loader is still open."""
    told = run("-c", NOTEBOOK, folder=tmp_path).splitlines()
    assert told == [
        "(20, ['aaaa', 'bbbb'])",
        "(10, ['aaaaaaaa', 'bbbbbbbb'])",
        "(20, ['AAAA', 'BBBB'])",
    ]


class Odd:
    """No format and no file system."""


class Shelf(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Never made."""


@pytest.mark.parametrize(
    ("dataset", "arguments", "told"),
    [
        ("{data}", {"format": Odd}, "format Odd: the class has no `pattern`"),
        ("my://data", {"storage": Odd}, "storage: Odd is no file system. Derive it"),
        ("{data}", {"storage": Shelf}, r"storage \(Shelf\): the dataset has no scheme"),
        ("s3://data", {"storage": Shelf}, "storage: s3:// has a driver already"),
        ("my://data", {"storage": Shelf()}, "storage: not a class"),
        ("mine://data", {"format": "text"}, "unknown scheme `mine://`"),
    ],
)
def test_what_does_not_fit_is_refused(
    dataset: str, arguments: dict[str, Any], told: str, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("a\n")
    with pytest.raises(GyreError, match=told):
        Loader(dataset.format(data=tmp_path), batch_size=1, **arguments)


def test_a_shared_daemon_takes_no_classes(tmp_path: Path, gyred: StartDaemon) -> None:
    (tmp_path / "a.txt").write_text("a\n")
    daemon = gyred({"datasets": {"lines": {"uri": str(tmp_path / "a.txt")}}})
    for arguments in ({"format": Odd}, {"storage": Shelf}):
        with pytest.raises(InvalidRequest, match="a shared daemon runs no classes of scripts"):
            Loader("lines", address=daemon.address, batch_size=1, **arguments)
    with pytest.raises(GyreError, match="this daemon serves the datasets that its operator named"):
        Loader(str(tmp_path), address=daemon.address, batch_size=1, format="/x/y.pickle")
