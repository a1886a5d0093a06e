"""Columns of arrays that declare their shape arrive in it, from Parquet and from Arrow."""

import io
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Array2D, Array3D, Dataset, Features, Sequence, Value
from gyre_daemon.datasets.formats.base import PRESENT_SUFFIX, Scan
from gyre_daemon.datasets.formats.chunk_index import chunks_of
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.storage.shard import Shard

from tests.contract.formats.chunk_contract import decode_all
from tests.shard_formats import shard_format

VALUES = np.arange(48, dtype=np.float32).reshape(2, 2, 3, 4)


def written(table: pa.Table, name: str, **options: Any) -> bytes:
    file = io.BytesIO()
    if name == "parquet":
        pq.write_table(table, file, **options)
    else:
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    return file.getvalue()


def values(data: bytes, name: str, column: str = "x", **options: Any) -> tuple[np.ndarray, Any]:
    """All rows of a column, and which are present."""
    dataset_format = shard_format(name, **options)
    assert isinstance(dataset_format.inspection, Scan)
    found = dataset_format.inspection.run("0", cast("BinaryIO", io.BytesIO(data)))
    dataset_format.inspection.check(found, len(data))
    index = dataset_format.assemble([Shard("0", len(data), "1")], [found])
    stored = decode_all([data], index)[0] if chunks_of(index) else data
    place = [spec.name for spec in index.fields].index(column)
    spec, its = index.fields[place], index.locate(np.arange(index.num_samples))
    assert not spec.ragged
    rows = [
        np.frombuffer(stored[start : start + size], spec.dtype).reshape(spec.shape)
        for start, size in zip(its.start[:, place], its.size[:, place], strict=True)
    ]
    names = [each.name for each in index.fields if each.codec == "indexed"]
    present = column + PRESENT_SUFFIX
    return np.stack(rows), its.indexed[names.index(present)] if present in names else None


@pytest.mark.parametrize("name", ["parquet", "arrow"])
def test_tensors_of_one_shape_keep_it(name: str) -> None:
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(VALUES)
    whole = pa.FixedSizeListArray.from_arrays(tensors, 2)
    table = pa.table({"x": tensors, "y": pa.chunked_array([pa.concat_arrays([whole, whole])])})
    found, present = values(written(table, name), name)
    assert present is None
    np.testing.assert_array_equal(found, VALUES)
    found, _ = values(written(table, name), name, "y")
    np.testing.assert_array_equal(found, np.stack([VALUES, VALUES]))


@pytest.mark.parametrize("name", ["parquet", "arrow"])
def test_permuted_tensors_are_refused(name: str) -> None:
    kind = pa.fixed_shape_tensor(pa.float32(), (2, 3), permutation=[1, 0])
    storage = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6, dtype=np.float32)), 6)
    table = pa.table({"x": pa.ExtensionArray.from_storage(kind, storage)})
    with pytest.raises((ConfigError, CorruptSample), match=r"'x' has the type .*permut"):
        values(written(table, name), name)


@pytest.mark.parametrize("name", ["parquet", "arrow"])
def test_arrays_of_hugging_face_keep_their_shape(name: str, tmp_path: Path) -> None:
    features = Features(
        {
            "x": Array3D((2, 3, 4), "float32"),
            "y": Array2D((3, 4), "int64"),
            "z": Sequence(Value("int32"), length=4),
        }
    )
    whole = np.arange(24).reshape(2, 3, 4)
    columns = {"x": [*VALUES, None], "y": [*whole, whole[0]], "z": [[1, 2, 3, 4]] * 3}
    dataset = Dataset.from_dict(columns, features=features)
    if name == "parquet":
        dataset.to_parquet(tmp_path / "0")
        data = (tmp_path / "0").read_bytes()
    else:
        dataset.save_to_disk(tmp_path)
        (path,) = tmp_path.glob("*.arrow")
        data = path.read_bytes()
    found, present = values(data, name)
    assert present.tolist() == [True, True, False]
    np.testing.assert_array_equal(found, [*VALUES, np.zeros_like(VALUES[0])])
    np.testing.assert_array_equal(values(data, name, "y")[0], columns["y"])
    np.testing.assert_array_equal(values(data, name, "z")[0], columns["z"])


@pytest.mark.parametrize("name", ["parquet", "arrow"])
def test_lists_of_a_declared_length_are_arrays(name: str) -> None:
    rows = np.arange(24).reshape(4, 6)
    nested = pa.array(rows.reshape(4, 3, 2).tolist(), pa.list_(pa.list_(pa.int64(), 2)))
    table = pa.table({"x": rows.tolist(), "y": nested, "z": [[1], [], [2, 3], None]})
    lengths = {"x": 6, "y": 3}
    for some in (table, table.slice(1, 2)):
        data = written(some, name)
        wanted = np.array(some["x"].to_pylist())
        found, present = values(data, name, lengths=lengths)
        assert present is None
        np.testing.assert_array_equal(found, wanted)
        found, _ = values(data, name, "y", lengths=lengths)
        np.testing.assert_array_equal(found, wanted.reshape(-1, 3, 2))
    for options, sentence in (
        ({"x": 5}, "has (a list of )?6 elements"),
        ({"z": 1}, "(has|of) .*elements"),
        ({"w": 1}, "`lengths` has 'w', and the files have x, y, z"),
    ):
        with pytest.raises((ConfigError, CorruptSample), match=sentence):
            values(written(table, name), name, lengths=options)
    texts = pa.table({"x": ["a"]})
    with pytest.raises((ConfigError, CorruptSample), match="'x', whose type string is no list"):
        values(written(texts, name), name, lengths={"x": 1})
