"""`schema = "union"`: shards with different columns are one dataset, in every format of columns."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gyre_client import Loader, objects, texts
from gyre_client.errors import ConfigError, CorruptSample, GyreError

from benchmarks.loader.mosaic import streaming

pytestmark = pytest.mark.usefixtures("private_daemon")

KINDS = ("parquet", "arrow", "compressed", "mds", "zstd", "csv")
# The rows of three shards; the second lacks `label` and has larger ids, the third has one more.
SHARDS = (
    [{"id": 1, "text": "one", "label": 7}, {"id": 2, "text": 'tw"o', "label": 8}],
    [{"id": 1 << 40, "text": "three"}],
    [{"id": 4, "text": "four", "label": 9, "score": 0.5}],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("schemas")
    for kind in KINDS:
        (folder / kind).mkdir()
        for number, rows in enumerate(SHARDS):
            write(folder / kind, f"{number}", rows)
    return folder


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    kind, columns = folder.name, list(rows[0])
    if kind == "csv":
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
    elif kind in ("mds", "zstd"):
        encodings = {"id": "int32", "text": "str", "label": "uint8", "score": "float32"}
        if rows[0]["id"] > 1 << 31:
            encodings["id"] = "int64"
        with streaming.MDSWriter(
            out=str(folder / name),
            columns={each: encodings[each] for each in columns},
            compression="zstd" if kind == "zstd" else None,
        ) as writer:
            for row in rows:
                typed = {"id": np.dtype(encodings["id"]).type(row["id"])}
                if "label" in row:
                    typed["label"] = np.uint8(row["label"])
                if "score" in row:
                    typed["score"] = np.float32(row["score"])
                writer.write({**row, **typed})
        for shard in (folder / name).glob("*.mds*"):
            shard.rename(folder / f"{name}{''.join(shard.suffixes[1:])}")
    else:
        types = {"id": pa.int32(), "text": pa.string(), "label": pa.uint8(), "score": pa.float32()}
        if rows[0]["id"] > 1 << 31:
            types["id"] = pa.int64()
        table = pa.Table.from_pylist(rows, pa.schema([(each, types[each]) for each in columns]))
        if kind == "parquet":
            pq.write_table(table, folder / f"{name}.parquet")
            return
        options = pa.ipc.IpcWriteOptions(compression="zstd" if kind == "compressed" else None)
        with pa.ipc.new_file(folder / f"{name}.arrow", table.schema, options=options) as writer:
            writer.write_table(table)


def options_of(kind: str, **options: Any) -> dict[str, Any]:
    types = {"id": "int64", "label": "int64", "score": "float64"} if kind == "csv" else {}
    return {"schema": "union", **({"types": types} if types else {}), **options}


def batch(path: Path, **options: Any) -> dict[str, Any]:
    with Loader(path, batch_size=4, order="sequential", options=options) as loader:
        return dict(next(iter(loader)))


@pytest.mark.parametrize("kind", KINDS)
def test_shards_with_other_columns_are_refused_with_both(kind: str, folder: Path) -> None:
    types = {"types": options_of(kind)["types"]} if kind == "csv" else {}
    with pytest.raises(
        CorruptSample, match=r"shard 1\S* does not fit: it has .*, and shard 0"
    ) as e:
        batch(folder / kind, **types)
    assert str(e.value).count("text") >= 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_union_has_the_columns_of_all_shards(kind: str, folder: Path) -> None:
    found = batch(folder / kind, **options_of(kind, defaults={"label": 3}, cast={"label": "int16"}))
    assert found["id"].tolist() == [1, 2, 1 << 40, 4]
    assert texts(found, "text") == ["one", 'tw"o', "three", "four"]
    assert found["label"].tolist() == [7, 8, 3, 9]
    assert str(found["label"].dtype) == "torch.int16"
    assert found["label.present"].tolist() == [True, True, False, True]
    assert found["score"].tolist() == [0, 0, 0, 0.5]
    assert found["score.present"].tolist() == [False, False, False, True]
    assert "id.present" not in found


@pytest.mark.parametrize("kind", KINDS)
def test_columns_are_chosen_from_all(kind: str, folder: Path) -> None:
    chosen = options_of(kind, columns=["weight=score", "id"], rename={"weight": "w"})
    if kind == "csv":
        chosen["types"] = {"id": "int64", "score": "float64"}
    found = batch(folder / kind, **chosen)
    assert set(found) == {"sample_id", "w", "w.present", "id"}
    assert found["w"].tolist() == [0, 0, 0, 0.5]


def test_the_order_block_and_the_fingerprint(folder: Path) -> None:
    fingerprints = set()
    for options in ({}, {"defaults": {"label": 3}}, {"defaults": {"label": 4}}):
        with Loader(
            folder / "parquet",
            batch_size=2,
            order="block",
            seed=1,
            options=options_of("", **options),
        ) as loader:
            fingerprints.add(loader.fingerprint)
            ids = sorted(each for found in loader for each in found["id"].tolist())
            assert ids == [1, 2, 4, 1 << 40]
    assert len(fingerprints) == 3


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        ({"defaults": {"label": 256}}, ConfigError, "is 256, and the field is uint8"),
        ({"defaults": {"label": "x"}}, ConfigError, "is 'x', and the field is uint8"),
        ({"defaults": {"text": 1}}, None, ""),  # no shard lacks it
        ({"defaults": {"other": 1}}, ConfigError, "no shard has such a column; there are id, text"),
        (
            {"columns": ["id", "x"]},
            ConfigError,
            "`columns` has 'x', and no shard has such a column",
        ),
        ({"columns": ["score"]}, GyreError, "none of the columns to serve; it has id, text"),
        ({"schema": "equal", "defaults": {"label": 1}}, ConfigError, 'needs `schema = "union"`'),
        ({"schema": "any"}, ConfigError, "expected one of equal, union"),
        (
            {"cast": {"label": "int8"}, "defaults": {"label": 200}},
            ConfigError,
            "its default cannot",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    options: dict[str, Any], kind: type[GyreError] | None, sentence: str, folder: Path
) -> None:
    if kind is None:
        batch(folder / "parquet", **options_of("", **options))
        return
    with pytest.raises(kind, match=sentence):
        batch(folder / "parquet", **options_of("", **options))


def test_types_that_no_dtype_holds_are_refused_with_both(tmp_path: Path) -> None:
    for number, column in enumerate((["a"], [1])):
        pq.write_table(pa.table({"x": column}), tmp_path / f"{number}.parquet")
    with pytest.raises(
        CorruptSample, match=r"shard 1\S* .* 'x' is int64, and that of shard 0\S* is text, ragged"
    ):
        batch(tmp_path, schema="union")


def write_arrow(folder: Path, tables: list[dict[str, Any]]) -> None:
    for number, columns in enumerate(tables):
        table = pa.table(columns)
        with pa.ipc.new_file(folder / f"{number}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=1)


def test_arrow_shards_of_which_one_must_be_decoded(tmp_path: Path) -> None:
    labels = pa.array(["x", "y"]).dictionary_encode()
    price = pa.array([1, 2]).cast(pa.decimal128(25, 2))
    objects_of = [{"a": 1}, {"a": 2}]
    flags = [[True], [False, True]]
    first = {"id": [1, 2], "s": labels, "o": objects_of, "b": flags, "d": price}
    write_arrow(tmp_path, [first, {"o": pa.nulls(1), "id": [3]}, {"s": ["ö"], "id": [4]}])
    found = batch(tmp_path, schema="union", defaults={"s": "none"})
    assert found["id"].tolist() == [1, 2, 3, 4]
    assert "id.present" not in found
    assert texts(found, "s") == ["x", "y", "none", "ö"]
    assert objects(found, "o") == [*objects_of, None, None]
    assert found["b"].tolist() == [True, False, True]
    assert found["b.offsets"].tolist() == [0, 1, 3, 3, 3]
    assert texts(found, "d") == ["1.00", "2.00", "", ""]
    assert found["s.present"].tolist() == [True, True, False, True]
    for name in "obd":
        assert found[f"{name}.present"].tolist() == [True, True, False, False]


def test_texts_of_arrow_are_stored_in_any_way(tmp_path: Path) -> None:
    plain = {"s": ["a", None], "flag": [True, False]}
    view = {"s": pa.array(["b"], pa.string_view()), "flag": [True]}
    write_arrow(tmp_path, [plain, {**view, "s": pa.array(["c"]).dictionary_encode()}, view])
    for options in ({}, {"schema": "union"}):
        found = batch(tmp_path, **options)
        assert texts(found, "s") == ["a", "", "c", "b"]
        assert found["s.present"].tolist() == [True, False, True, True]
        assert found["flag"].tolist() == [True, False, True, True]


def test_columns_without_any_value_are_lacking(tmp_path: Path) -> None:
    columns = ([None, None], [1.5, None])
    for number, column in enumerate(columns):
        table = pa.table(
            {"x": column, "flag": [True, False]} if number else {"x": column, "y": [1, 2]}
        )
        pq.write_table(table, tmp_path / f"{number}.parquet")
    found = batch(tmp_path, schema="union", defaults={"flag": True, "x": -1})
    assert found["x"].tolist() == [-1, -1, 1.5, 0], "a default is of shards, not of rows"
    assert found["x.present"].tolist() == [False, False, True, False]
    assert found["flag"].tolist() == [True, True, True, False]
