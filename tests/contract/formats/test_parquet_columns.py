"""Parquet under its contract, and what becomes of each type of a column."""

import io
import json
from decimal import Decimal
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gyre_daemon.datasets.formats.base import PRESENT_SUFFIX, Scan, TolerantFormat
from gyre_daemon.datasets.formats.chunk_index import ChunkIndex
from gyre_daemon.errors import ConfigError, CorruptSample
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.formats.chunk_contract import ChunkContract, decode_all
from tests.contract.formats.compressed_shards import arrow, parquet
from tests.contract.formats.format_contract import Sample, inspect, listed
from tests.shard_formats import shard_format


class TestParquet(ChunkContract):
    name = "parquet"
    options: ClassVar = {"columns": ["id", "words=text", "box", "tokens"]}

    def table(self, count: int) -> Any:
        generator = np.random.default_rng(count)
        box = [generator.random((2, 3), np.float32).tolist() for _ in range(count)]
        return pa.table(
            {
                "other": pa.array([{"a": 1}] * count, pa.struct([("a", pa.int8())])),
                "box": pa.array(box, pa.list_(pa.list_(pa.float32(), 3), 2)),
                "text": ["wörd " * int(generator.integers(9)) for _ in range(count)],
                "id": np.arange(count),
                "tokens": pa.array(
                    [list(range(int(generator.integers(5)))) for _ in range(count)],
                    pa.list_(pa.uint16()),
                ),
            }
        )

    def shards(self) -> tuple[list[bytes], list[Sample]]:
        tables = [self.table(count) for count in (90, 1, 55)]
        shards = [parquet(table, row_group_size=40, compression="zstd") for table in tables]
        return shards, [
            {
                "id": np.int64(row["id"]).tobytes(),
                "words": row["text"].encode(),
                "box": np.array(row["box"], np.float32).tobytes(),
                "tokens": np.array(row["tokens"], np.uint16).tobytes(),
            }
            for table in tables
            for row in table.to_pylist()
        ]

    def empty_shard(self) -> bytes:
        return parquet(self.table(0))

    def damaged_shard(self) -> bytes:
        return self.shards()[0][0][:-20]


class TestUnionOfParquet(TestParquet):
    """The columns of the second and third shard are in another order."""

    options: ClassVar = {"schema": "union"}

    def table(self, count: int) -> Any:
        names = ["id", "text", "box", "tokens"]
        return super().table(count).select(names if count == 90 else names[::-1])

    def shards(self) -> tuple[list[bytes], list[Sample]]:
        shards, samples = super().shards()
        names = ["id", "text", "box", "tokens"]
        return shards, [dict(zip(names, sample.values(), strict=True)) for sample in samples]

    def empty_shard(self) -> bytes:
        return parquet(super().table(0))


NUMBERS = [pa.int8(), pa.uint16(), pa.int64(), pa.float16(), pa.float64(), pa.bool_()]

TIMES = [pa.timestamp("us", "UTC"), pa.duration("ms"), pa.time32("s"), pa.date32()]

TEXTS = [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())]

FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])

OTHERS = [pa.binary(), pa.large_binary(), pa.binary(3), FILE]


def lists(kinds: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    sized = st.builds(pa.list_, kinds, st.integers(1, 3))
    return st.one_of(sized, st.builds(pa.list_, kinds), st.builds(pa.large_list, sized))


TYPES = st.one_of(
    st.sampled_from([*NUMBERS, *TIMES, *TEXTS, *OTHERS]), lists(st.sampled_from(NUMBERS))
)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type, as pyarrow takes them."""
    if pa.types.is_fixed_size_list(kind):
        inner = values(kind.value_type)
        return st.lists(inner, min_size=kind.list_size, max_size=kind.list_size)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return st.lists(values(kind.value_type), max_size=3)
    if kind in TEXTS:
        return st.text("aö\n", max_size=4)
    if kind == FILE:
        return st.fixed_dictionaries({"bytes": st.binary(max_size=5), "path": st.none()})
    if kind == pa.bool_():
        return st.booleans()
    if pa.types.is_fixed_size_binary(kind):
        return st.binary(min_size=3, max_size=3)
    if kind in OTHERS:
        return st.binary(max_size=5)
    return st.integers(0, 100)


@st.composite
def tables(draw: st.DrawFn) -> Any:
    kinds = draw(st.lists(TYPES, min_size=1, max_size=4))
    count = draw(st.integers(1, 8))
    columns = {}
    for number, kind in enumerate(kinds):
        its = values(kind)
        its = st.one_of(st.none(), its) if draw(st.booleans()) else its
        rows = draw(st.lists(its, min_size=count, max_size=count))
        if pa.types.is_floating(kind):
            rows = [
                None if row is None else np.dtype(kind.to_pandas_dtype()).type(row) for row in rows
            ]
        columns[f"c{number}"] = pa.array(rows, kind)
    return pa.table(columns)


def reference(column: Any) -> list[bytes | None]:
    """The rows of a column as bytes, by way of pyarrow's conversion to Python."""
    kind = column.type
    if pa.types.is_temporal(kind):
        kind = pa.int32() if kind.bit_width == 32 else pa.int64()
        column = column.cast(kind)

    def stored(row: Any, kind: Any) -> bytes | None:
        if isinstance(row, list):
            return b"".join(stored(each, kind.value_type) or b"" for each in row)
        if isinstance(row, dict):
            row = row["bytes"]
        if isinstance(row, str):
            return row.encode()
        return (
            row
            if row is None or isinstance(row, bytes)
            else np.array(row, kind.to_pandas_dtype()).tobytes()
        )

    return [stored(row, kind) for row in column.to_pylist()]


@settings(max_examples=60, deadline=None)
@given(table=tables(), compression=st.sampled_from(["none", "snappy", "zstd"]), pages=st.booleans())
def test_rows_are_those_of_pyarrow(table: Any, compression: str, *, pages: bool) -> None:
    shard = parquet(
        table,
        row_group_size=3,
        compression=compression,
        use_dictionary=pages,
        data_page_size=100 if pages else None,
        write_statistics=pages,
    )
    dataset_format = TestParquet().format(columns=[])
    index = dataset_format.assemble(listed([shard]), inspect(dataset_format, [shard]))
    assert isinstance(index, ChunkIndex)
    extents = index.locate(np.arange(index.num_samples))
    (decoded,) = decode_all([shard], index)
    read = pq.read_table(io.BytesIO(shard))
    stored = [spec for spec in index.fields if spec.codec != "indexed"]
    present = [spec.name for spec in index.fields if spec.codec == "indexed"]
    assert [spec.name for spec in stored] == read.column_names
    for place, spec in enumerate(stored):
        expected = reference(read.column(spec.name))
        ranges = zip(extents.start[:, place], extents.size[:, place], strict=True)
        found = [decoded[start : start + size] for start, size in ranges]
        empty = b"" if spec.ragged else bytes(spec.element_bytes)
        assert found == [empty if row is None else row for row in expected]
        has = np.array([row is not None for row in expected])
        name = spec.name + PRESENT_SUFFIX
        assert (name in present) == (not has.all())
        if name in present:
            assert np.array_equal(extents.indexed[present.index(name)], has)


def scan_of(table: Any, **options: Any) -> Any:
    dataset_format = TestParquet().format(**{"columns": [], **options})
    shards = [parquet(table)]
    return dataset_format.assemble(listed(shards), inspect(dataset_format, shards))


@pytest.mark.parametrize(
    "kind",
    [
        pa.map_(pa.string(), pa.binary()),
        pa.map_(pa.list_(pa.int8()), pa.int8()),
        pa.list_(pa.binary()),
        pa.list_(FILE),
        pa.struct([("a", pa.int8()), ("a", pa.int8())]),
    ],
    ids=str,
)
def test_types_that_become_no_tensor_are_refused_by_name(kind: Any) -> None:
    table = pa.table({"a": [1], "odd": pa.array([None], kind)})
    with pytest.raises(ConfigError, match=r"column 'odd' has the type .*name the others in"):
        scan_of(table)
    assert [spec.name for spec in scan_of(table, columns=["a"]).fields] == ["a"]


NESTED = {
    "objects": pa.struct([("bbox", pa.list_(pa.list_(pa.float64()))), ("id", pa.list_(pa.int8()))]),
    "parts": pa.list_(pa.struct([("box", pa.list_(pa.float32(), 2)), ("kind", pa.string())])),
    "tags": pa.large_list(pa.string()),
    "grid": pa.list_(pa.list_(pa.list_(pa.bool_()))),
}


@pytest.mark.parametrize("name", ["parquet", "arrow", "compressed"])
def test_nested_columns_are_json(name: str) -> None:
    """Structs, lists of structs and lists of lists, as data of objects in images have them."""
    rows: list[dict[str, Any]] = [
        {
            "objects": {"bbox": [[0.25, 1.0, 2.5, 3.0]] * n, "id": [n] * n},
            "parts": [{"box": [n, 0.5], "kind": "wörd" if n else None}] * n,
            "tags": ["a", 'b"'][:n],
            "grid": [[[True], []], [[False, True]]][:n],
        }
        for n in range(4)
    ]
    rows += [dict.fromkeys(NESTED), rows[1]]
    table = pa.table({each: pa.array([row[each] for row in rows], NESTED[each]) for each in NESTED})
    # a slice, and several pieces
    table = pa.concat_tables([table.slice(2), table.slice(0, 3)])
    if name == "parquet":
        shard = parquet(table, row_group_size=2)
    else:
        shard = arrow(table, "zstd" if name == "compressed" else None)
    dataset_format = shard_format("parquet" if name == "parquet" else "arrow")
    index = dataset_format.assemble(listed([shard]), inspect(dataset_format, [shard]))
    assert isinstance(index, ChunkIndex)
    stored = [spec for spec in index.fields if spec.codec != "indexed"]
    assert [(spec.name, spec.codec) for spec in stored] == [(each, "json") for each in NESTED]
    (decoded,) = decode_all([shard], index)
    extents = index.locate(np.arange(index.num_samples))
    for place, spec in enumerate(stored):
        ranges = zip(extents.start[:, place], extents.size[:, place], strict=True)
        found = [json.loads(decoded[start : start + size]) for start, size in ranges]
        assert found == [row[spec.name] for row in table.to_pylist()]
    assert {spec.name for spec in index.fields[4:]} == {each + PRESENT_SUFFIX for each in NESTED}


LABELS = pa.dictionary(pa.int32(), pa.string())
DAYS = pa.struct([("day", pa.date32()), ("price", pa.decimal128(5, 2))])
DAY_MS = 24 * 60 * 60 * 1000
# A type, its values, and the three rows that are served: the last one is null.
SERVED_TYPES: list[tuple[Any, list[Any], list[Any]]] = [
    (pa.map_(pa.string(), pa.int64()), [[("a", 1), ("a", 2)], []], [{"a": 2}, {}, None]),
    (pa.map_(pa.int8(), LABELS), [[(1, "x")], [(2, None)]], [{"1": "x"}, {"2": None}, None]),
    (pa.date64(), [3 * DAY_MS, 0], [3, 0, 0]),
    (pa.list_(pa.date64()), [[-DAY_MS], []], [[-1], [], []]),
    (pa.struct([("a", pa.date64())]), [{"a": DAY_MS}, {"a": None}], [{"a": 1}, {"a": None}, None]),
    (pa.decimal128(10, 2), [Decimal("-1.25"), Decimal(2)], [-1.25, 2.0, 0.0]),
    (pa.decimal128(38, 2), [Decimal("-1.25"), Decimal(10**30)], [b"-1.25", b"1%030d.00" % 0, b""]),
    (pa.null(), [None, None], [None] * 3),
    (pa.list_view(pa.int32()), [[1, 2], []], [[1, 2], [], []]),
    (pa.large_list_view(pa.list_(pa.int8(), 2)), [[[1, 2]], []], [[[1, 2]], [], []]),
    (pa.list_(LABELS), [["a", None], []], [["a", None], [], None]),
    (pa.list_(pa.dictionary(pa.int8(), pa.int16())), [[7, 7], [8]], [[7, 7], [8], []]),
    (pa.list_view(pa.list_view(LABELS)), [[["a"], ["b"]], [[]]], [[["a"], ["b"]], [[]], None]),
    (pa.list_(DAYS, 1), [[{"day": 3, "price": Decimal("0.50")}], [None]],
     [[{"day": 3, "price": 0.5}], [None], None]),
    (pa.struct([("a", pa.list_view(pa.time64("us")))]), [{"a": [5]}, {"a": None}],
     [{"a": [5]}, {"a": None}, None]),
]  # fmt: skip


@pytest.mark.parametrize("name", ["parquet", "arrow", "compressed"])
@pytest.mark.parametrize(
    ("kind", "given", "wanted"), SERVED_TYPES, ids=[str(each[0]) for each in SERVED_TYPES]
)
def test_types_of_tables_have_natural_values(
    kind: Any, given: list[Any], wanted: list[Any], name: str
) -> None:
    table = pa.table({"x": pa.array([*given, None], kind)})
    table = pa.concat_tables([table.slice(1), table.slice(0, 1)])
    if name == "parquet":
        shard = parquet(table, row_group_size=2)
    else:
        shard = arrow(table, "zstd" if name == "compressed" else None)
    dataset_format = shard_format("parquet" if name == "parquet" else "arrow")
    index = dataset_format.assemble(listed([shard]), inspect(dataset_format, [shard]))
    assert isinstance(index, ChunkIndex)
    (decoded,), spec = decode_all([shard], index), index.fields[0]
    extents, found = index.locate(np.arange(3)), list[Any]()
    for start, size in zip(extents.start[:, 0], extents.size[:, 0], strict=True):
        data = decoded[start : start + size]
        if spec.codec == "json":
            found.append(json.loads(data))
        elif spec.codec == "text":
            found.append(data)
        else:
            shape = (-1, *spec.shape) if spec.ragged else spec.shape
            found.append(np.frombuffer(data, spec.dtype).reshape(shape).tolist())
    assert found == [wanted[1], wanted[2], wanted[0]]
    has = [False] * 3 if pa.types.is_null(kind) else [True, False, True]
    assert extents.indexed[0].tolist() == has


def test_other_columns_in_another_shard_are_shown() -> None:
    dataset_format = TestParquet().format(columns=[])
    shards = [parquet(pa.table({"a": [1]})), parquet(pa.table({"a": ["x"]}))]
    scans = inspect(dataset_format, shards)
    with pytest.raises(
        CorruptSample,
        match=r"001 does not fit: it has .* a \(text, ragged\), .* 000 .* a \(int64\)",
    ):
        dataset_format.assemble(listed(shards), scans)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        (["b"], "no column 'b'; the files have a"),
        (["sample_id=a"], "no field can have the name 'sample_id'"),
    ],
)
def test_columns_that_cannot_be_served_are_named(columns: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        scan_of(pa.table({"a": [1]}), columns=columns)


def test_a_file_that_lies_elsewhere_is_refused() -> None:
    column = pa.array([{"bytes": None, "path": "/data/a.png"}], FILE)
    with pytest.raises(CorruptSample, match=r"no bytes in row 0, only the path /data/a\.png"):
        scan_of(pa.table({"image": column}))


def test_names_of_classes_are_those_of_hugging_face() -> None:
    features = {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}, "id": None}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.table({"id": [7, 8], "label": [1, 0]}).replace_schema_metadata(metadata)
    fields = scan_of(table).fields
    assert [spec.categories for spec in fields] == [(), ("cat", "dog")]


def test_a_list_with_nulls_is_refused() -> None:
    with pytest.raises(CorruptSample, match="column 'a': a list has nulls"):
        scan_of(pa.table({"a": [[1, None]]}))


def test_only_what_must_be_known_is_read() -> None:
    """Of columns of numbers without nulls, nothing but the footer."""
    data = parquet(pa.table({"a": np.arange(100_000), "b": ["text"] * 100_000}), compression="none")
    for columns, most in ((["a"], 70_000), (["b"], 200_000)):
        file = Counting(data)
        inspection: Any = TestParquet().format(columns=columns).inspection
        inspection.run("000", file)
        assert file.num_bytes < most < len(data)


class Counting(io.BytesIO):
    num_bytes = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.num_bytes += len(data)
        return data


def test_a_row_group_that_cannot_be_decoded_is_kept_with_its_reason() -> None:
    """Its rows are known from the footer; who does not replace them gets the reason."""
    data = bytearray(parquet(pa.table({"text": ["one", "two", "three"]}), row_group_size=2))
    data[bytes(data).index(b"two")] ^= 1
    form = TestParquet().format(columns=[])
    assert isinstance(form, TolerantFormat)
    assert isinstance(form.inspection, Scan)
    scans = inspect(form, [bytes(data)])
    with pytest.raises(CorruptSample, match=r"shard 000: row group 0 \(at byte \d+\) .* CRC"):
        form.assemble(listed([bytes(data)]), scans)
    assert form.assemble_tolerantly(listed([bytes(data)]), scans)[0].num_samples == 3
    form.inspection.check(scans[0], len(data))
    for forged in (b"{}", b'[[2, "x"]]', b'[[-1, "x"]]', b"[[0, 1]]", b"[[0]]", b"["):
        arrays = {**scans[0], "damaged": np.frombuffer(forged, np.uint8)}
        with pytest.raises(ValueError, match=r"."):
            form.inspection.check(arrays, len(data))
