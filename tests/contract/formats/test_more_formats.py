"""The formats of lines, tables, records and arrays under the contract, and what each refuses."""

import csv
import io
import json
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from gyre_daemon.datasets.codecs import CODECS
from gyre_daemon.datasets.formats import lines as lines_scan
from gyre_daemon.errors import ConfigError, CorruptSample
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.loader.mosaic import streaming
from tests.contract.formats.format_contract import FormatContract, Sample, inspect, listed
from tests.shard_formats import shard_format


class TestText(FormatContract):
    name = "text"
    options: ClassVar = {}

    def shards(self) -> tuple[list[bytes], list[Sample]]:
        shards = [
            b"one\ntwo\r\n\n",
            "drei\nvier fünf\n".encode(),
            b"\xef\xbb\xbflast, without an end",
        ]
        lines = ["one", "two", "", "drei", "vier fünf", "last, without an end"]
        return shards, [{"text": line.encode()} for line in lines]

    def empty_shard(self) -> bytes:
        return b""

    def damaged_shard(self) -> bytes:
        return b"\xff\xff\n"


class TestJsonl(FormatContract):
    name = "jsonl"
    options: ClassVar = {}

    def shards(self) -> tuple[list[bytes], list[Sample]]:
        generator = np.random.default_rng(0)
        documents = [
            [
                {"id": number, "text": "wörd " * int(generator.integers(40))}
                for number in range(count)
            ]
            for count in (20, 1, 35)
        ]
        lines = [[json.dumps(each).encode() for each in its] for its in documents]
        shards = [b"\n".join(its) + b"\n\n" for its in lines]
        return shards, [{"json": line} for its in lines for line in its]

    def empty_shard(self) -> bytes:
        return b"\n\n"

    def damaged_shard(self) -> bytes:
        return b'{"a": \n'


class TestCsv(FormatContract):
    name = "csv"
    options: ClassVar = {"columns": ["text", "label=class"], "types": {"class": "int64"}}

    def shards(self) -> tuple[list[bytes], list[Sample]]:
        generator = np.random.default_rng(0)
        shards, samples = [], []
        for count in (20, 1, 35):
            file = io.StringIO(newline="")
            writer = csv.writer(file)
            writer.writerow(["class", "text", "other"])
            for number in range(count):
                text = "a,b\n" * int(generator.integers(9)) + "x"
                writer.writerow([number, text, "no"])
                samples.append({"text": text.encode(), "label": b"%d" % number})
            shards.append(file.getvalue().encode())
        return shards, list(samples)

    def empty_shard(self) -> bytes:
        return b"class,text,other\n"

    def damaged_shard(self) -> bytes:
        return b'class,text,other\n1,"no end\n'


class TestUnionOfTables(TestCsv):
    """The columns of the second and third shard are in another order."""

    options: ClassVar = {**TestCsv.options, "schema": "union"}

    def shards(self) -> tuple[list[bytes], list[Sample]]:
        shards, samples = super().shards()
        return [shards[0], *map(_with_other_order, shards[1:])], samples


def _with_other_order(table: bytes) -> bytes:
    rows, written = list(csv.reader(io.StringIO(table.decode(), newline=""))), io.StringIO()
    csv.writer(written).writerows(reversed(row) for row in rows)
    return written.getvalue().encode()


class TestMds(FormatContract):
    name = "mds"
    options: ClassVar = {"columns": ["id", "image", "tokens"]}

    def shards(self) -> tuple[list[bytes], list[Sample]]:
        generator = np.random.default_rng(0)
        shards, samples = [], []
        for count in (20, 1, 35):
            rows: list[dict[str, Any]] = [
                {
                    "id": number,
                    "image": generator.bytes(int(generator.integers(900))),
                    "text": "fünf " * number,
                    "tokens": generator.integers(0, 99, (2, 3), np.int32),
                }
                for number in range(count)
            ]
            shards.append(mds_shard(rows))
            samples += [
                {
                    "id": np.int64(row["id"]).tobytes(),
                    "image": row["image"],
                    "tokens": row["tokens"].tobytes(),
                }
                for row in rows
            ]
        return shards, list(samples)

    def empty_shard(self) -> bytes:
        return mds_shard([])

    def damaged_shard(self) -> bytes:
        return self.shards()[0][0][:-1]


def mds_shard(rows: list[dict[str, Any]]) -> bytes:
    """One shard by the library's own writer, which makes none without a sample."""
    columns = {"id": "int", "image": "bytes", "text": "str", "tokens": "ndarray:int32:2,3"}
    with tempfile.TemporaryDirectory() as folder:
        with streaming.MDSWriter(out=f"{folder}/set", columns=columns, size_limit=None) as writer:
            for row in rows:
                writer.write(row)
            if not rows:
                return bytes(writer.encode_joint_shard())
        (shard,) = Path(folder, "set").glob("*.mds")
        return shard.read_bytes()


class TestNpy(FormatContract):
    name = "npy"
    options: ClassVar = {"field": "image"}

    def shards(self) -> tuple[list[bytes], list[Sample]]:
        generator = np.random.default_rng(0)
        arrays = [generator.random((count, 3, 2), np.float32) for count in (500, 1, 60)]
        return [npy(array) for array in arrays], [
            {"image": row.tobytes()} for array in arrays for row in array
        ]

    def empty_shard(self) -> bytes:
        return npy(np.empty((0, 3, 2), np.float32))

    def damaged_shard(self) -> bytes:
        return npy(np.zeros((3, 3, 2), np.float32))[:-1]


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


class TestTfrecord(FormatContract):
    name = "tfrecord"
    options: ClassVar = {}

    def shards(self) -> tuple[list[bytes], list[Sample]]:
        generator = np.random.default_rng(0)
        records = [
            [generator.bytes(int(generator.integers(900))) for _ in range(count)]
            for count in (20, 1, 35)
        ]
        return [tfrecord(its) for its in records], [
            {"record": record} for its in records for record in its
        ]

    def empty_shard(self) -> bytes:
        return b""

    def damaged_shard(self) -> bytes:
        return tfrecord([b"one", b"two"])[:-1]


def tfrecord(records: list[bytes]) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    stream = io.BytesIO()
    writer = RecordWriter(stream)
    for record in records:
        writer.write(record)
    return stream.getvalue()


@given(st.binary(max_size=60), st.integers(1, 9))
def test_lines_are_those_of_the_whole_file_in_chunks_of_any_size(data: bytes, size: int) -> None:
    data = data.replace(b"\x00", b"\n").replace(b"\x01", b"\r")
    before, lines_scan.PIECE_BYTES = lines_scan.PIECE_BYTES, size
    try:
        scan = lines_scan.scan_lines(io.BytesIO(data), lambda line: None)
    finally:
        lines_scan.PIECE_BYTES = before
    places = zip(scan["start"].tolist(), scan["size"].tolist(), strict=True)
    found = [data[start : start + size] for start, size in places]
    text = data.removeprefix(b"\xef\xbb\xbf")
    wanted = [line.removesuffix(b"\r") for line in text.split(b"\n")[:-1]]
    rest = text.rpartition(b"\n")[2]
    assert found == wanted + [rest] * (rest != b"")


CELLS = st.text(st.sampled_from('ab,"\n\r\tü '), max_size=6)


@given(
    st.integers(2, 4).flatmap(
        lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n), min_size=1)
    ),
    st.integers(1, 40),
    st.sampled_from(["csv", "tsv"]),
    st.booleans(),
)
def test_cells_are_those_that_the_standard_library_wrote(
    rows: list[list[str]], chunk_bytes: int, name: str, quote_all: bool
) -> None:
    delimiter = {"csv": ",", "tsv": "\t"}[name]
    file = io.StringIO(newline="")
    quoting: Literal[0, 1] = csv.QUOTE_ALL if quote_all else csv.QUOTE_MINIMAL
    writer = csv.writer(file, delimiter=delimiter, quoting=quoting)
    names = [f"column {number}" for number in range(len(rows[0]))]
    writer.writerows([names, *rows])
    data = file.getvalue().encode()
    table = shard_format(name)
    before, lines_scan.PIECE_BYTES = lines_scan.PIECE_BYTES, chunk_bytes
    try:
        index = table.assemble(listed([data]), inspect(table, [data]))
    finally:
        lines_scan.PIECE_BYTES = before
    extents = index.locate(np.arange(index.num_samples))
    found = []
    for start, size, length in zip(extents.start, extents.size, extents.tensor_bytes, strict=True):
        row = []
        for spec, begin, stored, bytes_ in zip(index.fields, start, size, length, strict=True):
            cell = bytearray(data[begin : begin + stored])
            codec = CODECS[spec.codec]
            if codec.scratch_bytes:
                target = bytearray(int(bytes_))
                assert codec.finish
                codec.finish(spec, memoryview(cell), memoryview(target))
                cell = target
            row.append(cell.decode())
        found.append(row)
    assert [spec.name for spec in index.fields] == names
    assert found == rows


REFUSED: list[tuple[str, bytes, str]] = [
    ("csv", b"a,b\n1,2,3\n", "byte 4: a record has 3 cells, and there are 2 columns"),
    ("csv", b"a,a\n1,2\n", "two columns have the name 'a'"),
    ("csv", b'a,b\n1,2\n1,x"y"\n', "byte 10: a cell has a quote but is not wholly quoted"),
    ("csv", b'a,b\n1,"2\n3,4\n', "has a quote without a second one"),
    ("csv", b"a,b\r1,2\r3,4\r", "ends with a carriage return alone"),
    ("npy", npy(np.array(3.0)), "its array has no dim"),
    ("npy", npy(np.zeros((2, 0))), "its rows have no elements"),
    ("npy", npy(np.zeros((2, 1), ">f4")), "big-endian"),
    ("npy", npy(np.array(["text"])), "is no tensor"),
    ("tfrecord", b"\x80\x02}q\x00." * 9, "byte 0: record 0 has a length whose checksum differs"),
    ("mds", b"\xff" * 200, "declares 4294967295 samples"),
    ("jsonl", b"\x89PNG\r\n", "its first line does not fit the format"),
]


@pytest.mark.parametrize(("name", "data", "text"), REFUSED)
def test_a_file_that_is_no_such_file_is_refused(name: str, data: bytes, text: str) -> None:
    check_refused(name, data, text)


def test_shards_that_are_damaged_or_cut_off_are_refused() -> None:
    check_refused("mds", mds_shard([])[:9], "cut off")
    damaged = tfrecord([b"one"]).replace(b"one", b"onf")
    check_refused("tfrecord", damaged, "bytes whose checksum differs")
    check_refused("tfrecord", tfrecord([b"one", b"two"])[:-8], "byte 19: record 1 is cut off")


def check_refused(name: str, data: bytes, text: str) -> None:
    form = shard_format(name)
    with pytest.raises(CorruptSample, match=text):
        form.assemble(listed([data]), inspect(form, [data]))


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("csv", {"columns": ["c"]}, "there is no column 'c'; the files have a, b"),
        ("csv", {"types": {"c": "int64"}}, "there is no column 'c'"),
        ("csv", {"types": {"a": "int8"}}, "must be one of text, int64, float64"),
        ("csv", {"columns": ["sample_id=a"]}, "no field can have the name 'sample_id'"),
        ("csv", {"columns": ["a", "a"]}, "twice"),
        ("csv", {"delimiter": "ab"}, "one character"),
        ("npy", {"field": "x.offsets"}, "no field can have the name"),
    ],
)
def test_options_that_do_not_fit_are_refused(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        form = shard_format(name, **options)
        form.assemble(listed([b"a,b\n1,2\n"]), inspect(form, [b"a,b\n1,2\n"]))


def test_shards_with_other_columns_are_refused() -> None:
    form, shards = shard_format("csv"), [b"a,b\n1,2\n", b"a,c\n1,2\n"]
    with pytest.raises(CorruptSample, match=r"001 does not fit: it has the columns \['a', 'c'\]"):
        form.assemble(listed(shards), inspect(form, shards))
