"""Shards in folders of a folder: partitions with their columns, and folders of splits."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from gyre_client import Loader, texts
from gyre_client.errors import ConfigError, InvalidRequest, ShardMissing

from tests.conftest import S3Server, StartDaemon

FRAME = pd.DataFrame(
    {
        "n": np.arange(12),
        "text": [f"row {row}" for row in range(12)],
        "year": [2023, 2024] * 6,
        "land": ["de", "fr/x", None] * 4,
    }
)


def rows(uri: Path | str, **options: Any) -> list[dict[str, Any]]:
    """All samples by their ids; classes as their names, and None where there is no value."""
    found: dict[int, dict[str, Any]] = {}
    with Loader(
        str(uri), batch_size=5, order="sequential", tail="pad", epochs=1, options=options
    ) as loader:
        for batch in loader:
            ids = batch["sample_id"].tolist()
            for place, sample_id in enumerate(ids):
                if not batch["mask"][place]:
                    continue
                row: dict[str, Any] = {}
                for name, tensor in batch.items():
                    if name in ("sample_id", "mask", "text") or "." in name:
                        continue
                    row[name] = tensor[place].item()
                    if names := loader.categories.get(name):
                        row[name] = names[row[name]]
                    if f"{name}.present" in batch and not batch[f"{name}.present"][place]:
                        row[name] = None
                if "text" in batch:
                    row["text"] = texts(batch, "text")[place]
                found[sample_id] = row
    return [found[sample_id] for sample_id in sorted(found)]


def by_n(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(found, key=lambda row: row["n"])


EXPECTED = [
    {"n": n, "text": f"row {n}", "year": 2023 + n % 2, "land": ["de", "fr/x", None][n % 3]}
    for n in range(12)
]


def partitioned(folder: Path, writer: str) -> Path:
    table = pa.Table.from_pandas(FRAME, preserve_index=False)
    if writer == "pandas":
        FRAME.to_parquet(folder / "set", partition_cols=["year", "land"], index=False)
    elif writer == "write_to_dataset":
        pq.write_to_dataset(table, folder / "set", partition_cols=["year", "land"])
    else:
        schema = pa.schema([("year", pa.int64()), ("land", pa.string())])
        kind = pads.partitioning(schema, flavor="hive")
        pads.write_dataset(table, folder / "set", format="parquet", partitioning=kind)
    (folder / "set" / "_SUCCESS").touch()
    return folder / "set"


@pytest.mark.usefixtures("private_daemon")
@pytest.mark.parametrize("writer", ["pandas", "write_to_dataset", "write_dataset"])
def test_columns_of_partitions_are_fields(tmp_path: Path, writer: str) -> None:
    folder = partitioned(tmp_path, writer)
    assert by_n(rows(folder)) == EXPECTED
    assert by_n(rows(folder, columns=["n", "y=year"])) == [
        {"n": row["n"], "y": row["year"]} for row in EXPECTED
    ]
    assert by_n(rows(folder, columns=["n", "text"])) == [
        {"n": row["n"], "text": row["text"]} for row in EXPECTED
    ]
    some = rows(folder, filter='year == 2024 and land.present and land == "fr/x"')
    assert by_n(some) == [row for row in EXPECTED if row["year"] == 2024 and row["land"] == "fr/x"]
    renamed = rows(folder, rename={"year": "when"}, columns=["n", "year"])
    assert [set(row) for row in renamed] == [{"n", "when"}] * 12
    assert [row["n"] for row in rows(folder / "year=2024", columns=["n"])] != []
    with pytest.raises(ConfigError, match="only names of folders"):
        rows(folder, columns=["year"])


@pytest.mark.usefixtures("private_daemon")
def test_other_formats_have_partitions_too(tmp_path: Path) -> None:
    for day in (9, 10):
        folder = tmp_path / "lines" / f"day={day:02}"
        folder.mkdir(parents=True)
        (folder / "part-0.jsonl").write_text(f'{{"n": {day}}}\n')
        (folder / "part-0.jsonl.crc").touch()
        (folder / "notes.md").touch()
    assert (
        rows(tmp_path / "lines", columns=["*"]) == [{"n": day, "day": day} for day in (10, 9)][::-1]
    )
    assert [row["day"] for row in rows(tmp_path / "lines", format="jsonl")] == [9, 10]


def write(path: Path, n: int, **more: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"n": [n], **{name: [value] for name, value in more.items()}}), path)


@pytest.mark.usefixtures("private_daemon")
def test_a_column_of_the_file_counts_before_that_of_the_folder(tmp_path: Path) -> None:
    write(tmp_path / "day=1" / "0.parquet", 7, day=5)
    assert rows(tmp_path) == [{"n": 7, "day": 5}]


@pytest.mark.usefixtures("private_daemon")
def test_folders_that_are_no_one_table_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "keys" / "day=1" / "0.parquet", 1)
    write(tmp_path / "keys" / "day=2" / "hour=3" / "0.parquet", 2)
    with pytest.raises(InvalidRequest, match=r"partitions with different keys .*hour=3"):
        rows(tmp_path / "keys")
    assert len(rows(f"{tmp_path}/keys/**/*.parquet")) == 2
    for name in ("train", "test"):
        write(tmp_path / "sets" / f"split={name}" / "0.parquet", 1)
        write(tmp_path / "splits" / name / "0.parquet", 1)
    with pytest.raises(InvalidRequest, match=r"name \S+/split=test or \S+/split=train"):
        rows(tmp_path / "sets")
    with pytest.raises(ShardMissing, match=r"has the folders test, train: name one of them"):
        rows(tmp_path / "splits")
    assert rows(tmp_path / "splits" / "train") == [{"n": 1}]


@pytest.mark.usefixtures("private_daemon")
def test_the_only_folder_of_a_folder_is_read(tmp_path: Path) -> None:
    for year in (2023, 2024):
        write(tmp_path / "data" / "train" / f"year={year}" / "0.parquet", year)
    assert rows(tmp_path) == [{"n": year, "year": year} for year in (2023, 2024)]


def test_partitions_are_read_from_object_storage(
    gyred: StartDaemon, s3_server: S3Server, tmp_path: Path
) -> None:
    folder = partitioned(tmp_path, "pandas")
    s3_server.make_bucket("hive")
    for path in folder.rglob("*.parquet"):
        s3_server.put("hive", f"set/{path.relative_to(folder)}", path.read_bytes())
    tables = {
        "local": {"uri": str(folder)},
        "s3": {"uri": "s3://hive/set", "storage": s3_server.storage_settings},
    }
    daemon = gyred({"datasets": tables})
    found = []
    for name in tables:
        with Loader(name, batch_size=12, order="sequential", address=daemon.address) as loader:
            assert loader.categories == {"land": ("de", "fr/x")}
            batch = next(iter(loader))
            found.append((loader.fingerprint, batch["n"].tolist(), batch["year"].tolist()))
    assert found[0] == found[1]
