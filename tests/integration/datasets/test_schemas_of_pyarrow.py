"""A union of random shards is what pyarrow makes of the tables when it promotes their types."""

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gyre_client import Loader
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("private_daemon")

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32()]
FLOATS = [pa.float32(), pa.float64(), pa.int8(), pa.uint16()]
# Of a column the shards have types of one family; all values fit into each of them.
FAMILIES = [
    INTEGERS,
    FLOATS,
    [pa.string(), pa.large_string()],
    [pa.bool_()],
    [pa.list_(kind) for kind in INTEGERS if kind != pa.uint8()],  # those of uint8 are bytes
    [pa.large_list(kind) for kind in FLOATS],
    [pa.list_(kind, 2) for kind in INTEGERS],
]

EMPTY = pa.table({"a": pa.array([[], None, [1]], pa.list_(pa.int8()))})


def values(kind: Any) -> st.SearchStrategy[Any]:
    if pa.types.is_fixed_size_list(kind):
        return st.lists(st.integers(0, 100), min_size=2, max_size=2)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return st.lists(st.integers(0, 100), max_size=3)
    if pa.types.is_boolean(kind):
        return st.booleans()
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return st.text("aö\n", max_size=3)
    return st.integers(0, 100)


@st.composite
def shards(draw: st.DrawFn) -> list[Any]:
    """Tables of which each has some of the columns, in some order."""
    families = draw(st.lists(st.sampled_from(FAMILIES), min_size=1, max_size=4))
    names = [f"c{number}" for number in range(len(families))]
    tables = []
    for _ in range(draw(st.integers(1, 4))):
        columns, count = {}, draw(st.integers(1, 5))
        for name in draw(st.permutations(names))[: draw(st.integers(1, len(names)))]:
            kind = draw(st.sampled_from(families[names.index(name)]))
            its = st.one_of(st.none(), values(kind)) if draw(st.booleans()) else values(kind)
            columns[name] = pa.array(draw(st.lists(its, min_size=count, max_size=count)), kind)
        tables.append(pa.table(columns))
    return tables


def write(tables: list[Any], kind: str, folder: Path) -> None:
    options = pa.ipc.IpcWriteOptions(compression="zstd" if kind == "compressed" else None)
    for number, table in enumerate(tables):
        if kind == "parquet":
            pq.write_table(table, folder / f"{number}.parquet", row_group_size=2)
        else:
            path = folder / f"{number}.arrow"
            with pa.ipc.new_file(path, table.schema, options=options) as writer:
                writer.write_table(table, max_chunksize=2)


def served(batch: Any, name: str, kind: Any) -> list[Any]:
    """The values of a column as Python has them; None where the batch says that it lacks one."""
    data, offsets = batch[name], batch.get(f"{name}.offsets")
    if offsets is None:
        found = data.tolist()
    else:
        bounds = offsets.tolist()
        parts = [data[start:stop] for start, stop in itertools.pairwise(bounds)]
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        found = [part.numpy().tobytes().decode() if is_text else part.tolist() for part in parts]
    present = batch.get(f"{name}.present")
    has = [True] * len(found) if present is None else present.tolist()
    for value, is_there in zip(found, has, strict=True):
        assert is_there or not np.any(value if not isinstance(value, str) else len(value))
    return [value if is_there else None for value, is_there in zip(found, has, strict=True)]


# without shrinking: an example opens a dataset of a daemon
@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@example(tables=[EMPTY, pa.table({"a": [[1 << 40]]})], kind="parquet")
@given(tables=shards(), kind=st.sampled_from(["parquet", "arrow", "compressed"]))
def test_a_union_is_the_concatenation_of_pyarrow(tables: list[Any], kind: str) -> None:
    joined = pa.concat_tables(tables, promote_options="permissive")
    with tempfile.TemporaryDirectory() as name:
        write(tables, kind, Path(name))
        options = {"schema": "union"}
        with Loader(
            name, batch_size=joined.num_rows, order="sequential", options=options
        ) as loader:
            batch = dict(next(iter(loader)))
            assert loader.num_samples == joined.num_rows
    fields = {each for each in batch if "." not in each} - {"sample_id"}
    assert fields == set(joined.column_names)
    for column in joined.column_names:
        chunked = joined.column(column)
        assert served(batch, column, chunked.type) == chunked.to_pylist()
