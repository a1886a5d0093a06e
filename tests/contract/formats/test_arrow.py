"""Arrow IPC files and streams under the contract, compared with pyarrow, and damaged everywhere."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
from gyre_client import Loader
from gyre_client.errors import CorruptSample as RemoteCorruptSample
from gyre_daemon.datasets.formats import Format, SampleIndex
from gyre_daemon.datasets.formats.base import Scan
from gyre_daemon.datasets.formats.chunk_index import check_chunks, chunks_of
from gyre_daemon.errors import ConfigError, CorruptSample
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import S3Server, StartDaemon
from tests.contract.formats.chunk_contract import ChunkContract, decode_all
from tests.contract.formats.format_contract import FormatContract, Sample, inspect, listed
from tests.shard_formats import shard_format

FILE = pa.struct([("path", pa.string()), ("bytes", pa.binary())])


def stored(table: Any, rows: int, *, is_stream: bool = False, **options: Any) -> bytes:
    sink = io.BytesIO()
    make = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with make(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return sink.getvalue()


def scan_of(arrow: Format) -> Scan:
    assert isinstance(arrow.inspection, Scan)
    return arrow.inspection


def index_of(shards: Sequence[bytes], **options: Any) -> SampleIndex:
    arrow = shard_format("arrow", **options)
    return arrow.assemble(listed(shards), inspect(arrow, shards))


def rows_of(shards: Sequence[bytes], **options: Any) -> list[dict[str, Any]]:
    """Every row as the index says, with None where it says that there is no value."""
    index = index_of(shards, **options)
    extents = index.locate(np.arange(index.num_samples))
    rows: list[dict[str, Any]] = [{} for _ in range(index.num_samples)]
    num_stored = extents.start.shape[1]
    for place, spec in enumerate(index.fields):
        for number, row in enumerate(rows):
            if place >= num_stored:
                row[spec.name] = extents.indexed[place - num_stored][number].item()
                continue
            start, size = int(extents.start[number, place]), int(extents.size[number, place])
            data = shards[extents.shard[number]][start : start + size]
            if extents.absent is not None and extents.absent[number, place]:
                row[spec.name] = None
            elif spec.codec == "text":
                row[spec.name] = data.decode()
            elif spec.ragged and spec.dtype == np.uint8 and not spec.shape:
                row[spec.name] = data
            else:
                shape = (-1, *spec.shape) if spec.ragged else spec.shape
                row[spec.name] = np.frombuffer(data, spec.dtype).reshape(shape).tolist()
    return rows


class TestArrow(FormatContract):
    name = "arrow"
    options: ClassVar = {"columns": ["id", "caption=text", "vector"]}

    def shards(self) -> tuple[list[bytes], list[Sample]]:
        generator = np.random.default_rng(0)
        shards, samples = [], []
        for number, count in enumerate((20, 1, 35)):
            texts = ["wörd " * int(generator.integers(40)) for _ in range(count)]
            vectors = generator.random((count, 3)).astype(np.float32)
            table = pa.table(
                {
                    "id": np.arange(count, dtype=np.int16),
                    "unused": [["a", None]] * count,
                    "text": texts,
                    "vector": pa.FixedSizeListArray.from_arrays(vectors.ravel(), 3),
                }
            )
            shards.append(stored(table, 8, is_stream=number == 0))
            samples += [
                {
                    "id": np.int16(row).tobytes(),
                    "caption": texts[row].encode(),
                    "vector": vectors[row].tobytes(),
                }
                for row in range(count)
            ]
        return shards, list(samples)

    def empty_shard(self) -> bytes:
        return stored(pa.table({"other": pa.array([], pa.decimal128(3))}), 8)

    def damaged_shard(self) -> bytes:
        return self.shards()[0][0][:-9]


class TestArrowOfBothKinds(ChunkContract):
    """One shard is compressed, so those that are not are decoded, too."""

    name = "arrow"
    options = TestArrow.options
    has_checksums = False

    def shards(self) -> tuple[list[bytes], list[Sample]]:
        shards, samples = TestArrow().shards()
        table = pa.ipc.open_stream(shards[0]).read_all()
        return [stored(table, 8, compression="zstd"), *shards[1:]], samples

    def empty_shard(self) -> bytes:
        return TestArrow().empty_shard()

    def damaged_shard(self) -> bytes:
        return self.shards()[0][0][:-9]


scalars = st.sampled_from(
    [pa.int8(), pa.uint16(), pa.int32(), pa.uint64(), pa.float32(), pa.float64()]
)
kinds = st.one_of(
    scalars,
    st.sampled_from([pa.bool_(), pa.string(), pa.large_string(), pa.binary(), pa.binary(3), FILE]),
    st.builds(pa.list_, scalars),
    st.builds(pa.large_list, scalars),
    st.builds(pa.list_, scalars, st.integers(1, 3)),
    st.builds(lambda kind: pa.list_(pa.list_(kind, 2)), scalars),
    st.builds(lambda kind: pa.list_(pa.list_(kind, 2), 2), scalars),
    # these are passed over
    st.sampled_from(
        [
            pa.null(),
            pa.list_(pa.string()),
            pa.map_(pa.string(), pa.int8()),
            pa.struct([("a", pa.int8()), ("b", pa.list_(pa.bool_()))]),
            pa.dictionary(pa.int8(), pa.string()),
            pa.decimal128(5),
            pa.list_(pa.bool_(), 3),
        ]
    ),
)


def value_of(kind: Any, draw: Any, *, may_be_null: bool = True) -> Any:
    if pa.types.is_null(kind) or (may_be_null and draw(st.integers(0, 9)) == 0):
        return None
    if pa.types.is_fixed_size_list(kind):
        return [value_of(kind.value_type, draw, may_be_null=False) for _ in range(kind.list_size)]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        count = draw(st.integers(0, 4))
        return [value_of(kind.value_type, draw, may_be_null=False) for _ in range(count)]
    if pa.types.is_map(kind):
        return [("k", 1)]
    if pa.types.is_struct(kind):
        return {field.name: value_of(field.type, draw) for field in kind}
    return draw(values_of(kind))


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    if pa.types.is_fixed_size_binary(kind):
        return st.binary(min_size=3, max_size=3)
    if pa.types.is_binary(kind):
        return st.binary(max_size=9)
    if pa.types.is_floating(kind):
        return st.integers(-9, 9).map(lambda number: number / 4)
    if pa.types.is_boolean(kind):
        return st.booleans()
    is_text = not (pa.types.is_integer(kind) or pa.types.is_decimal(kind))
    return st.text(max_size=5) if is_text else st.integers(0, 100)


def is_served(kind: Any) -> bool:
    return kind not in (
        pa.null(),
        pa.list_(pa.string()),
        pa.map_(pa.string(), pa.int8()),
        pa.struct([("a", pa.int8()), ("b", pa.list_(pa.bool_()))]),
        pa.dictionary(pa.int8(), pa.string()),
        pa.decimal128(5),
        pa.list_(pa.bool_(), 3),
    )


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_rows_of_any_schema_are_those_of_pyarrow(data: Any) -> None:
    chosen = data.draw(st.lists(kinds, min_size=1, max_size=5))
    served = {f"c{number}": kind for number, kind in enumerate(chosen) if is_served(kind)}
    served["last"] = pa.int64()
    shards, wanted = [], []
    for _ in range(2):
        count = data.draw(st.integers(1, 12))
        columns = {
            f"c{number}": pa.array([value_of(kind, data.draw) for _ in range(count)], kind)
            for number, kind in enumerate(chosen)
        }
        table = pa.table({**columns, "last": np.arange(count)})
        shards.append(stored(table, 5, is_stream=data.draw(st.booleans())))
        wanted += table.select(list(served)).to_pylist()
    found = rows_of(shards, columns=list(served))
    assert len(found) == len(wanted)
    for row, expected in zip(found, wanted, strict=True):
        for name, kind in served.items():
            value = expected[name]
            if kind == FILE and value is not None:
                value = value["bytes"]
            if pa.types.is_fixed_size_binary(kind) and value is not None:
                value = list(value)
            elif pa.types.is_boolean(kind):
                value = bool(value)
            elif isinstance(row[name], bytes) and isinstance(value, list):
                value = bytes(value)
            assert row[name] == value or (row[name] != row[name] and value is None)
            assert row.get(f"{name}.present", True) == (expected[name] is not None) or kind == FILE


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_rows_are_decoded_as_they_are_stored(data: Any) -> None:
    chosen = [kind for kind in data.draw(st.lists(kinds, max_size=5)) if is_served(kind)]
    count = data.draw(st.integers(1, 12))
    columns = {
        f"c{number}": pa.array([value_of(kind, data.draw) for _ in range(count)], kind)
        for number, kind in enumerate([*chosen, pa.int64()])
    }
    table, rows = pa.table(columns), data.draw(st.integers(1, 12))
    both = [stored(table, rows, is_stream=data.draw(st.booleans())), stored(table, rows)]
    assert chunks_of(index_of(both)) is None
    both[1] = stored(table, rows, compression="zstd")
    index = index_of(both)
    first, second = decode_all(both, index)
    assert first == second
    extents = index.locate(np.arange(2 * count))
    assert (extents.start[:count] == extents.start[count:]).all()
    assert (extents.size[:count] == extents.size[count:]).all()


def test_bytes_of_missing_values_are_not_decoded() -> None:
    """Below a missing value, Arrow may have any bytes."""
    text = pa.StringArray.from_buffers(
        3, *pa.array(["a", "bcd", "e"]).buffers()[1:], pa.py_buffer(b"\5")
    )
    is_missing = pa.array([False, True, False])
    numbers = pa.ListArray.from_arrays([0, 1, 3, 4], pa.array([1, 2, 3, 4]), mask=is_missing)
    files = pa.StructArray.from_arrays(
        [pa.array([b"a", b"bc", b"d"]), pa.nulls(3, pa.string())],
        names=["bytes", "path"],
        mask=is_missing,
    )
    table = pa.table({"text": text, "numbers": numbers, "files": files})
    shards = [stored(table, 9), stored(table, 9, compression="zstd")]
    first, second = decode_all(shards, index_of(shards))
    assert first == second
    assert first.startswith(b"ae\1")
    assert first.endswith(b"\4\0\0\0\0\0\0\0ad")


@pytest.mark.parametrize("is_compressed", [False, True])
def test_dictionaries_that_change_are_read_where_nothing_is_decoded(*, is_compressed: bool) -> None:
    sink = io.BytesIO()
    table = pa.table({"a": pa.array(["x"]).dictionary_encode(), "b": [1]})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
        other = pa.table({"a": pa.array(["y"]).dictionary_encode(), "b": [2]})
        writer.write_table(other)
    plain = stored(table, 9, compression="zstd" if is_compressed else None)
    shards = [sink.getvalue(), plain]
    if not is_compressed:
        assert rows_of(shards, columns=["b"]) == [{"b": 1}, {"b": 2}, {"b": 1}]
        return
    with pytest.raises(ConfigError, match="shard 000: it has dictionaries behind its first"):
        index_of(shards, columns=["b"])


def small_file(*, is_stream: bool) -> bytes:
    table = pa.table(
        {
            "id": np.arange(20),
            "text": pa.array([None if row == 3 else "x" * row for row in range(20)]),
            "list": [[row] * (row % 3) for row in range(20)],
        }
    )
    return stored(table, 7, is_stream=is_stream)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_file_that_is_cut_off_anywhere_is_refused(is_stream: bool) -> None:
    data = small_file(is_stream=is_stream)
    run = scan_of(shard_format("arrow")).run
    for size in range(len(data)):
        with pytest.raises(CorruptSample, match=r"shard a at byte \d+: ") as caught:
            run("a", io.BytesIO(data[:size]))
        assert 0 <= int(caught.value.facts["offset"]) <= size


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_flipped_bit_is_refused_or_stays_within_the_file(is_stream: bool) -> None:
    """Arrow has no checksums: what only changes values cannot be noticed."""
    data = small_file(is_stream=is_stream)
    run, num_refused = scan_of(shard_format("arrow")).run, 0
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << (place % 8)
        try:
            arrays = run("a", io.BytesIO(bytes(flipped)))
        except (CorruptSample, ConfigError):
            num_refused += 1
        else:
            check_chunks(arrays, len(data))
    assert num_refused > len(data) // 20


def test_what_is_no_range_of_bytes_is_refused_by_name() -> None:
    table = pa.table({"a": pa.array(["x", "y"]).dictionary_encode(), "b": [1, 2]})
    assert chunks_of(index_of([stored(table, 9)]))
    assert index_of([stored(table, 9)], columns=["b"]).num_samples == 2
    views = pa.table({"a": pa.array(["x"], pa.string_view()), "b": [1]})
    assert chunks_of(index_of([stored(views, 9)]))
    assert rows_of([stored(views, 9)], columns=["b"]) == [{"b": 1}]
    with pytest.raises(ConfigError, match="nulls among their elements"):
        index_of([stored(pa.table({"b": [[1, None]]}), 9)])
    with pytest.raises(ConfigError, match="is no column 'c'; the files have a, b"):
        index_of([stored(table, 9)], columns=["c"])
    first, second = (stored(pa.table({"b": values}), 9) for values in ([1], [1.0]))
    with pytest.raises(CorruptSample, match=r"001 does not fit: it has the columns b \(float64"):
        index_of([first, second])


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_record_batches_without_rows_are_passed_over(
    compression: str | None, *, is_stream: bool
) -> None:
    table = pa.table({"id": [1, 2], "more": [{"x": 3}, {"x": 4}]})
    sink, none = io.BytesIO(), pa.RecordBatch.from_pylist([], table.schema)
    make = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with make(sink, table.schema, options=options) as writer:
        for batch in (none, *table.to_batches(1), none):
            writer.write_batch(batch)
    shard = sink.getvalue()
    index = index_of([shard])
    assert index.num_samples == 2
    (decoded,) = decode_all([shard], index)
    extents = index.locate(np.arange(2))
    ends = (extents.start + extents.size).tolist()
    found = [
        [decoded[begin:end] for begin, end in zip(*places, strict=True)]
        for places in zip(extents.start.tolist(), ends, strict=True)
    ]
    assert found == [[b"\1" + bytes(7), b'{"x":3}'], [b"\2" + bytes(7), b'{"x":4}']]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_files_outside_of_the_table_are_refused(compression: str | None) -> None:
    """As the cache of `load_dataset("imagefolder")` has them."""
    files: list[Any] = [
        {"bytes": b"x", "path": "a.png"},
        {"bytes": None, "path": "/data/b.png"},
        None,
    ]
    shard = stored(pa.table({"image": pa.array(files, FILE)}), 9, compression=compression)
    with pytest.raises(CorruptSample, match=r"no bytes in row 1, only the path /data/b\.png"):
        index_of([shard])
    files[1] = {"bytes": None, "path": None}
    shard = stored(pa.table({"image": pa.array(files, FILE)}), 9, compression=compression)
    assert [spec.name for spec in index_of([shard]).fields] == ["image", "image.present"]


def test_a_folder_of_hugging_face_is_served(
    gyred: StartDaemon, s3_server: S3Server, tmp_path: Path
) -> None:
    """As `save_to_disk` writes it; equal to what `load_from_disk` reads."""
    import datasets  # seconds, for this test alone

    features = datasets.Features(
        {
            "image": datasets.Image(decode=False),
            "label": datasets.ClassLabel(names=["tern", "heron"]),
            "text": datasets.Value("string"),
        }
    )
    columns = {
        "image": [{"bytes": b"%d" % row * row, "path": None} for row in range(101)],
        "label": [row % 2 for row in range(101)],
        "text": [None if row % 7 == 0 else "ö" * row for row in range(101)],
    }
    datasets.disable_progress_bars()
    folder = tmp_path / "set"
    datasets.Dataset.from_dict(columns, features).save_to_disk(str(folder), num_shards=3)
    rows = list(datasets.load_from_disk(str(folder)))
    s3_server.make_bucket("arrow")
    for path in folder.iterdir():
        s3_server.put("arrow", f"set/{path.name}", path.read_bytes())
    tables: dict[str, Any] = {
        "local": {"uri": str(folder)},
        "s3": {"uri": "s3://arrow/set/", "storage": s3_server.storage_settings},
    }
    (tmp_path / "cut").mkdir()
    shard = next(folder.glob("*.arrow"))
    (tmp_path / "cut" / shard.name).write_bytes(shard.read_bytes()[:-100])
    tables["cut"] = {"uri": str(tmp_path / "cut"), "format": "arrow"}
    daemon = gyred({"datasets": tables})
    for name, order in (("local", "full"), ("s3", "full"), ("s3", "block")):
        seen = set()
        with Loader(
            name, batch_size=7, epochs=1, tail="pad", order=order, address=daemon.address
        ) as loader:
            assert loader.categories == {"label": ("tern", "heron")}
            assert loader.media_types == {"image": "image/*"}
            for batch in loader:
                for place, sample_id in enumerate(batch["sample_id"].tolist()):
                    row = rows[sample_id]
                    assert value(batch, "image", place) == row["image"]["bytes"]
                    assert batch["label"][place] == row["label"]
                    assert value(batch, "text", place).decode() == (row["text"] or "")
                    assert batch["text.present"][place] == (row["text"] is not None)
                    seen.add(sample_id)
        assert seen == set(range(101))
    with pytest.raises(RemoteCorruptSample, match=r"shard data-.*\.arrow at byte \d+: "):
        Loader("cut", batch_size=7, address=daemon.address)


def value(batch: Any, name: str, place: int) -> bytes:
    begin, end = batch[f"{name}.offsets"][place : place + 2].tolist()
    data: bytes = batch[name][begin:end].numpy().tobytes()
    return data
