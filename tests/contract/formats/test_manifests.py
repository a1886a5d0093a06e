"""Manifests: what they may say, and files by them through a real daemon."""

import csv
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_client import Loader, texts
from gyre_client.errors import CorruptSample as RemoteCorruptSample
from gyre_client.errors import ShardMissing
from gyre_daemon.datasets.formats.files import read_manifest
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.storage.shard import Texts
from gyre_daemon.storage.sources import remote_opener

from tests.conftest import S3Server, StartDaemon
from tests.contract.formats.test_single_files import listing
from tests.contract.places import HttpPlace, LocalPlace, Place, S3Place, run
from tests.contract.storage.objects import ObjectServer

__all__ = ["listing"]

FILES = {f"{'ab'[number % 2]}/{number}.png": b"%d" % number * number for number in range(1, 30)}
ROWS = [
    {
        "file_name": name,
        "label": f"class {number % 3}",
        "score": number / 2,
        "caption": "ö\n" * number,
    }
    for number, name in enumerate(reversed(FILES))
]


def csv_of(rows: list[dict[str, Any]]) -> bytes:
    lines = io.StringIO(newline="")
    writer = csv.DictWriter(lines, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return lines.getvalue().encode()


def jsonl_of(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def columns_of(name: str, data: bytes, **keys: Any) -> Mapping[str, Any]:
    found = read_manifest(name, data, **keys)
    names = [found.names[number].decode() for number in range(len(found.names))]
    columns: dict[str, Any] = {"": names}
    for column in found.columns:
        values = column.values
        if isinstance(values, Texts):
            columns[column.name] = [values[number].decode() for number in range(len(values))]
        else:
            columns[column.name] = [column.categories, *values.tolist()]
    return columns


def test_columns_have_the_types_that_their_values_have() -> None:
    rows = [
        {"path": f"{n}.png", "label": f"{n}", "n": n, "x": n / 2, "more": [n]} for n in range(3)
    ]
    assert columns_of("a.csv", csv_of(rows)) == {
        "": ["0.png", "1.png", "2.png"],
        "label": [(), 0, 1, 2],
        "n": ["0", "1", "2"],
        "x": ["0.0", "0.5", "1.0"],
        "more": ["[0]", "[1]", "[2]"],
    }
    assert columns_of("a.jsonl", jsonl_of(rows)) == {
        "": ["0.png", "1.png", "2.png"],
        "label": [("0", "1", "2"), 0, 1, 2],
        "n": [(), 0, 1, 2],
        "x": [(), 0.0, 0.5, 1.0],
        "more": ["[0]", "[1]", "[2]"],
    }
    types = {"n": "int64", "x": "float64", "label": "text"}
    tsv = csv_of(rows).replace(b",", b"\t")
    typed = columns_of("a.tsv", b"\xef\xbb\xbf" + tsv, types=types)
    assert (typed["n"], typed["x"]) == ([(), 0, 1, 2], [(), 0.0, 0.5, 1.0])
    assert typed["label"] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("a.csv", b"path,x\na,1\nb\n", "row 3 has 1 cells, and the first one 2"),
        ("a.csv", b'path,x\na,"1\n', "unexpected end of data"),
        ("a.csv", b"path,path\na,b\n", "names a column twice"),
        ("a.csv", b"path\n\xff\n", "can't decode byte 0xff"),
        ("a.csv", b"path\na\n../b\n", "row 2 has the path '../b'; paths must be relative"),
        ("a.csv", b"path\n/etc/passwd\n", "row 1 has the path '/etc/passwd'"),
        ("a.csv", b"path\ns3://b/c\n", "row 1 has the path"),
        ("a.csv", b"path,x\n,1\n", "row 1 has the path '', which is none"),
        ("a.jsonl", b'{"path": "a"}\n{"path": 3}\n', "row 2 has the path 3, which is none"),
        ("a.jsonl", b'{"path": "a"}\n{"path": \n', "row 2 is no JSON"),
        (
            "a.jsonl",
            b'{"path": "a"}\n{"file": "b"}\n',
            "row 2 has the keys file; the first one",
        ),
        ("a.jsonl", b"[" * 100_000, "row 1 is no JSON"),
        ("a.jsonl", b'{"path": "\\ud800"}\n', "row 1 "),
        ("a.jsonl", b'{"path": "a", "n": 18446744073709551557}\n', "row 1 .* no integer of 64"),
        (
            "a.jsonl",
            b'{"path": "a", "n": 0.5}\n{"path": "b", "n": 1%0400d}\n' % 0,
            "row 2 has 1000.* as its n: ",
        ),
    ],
)
def test_damage_names_the_row(name: str, data: bytes, text: str) -> None:
    with pytest.raises(CorruptSample, match=text) as caught:
        read_manifest(name, data)
    assert caught.value.facts["shard"] == name


def test_wrong_columns_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no column path or .*; it has a, b: name the one"):
        read_manifest("a.csv", b"a,b\nx,1\n")
    with pytest.raises(
        ConfigError,
        match="`types` names the column 'c', which the manifest does not have; it has a, b",
    ):
        read_manifest("a.csv", b"a,b\nx,1\n", path_column="a", types={"c": "text"})
    with pytest.raises(CorruptSample, match="row 1 has 'x' as its b"):
        read_manifest("a.csv", b"a,b\nx,x\n", path_column="a", types={"b": "int64"})


def check(loader: Loader) -> None:
    labels = loader.categories["label"]
    seen = 0
    with loader:
        for batch in loader:
            files, captions = texts(batch, "file"), texts(batch, "caption")
            for place, sample_id in enumerate(batch["sample_id"].tolist()):
                row = ROWS[sample_id]
                assert files[place].encode() == FILES[row["file_name"]]
                assert captions[place] == row["caption"]
                assert labels[batch["label"][place]] == row["label"]
                assert float(batch["score"][place]) == row["score"]
                seen += 1
    assert seen >= len(ROWS)


def test_files_of_a_manifest_are_served(
    gyred: StartDaemon, s3_server: S3Server, object_server: ObjectServer, tmp_path: Path
) -> None:
    places: dict[str, Place] = {
        "local": LocalPlace(tmp_path / "set"),
        "s3": S3Place(s3_server),
        "http": HttpPlace(object_server),
    }
    tables = {}
    for name, place in places.items():
        for path, data in {**FILES, "list.csv": csv_of(ROWS), "list.jsonl": jsonl_of(ROWS)}.items():
            place.put(path, data)
        for ending, types in (("csv", {"score": "float64"}), ("jsonl", {})):
            tables[f"{name}-{ending}"] = {
                "uri": f"{place.root}/list.{ending}",
                "format": "files",
                "storage": dict(place.settings),
                "types": types,
            }
    damaged = csv_of([*ROWS, {**ROWS[0], "file_name": "c/absent.png"}])
    places["local"].put("damaged.csv", damaged)
    tables["damaged"] = {"uri": f"{tmp_path}/set/damaged.csv", "format": "files"}
    places["local"].put("broken.csv", csv_of(ROWS)[:-3])
    tables["broken"] = {"uri": f"{tmp_path}/set/broken.csv", "format": "files"}
    daemon = gyred({"datasets": tables})
    for name in tables.keys() - {"damaged", "broken"}:
        check(Loader(name, batch_size=7, epochs=1, tail="pad", address=daemon.address))
    with pytest.raises(ShardMissing, match=r"c/absent\.png does not exist"):
        Loader("damaged", batch_size=7, address=daemon.address)
    with pytest.raises(RemoteCorruptSample, match=r"broken\.csv is damaged: unexpected end"):
        Loader("broken", batch_size=7, address=daemon.address)


def test_many_names_are_found_by_listing_their_folder(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, listing: Callable[..., Any]
) -> None:
    monkeypatch.setattr(remote_opener, "_MAX_ASKED", 3)
    place = S3Place(s3_server)
    for path, data in {**FILES, ".hidden/x.png": b"x", "list.csv": csv_of(ROWS)}.items():
        place.put(path, data)
    found = run(listing(f"{place.root}/list.csv", place.settings))
    table = found.storage.table
    assert [table.name(n) for n in range(len(table))] == [row["file_name"] for row in ROWS]
    assert np.array_equal(table.sizes, [len(FILES[str(row["file_name"])]) for row in ROWS])
    place.put("list.csv", b"path\n" + b"a/2.png\n" * 4 + b"a/absent.png\n")
    with pytest.raises(Exception, match=r"a/absent\.png, which does not exist"):
        run(listing(f"{place.root}/list.csv", place.settings))
