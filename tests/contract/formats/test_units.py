"""Units of times in Parquet and Arrow: all shards have one for each column."""

import re
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from gyre_daemon.datasets.formats import SampleIndex
from gyre_daemon.datasets.formats.base import Scan
from gyre_daemon.errors import CorruptSample

from tests.contract.formats.compressed_shards import arrow, parquet
from tests.contract.formats.format_contract import inspect, listed
from tests.shard_formats import shard_format

MS, US = pa.timestamp("ms"), pa.timestamp("us")


def stored(name: str, table: Any) -> bytes:
    return parquet(table) if name == "parquet" else arrow(table, None)


def index_of(name: str, kinds: tuple[Any, ...], values: Any = 0, **options: Any) -> SampleIndex:
    """Of shards with a column `x` and one value, each of another type."""
    tables = [pa.table({"x": pa.array([values], kind)}) for kind in kinds]
    dataset_format = shard_format(name, **options)
    shards = [stored(name, table) for table in tables]
    return dataset_format.assemble(listed(shards), inspect(dataset_format, shards))


def in_struct(kind: Any) -> Any:
    return pa.struct([("t", kind)])


@pytest.mark.parametrize("schema", ["equal", "union"])
@pytest.mark.parametrize("name", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("values", "kinds", "reason"),
    [
        (0, (MS, MS, US), "'x' is timestamp[us], and that of shard 000 is timestamp[ms]"),
        (0, (US, MS), "'x' is timestamp[ms], and that of shard 000 is timestamp[us]"),
        (
            0,
            (pa.duration("ms"), pa.duration("s")),
            "'x' is duration[s], and that of shard 000 is duration[ms]",
        ),
        (
            0,
            (pa.time64("us"), pa.time64("ns")),
            "'x' is time64[ns], and that of shard 000 is time64[us]",
        ),
        (
            0,
            (pa.time32("ms"), pa.time64("us")),
            "'x' is time64[us], and that of shard 000 is time32[ms]",
        ),
        (
            0,
            (MS, pa.duration("ms")),
            "'x' is duration[ms], and that of shard 000 is timestamp[ms]",
        ),
        (0, (pa.int64(), MS), "'x' is timestamp[ms], and that of shard 000 is int64"),
        (0, (pa.date32(), pa.int32()), "'x' is int32, and that of shard 000 is date[day]"),
        (
            [0],
            (pa.list_(MS), pa.large_list(US)),
            "'x[]' is timestamp[us], and that of shard 000 is timestamp[ms]",
        ),
        (
            [0],
            (pa.list_(MS, 1), pa.list_(US, 1)),
            "'x[]' is timestamp[us], and that of shard 000 is timestamp[ms]",
        ),
        (
            {"t": 0},
            (in_struct(MS), in_struct(US)),
            "'x.t' is timestamp[us], and that of shard 000 is timestamp[ms]",
        ),
        (
            {"t": [{"t": 0}]},
            (in_struct(pa.list_(in_struct(pa.int64()))), in_struct(pa.list_(in_struct(US)))),
            "'x.t[].t' is timestamp[us], and that of shard 000 is int64",
        ),
        (
            [("a", 0)],
            (pa.map_(pa.string(), MS), pa.map_(pa.string(), US)),
            "'x[].value' is timestamp[us], and that of shard 000 is timestamp[ms]",
        ),
    ],
)
def test_other_units_in_another_shard_are_shown(
    values: Any, kinds: tuple[Any, ...], reason: str, name: str, schema: str
) -> None:
    said = f"shard {len(kinds) - 1:03} does not fit: its column {reason}"
    with pytest.raises(CorruptSample, match=re.escape(said)):
        index_of(name, kinds, values, schema=schema)


@pytest.mark.parametrize("name", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("values", "kinds", "schema"),
    [
        (0, (MS, MS), "equal"),
        (0, (MS, pa.timestamp("ms", "UTC"), pa.timestamp("ms", "Europe/Berlin")), "equal"),
        (0, (pa.int64(), pa.int64()), "equal"),
        (0, (pa.int64(), pa.int32(), pa.int8()), "union"),
        (0, (pa.int32(), pa.float32()), "union"),
        (0, (pa.date32(), pa.date64()), "equal"),
        (0, (pa.date64(), pa.date32()), "union"),
        (0, (pa.dictionary(pa.int8(), pa.int64()), pa.int64()), "equal"),
        ({}, (in_struct(MS), pa.struct([("u", US)])), "equal"),
        ({"t": None}, (in_struct(MS), in_struct(pa.string())), "equal"),
        ({"t": None}, (in_struct(MS), in_struct(in_struct(US))), "equal"),
        ({"t": None}, (in_struct(pa.int64()), in_struct(pa.float64())), "equal"),
        (None, (in_struct(MS), pa.null()), "equal"),
    ],
)
def test_equal_units_and_numbers_are_served(
    values: Any, kinds: tuple[Any, ...], schema: str, name: str
) -> None:
    assert index_of(name, kinds, values, schema=schema).num_samples == len(kinds)


@pytest.mark.parametrize("name", ["parquet", "arrow"])
def test_columns_that_are_not_served_may_have_any_unit(name: str) -> None:
    kinds = tuple(pa.struct([("t", kind)]) for kind in (MS, US))
    tables = [pa.table({"x": pa.array([{"t": 0}], kind), "y": [1]}) for kind in kinds]
    tables.insert(1, tables[0].slice(0, 0))
    dataset_format = shard_format(name, columns=["y"])
    shards = [stored(name, table) for table in tables]
    index = dataset_format.assemble(listed(shards), inspect(dataset_format, shards))
    assert index.num_samples == 2


@pytest.mark.parametrize("name", ["parquet", "arrow"])
def test_fingerprints_have_no_units(name: str) -> None:
    """States of before units were compared still fit."""
    table = pa.table({"x": pa.array([0], MS)})
    shards = [stored(name, table)]
    dataset_format = shard_format(name)
    (arrays,) = inspect(dataset_format, shards)
    other = {**arrays, "units": np.frombuffer(b'[{"":"int64"}]', np.uint8)}
    first, second = (
        dataset_format.assemble(listed(shards), [each]).digest() for each in (arrays, other)
    )
    assert arrays["units"].tobytes() != other["units"].tobytes()
    assert first == second


@pytest.mark.parametrize("name", ["parquet", "arrow"])
def test_stored_scans_without_units_are_refused(name: str) -> None:
    table = pa.table({"x": pa.array([0], MS)})
    shard = stored(name, table)
    dataset_format = shard_format(name)
    (arrays,), scan = inspect(dataset_format, [shard]), dataset_format.inspection
    assert isinstance(scan, Scan)
    scan.check(arrays, len(shard))
    assert not scan.version.startswith(f"{name}/3")
    without = {each: array for each, array in arrays.items() if each != "units"}
    with pytest.raises(ValueError, match="units"):
        scan.check(without, len(shard))
