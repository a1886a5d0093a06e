"""`gyre convert`: what each format's own writer wrote equals the source, sample by sample."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from gyre_client import Loader
from gyre_client.command.cli import main

pytestmark = pytest.mark.usefixtures("private_daemon")

NUM_SAMPLES = 53


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tars")
    generator = np.random.default_rng(0)
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for number in range(shard * 30, min(NUM_SAMPLES, shard * 30 + 30)):
                array = io.BytesIO()
                np.save(array, generator.random((2, 3), np.float32))
                members = {
                    "bin": generator.bytes(number),
                    "txt": ("wörd " * number).encode(),
                    "json": json.dumps({"n": number}).encode(),
                    "cls": b"%d" % (number - 9),
                    "vec.npy": array.getvalue(),
                }
                for extension, data in members.items():
                    member = tarfile.TarInfo(f"{number:04}.{extension}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    return folder


def samples(folder: Path, **more: Any) -> list[dict[str, Any]]:
    """All samples in the order of their ids."""
    found = []
    with Loader(folder, batch_size=10, order="sequential", tail="pad", **more) as loader:
        for batch in loader:
            ragged = {name.removesuffix(".offsets") for name in batch if name.endswith(".offsets")}
            names = ragged | (batch.keys() - {f"{name}.offsets" for name in ragged})
            for row in torch.nonzero(batch["mask"]).ravel().tolist():
                sample = {}
                for name in names - {"mask"}:
                    first, stop = row, row + 1
                    if name in ragged:
                        first, stop = batch[f"{name}.offsets"][row : row + 2].tolist()
                    sample[name] = batch[name][first:stop].numpy().tobytes()
                found.append(sample)
    return found


def convert(source: Path, target: Path, kind: str, *more: str) -> int:
    return main(["convert", str(source), str(target), "--to", kind, *more])


@pytest.mark.parametrize("kind", ["webdataset", "mds", "parquet"])
def test_a_converted_dataset_has_the_same_samples(
    kind: str, tars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "100% new" / kind
    assert convert(tars, target, kind, "--samples-per-shard", "20", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["num_samples"] == NUM_SAMPLES
    if kind != "mds":
        assert said["num_files"] == 3
    assert samples(target) == samples(tars)
    assert [path.name for path in target.parent.iterdir()] == [kind], "nothing is left beside it"
    assert convert(tars, target, kind) == 2
    assert "exists already" in capsys.readouterr().err


def test_rows_with_gaps_and_lists_stay_as_they_are(tmp_path: Path) -> None:
    table = pa.table(
        {
            "id": np.arange(30, dtype=np.int16),
            "text": [None if row % 7 == 0 else f"row {row}" for row in range(30)],
            "ids": pa.array([list(range(row % 5)) for row in range(30)], pa.list_(pa.int32())),
            "pair": pa.array([[row, row / 2] for row in range(30)], pa.list_(pa.float32(), 2)),
        }
    )
    (tmp_path / "rows").mkdir()
    pq.write_table(table, tmp_path / "rows/a.parquet", row_group_size=7)
    assert convert(tmp_path / "rows", tmp_path / "copy", "parquet") == 0
    assert pq.read_table(tmp_path / "copy").to_pylist() == table.to_pylist()
    assert convert(tmp_path / "rows", tmp_path / "tars", "webdataset", "--column", "text") == 0
    with tarfile.open(tmp_path / "tars/000000.tar") as archive:
        assert archive.getnames() == [f"{row:09d}.text" for row in range(30) if row % 7]


def test_token_files_have_the_ids_back_to_back(
    token_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--option", "dtype=uint16", "--option", "sequence_length=100")
    assert convert(token_files, tmp_path / "new", "tokens", *options) == 0
    (path,) = (tmp_path / "new").iterdir()
    ids = np.arange(3003, dtype="<u2")
    assert path.read_bytes() == np.concatenate((ids[:1700], ids[1703:3003])).tobytes()
    capsys.readouterr()


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_lists_of_ids_become_token_files_row_by_row(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compared with what the source's own reader says of each row."""
    generator = np.random.default_rng(0)
    ids = [generator.integers(0, 50_000, row % 9).tolist() for row in range(NUM_SAMPLES)]
    (tmp_path / "rows").mkdir()
    options = ["--option", "columns=['ids']"]
    if kind == "parquet":
        table = pa.table({"ids": pa.array(ids, pa.list_(pa.uint16())), "other": ids})
        pq.write_table(table, tmp_path / "rows/a.parquet", row_group_size=7)
        rows = pq.read_table(tmp_path / "rows/a.parquet")["ids"].to_pylist()
    else:
        lines = [json.dumps({"ids": its, "other": "x"}) for its in ids]
        (tmp_path / "rows/a.jsonl").write_text("\n".join(lines))
        rows = [json.loads(line)["ids"] for line in lines]
        options += ["--option", "cast={ids='uint16'}"]
    target = tmp_path / "tokens"
    assert convert(tmp_path / "rows", target, "tokens", "--samples-per-shard", "20", *options) == 0
    files = sorted(target.iterdir())
    assert len(files) == 3
    for number, path in enumerate(files):
        found, begin = np.fromfile(path, "<u2"), 0
        for row in rows[number * 20 : number * 20 + 20]:
            assert found[begin : begin + len(row)].tolist() == row
            begin += len(row)
        assert begin == len(found)
    capsys.readouterr()


@pytest.mark.parametrize(
    ("kind", "more", "sentence"),
    [
        ("tokens", (), "one column of integers"),
        ("tokens", ("--column", "txt"), "one column of integers"),
        ("parquet", ("--column", "nothing"), "there is no column 'nothing'"),
        ("webdataset", ("--samples-per-shard", "0"), "samples-per-shard"),
    ],
)
def test_what_cannot_be_written_is_refused(
    kind: str,
    more: tuple[str, ...],
    sentence: str,
    tars: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert convert(tars, tmp_path / "new", kind, *more) == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_where_a_sample_is_corrupt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines").mkdir()
    lines = "".join(f'{{"n": {row}}}\n' for row in range(3000)) + "{\n"
    (tmp_path / "lines/a.jsonl").write_text(lines)
    assert convert(tmp_path / "lines", tmp_path / "new", "parquet") == 1
    assert "sample 3000" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["lines"]
