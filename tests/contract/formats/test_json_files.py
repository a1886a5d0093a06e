"""JSON arrays, lone surrogates, and keys whose values differ between files."""

import io
import itertools
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import numpy as np
import pytest
from gyre_daemon.datasets.formats import SampleIndex
from gyre_daemon.datasets.formats.base import Arrays, Format, Scan
from gyre_daemon.datasets.formats.indexes.chunk_index import ChunkIndex
from gyre_daemon.datasets.formats.indexes.chunks import DamagedPart
from gyre_daemon.datasets.formats.lines import array, columns, frames, scan
from gyre_daemon.datasets.formats.values import check_json, without_surrogates
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.storage.shard import Shard
from hypothesis import example, given
from hypothesis import strategies as st

from tests.contract.formats.chunk_contract import decode_all
from tests.contract.formats.compressed_shards import compressed, seekable
from tests.shard_formats import shard_format

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab"\\{}[],é\n:', max_size=5),
    lambda its: st.lists(its, max_size=3) | st.dictionaries(st.text('a"\\{', max_size=2), its),
    max_leaves=6,
)
RECORDS = st.lists(st.dictionaries(st.text('ab"\\{}[],é', max_size=3), VALUES, max_size=3))


def inspected(dataset_format: Format, data: bytes, name: str = "a.json") -> Arrays:
    inspection = dataset_format.inspection
    assert isinstance(inspection, Scan)
    found = inspection.run(name, cast("BinaryIO", io.BytesIO(data)))
    inspection.check(found, len(data))
    return found


def found_in(data: bytes) -> list[bytes]:
    table = array.scan_array(cast("BinaryIO", io.BytesIO(data)), lambda _: None)
    pairs = zip(table["start"].tolist(), table["size"].tolist(), strict=True)
    return [data[start : start + size] for start, size in pairs]


@given(RECORDS, st.sampled_from([None, 1]), st.booleans(), st.sampled_from([1, 2, 3, 7, 1000]))
def test_records_are_those_that_json_finds(
    records: list[Any], indent: int | None, escapes: bool, piece_bytes: int
) -> None:
    data = json.dumps(records, indent=indent, ensure_ascii=escapes).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "PIECE_BYTES", piece_bytes)
        assert [json.loads(each) for each in found_in(b" \n" + data + b"\n")] == records


@given(RECORDS, st.integers(0), st.sampled_from(["", *',{}[]"\\5 ']), st.booleans())
@example([{}], 3, "}", True)
def test_what_is_no_array_of_objects_is_refused_or_has_a_record_that_is_no_json(
    records: list[Any], place: int, letter: str, replaces: bool
) -> None:
    data = json.dumps(records).encode()
    place %= len(data)
    data = data[:place] + letter.encode() + data[place + replaces :]
    try:
        wanted: Any = json.loads(data)
    except ValueError:
        wanted = None
    is_array = isinstance(wanted, list) and all(isinstance(each, dict) for each in wanted)
    try:
        found = found_in(data)
    except DamagedPart:
        assert not is_array
        return
    try:
        assert [json.loads(each) for each in found] == (wanted if is_array else None) or not found
    except ValueError:
        assert not is_array


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b'[{"a": 1}, 5]', "record 2 of its array is no object"),
        (b'[{"a": 1} {"a": 2}]', "one comma between records .record 1 is followed by 0"),
        (b'[{"a": 1},, {"a": 2}]', "record 1 is followed by 2"),
        (b'[{"a": 1},]', "record 1 is followed by 1"),
        (b'[{"a": 1}', "does not end after record 1: it is cut off"),
        (b'[{"a": 1}]\n[{"a": 2}]', r"more follows .* name the file `\.jsonl`"),
        (b'{"data": [{"a": 1}]}', r"one JSON object.*Its key \"data\" has an array.*jq"),
        (b'{\n "data": [\n {"a": 1}]\n}', r"one JSON object.*Its key \"data\" has an array.*jq"),
        (b'{"num_samples": 2}', 'one JSON object.*serve whole files: format="files"'),
        (b'{\n "num_samples": 2\n}', "one JSON object.*by a pattern"),
    ],
)
@pytest.mark.parametrize("wanted", [(), ("*",)])
def test_files_of_json_without_records_are_refused(
    wanted: tuple[str, ...], data: bytes, sentence: str
) -> None:
    with pytest.raises(CorruptSample, match=sentence):
        inspected(shard_format("jsonl", columns=wanted), data)


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"a": number, "b": 'w"ö[]{}\n' * (number % 50), "c": [number]} for number in range(count)
    ]


@pytest.mark.parametrize("pack", [bytes, compressed, lambda data: seekable(data, 700)])
@pytest.mark.parametrize("wanted", [(), ("*",)])
def test_an_array_has_the_samples_of_the_same_lines(
    wanted: tuple[str, ...], pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "_MIN_CHUNK_BYTES", 2000)
    monkeypatch.setattr(frames, "_MIN_CHUNK_BYTES", 2000)
    monkeypatch.setattr(scan, "PIECE_BYTES", 999)
    monkeypatch.setattr(array, "PIECE_BYTES", 999)
    dataset_format = shard_format("jsonl", columns=wanted)
    whole = json.dumps(rows(300), indent=1).encode()
    lines = b"\n".join(json.dumps(row).encode() for row in rows(300))
    suffix = "" if pack is bytes else ".zst"
    samples = []
    for name, data in (("a.json", whole), ("a.jsonl", lines)):
        stored = pack(data)
        found = inspected(dataset_format, stored, name + suffix)
        index = dataset_format.assemble([Shard(name, len(stored), "1")], [found])
        samples.append(values_of(index, stored))
    assert len(samples[0]) == 300
    assert samples[0] == samples[1]


def values_of(index: SampleIndex, stored: bytes) -> list[Any]:
    """Each sample as its fields; documents are parsed."""

    data = b"".join(decode_all([stored], index)) if isinstance(index, ChunkIndex) else stored
    its = index.locate(np.arange(index.num_samples))
    samples = [
        [data[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        for starts, sizes in zip(its.start.tolist(), its.size.tolist(), strict=True)
    ]
    is_document = [spec.codec == "json" for spec in index.fields]
    return [
        [
            json.loads(value) if parse else value
            for value, parse in zip(row, is_document, strict=False)
        ]
        for row in samples
    ]


class _Endless(io.RawIOBase):
    """An array of many records, none of which is kept."""

    def __init__(self, num_bytes: int) -> None:
        self._pieces = self._make(num_bytes)

    @staticmethod
    def _make(num_bytes: int) -> Iterator[bytes]:
        record = b'{"instruction": "do \\"it\\"", "input": [{"a": 2}], "output": "%s"}' % (
            b"x" * 9000
        )
        piece = b",\n".join([record] * 400)
        yield b"[" + piece
        for _ in range(num_bytes // len(piece)):
            yield b"," + piece
        yield b"]"

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return next(self._pieces, b"")


def test_a_large_array_is_scanned_in_the_memory_of_a_piece() -> None:
    """300 MB; the peak is the same for any size, but for 16 bytes of each record."""
    tracemalloc.start()
    try:
        found = array.scan_array(cast("BinaryIO", _Endless(300 << 20)), lambda _: None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(found["size"]) > 30_000
    assert peak < 100 << 20


@pytest.mark.parametrize("data", [b'[{"a": 1}, {"a": 2}]\n', b'[\n {"a": 1},\n {"a": 2}\n]'])
@pytest.mark.parametrize("wanted", [(), ("*",)])
def test_an_array_in_a_file_of_lines_is_refused(wanted: tuple[str, ...], data: bytes) -> None:
    dataset_format = shard_format("jsonl", columns=wanted)
    with pytest.raises(CorruptSample, match=r"one JSON array of records, name it `\.json`"):
        found = inspected(dataset_format, data, "a.jsonl")
        dataset_format.assemble([Shard("a.jsonl", len(data), "1")], [found])


def test_lines_may_be_arrays() -> None:
    dataset_format = shard_format("jsonl")
    data = b'[{"a": 1}]\n[{"a": 2}]\n'
    found = inspected(dataset_format, data, "a.jsonl")
    assert dataset_format.assemble([Shard("a.jsonl", len(data), "1")], [found]).num_samples == 2


@pytest.mark.parametrize("line", ['{"a": NaN}', '{"a": [1, -Infinity]}', '{"a": {"b": Infinity}}'])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_numbers_that_only_python_writes_are_named(name: str, line: str) -> None:
    dataset_format = shard_format("jsonl", columns=["*"])
    lines = ['{"a": 1}', line]
    data = ("\n".join(lines) if name == "a.jsonl" else f"[{','.join(lines)}]").encode()
    with pytest.raises(CorruptSample, match=r"JSON has no (NaN|-?Infinity)\. Write null"):
        found = inspected(dataset_format, data, name)
        dataset_format.assemble([Shard(name, len(data), "1")], [found])


@pytest.mark.parametrize("data", [b'{"a": null}\n{"a": null}\n', b"{}\n{}\n", b'[{"a": null}]'])
@pytest.mark.parametrize("schema", ["equal", "union"])
def test_objects_without_values_are_refused(schema: str, data: bytes) -> None:
    dataset_format = shard_format("jsonl", columns=["*"], schema=schema)
    listed = [Shard(f"{at}.json", len(data), "1") for at in range(2)]
    with pytest.raises(ConfigError, match="no key of the objects has a value other than null"):
        dataset_format.assemble(listed, [inspected(dataset_format, data, "0.json")] * 2)


LONE = r'{"a": "ok", "b": "x\ud800y"}'


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            LONE,
            r"line 2 .*the key 'b' has a lone surrogate \(\\ud800\).*`surrogates = \"replace\"`",
        ),
        (r'{"a": ["\udc00"]}', r"the key 'a' has a lone surrogate \(\\udc00\)"),
        (r'{"a\udfff": 1}', r"a key has a lone surrogate \(\\udfff\)"),
        (r'{"a": "\udc00\ud800"}', r"the key 'a' has a lone surrogate \(\\udc00\)"),
    ],
)
def test_a_lone_surrogate_is_named(line: str, sentence: str) -> None:
    dataset_format = shard_format("jsonl", columns=["*"])
    data = f'{{"a": "ok"}}\n{line}\n'.encode()
    with pytest.raises(CorruptSample, match=sentence):
        found = inspected(dataset_format, data, "a.jsonl")
        dataset_format.assemble([Shard("a.jsonl", len(data), "1")], [found])


def test_a_lone_surrogate_is_replaced_if_that_is_declared() -> None:
    dataset_format = shard_format("jsonl", columns=["a", "b"], surrogates="replace")
    data = f'{LONE}\n{{"a": "\\ud83d\\ude00", "b": "\\\\\\\\ud800"}}\n'.encode()
    found = inspected(dataset_format, data, "a.jsonl")
    index = dataset_format.assemble([Shard("a.jsonl", len(data), "1")], [found])
    assert values_of(index, data) == [
        [b"ok", "x\ufffdy".encode()],
        ["\U0001f600".encode(), b"\\\\ud800"],
    ]
    plain = shard_format("jsonl", columns=["a", "b"])
    ok = b'{"a": "ok", "b": "b"}\n'
    one, other = (
        each.assemble([Shard("a.jsonl", len(ok), "1")], [inspected(each, ok, "a.jsonl")])
        for each in (plain, dataset_format)
    )
    assert one.digest() != other.digest()


def test_documents_with_a_lone_surrogate_are_served_as_they_are() -> None:
    check_json(LONE.encode())
    check_json(json.dumps({"a": "\ud800", "b": list(range(30_000))}).encode())
    assert (
        without_surrogates(rb'"\\ud800 \ud800\udc00 \ud800"') == rb'"\\ud800 \ud800\udc00 \ufffd"'
    )


KINDS = ("null", "[]", "1", "0.5", '"x"', "true", "{}", "[1]", '["x"]', "[0.5]")


@pytest.mark.parametrize(("one", "other"), [*itertools.permutations(KINDS, 2)])
def test_the_option_that_an_error_names_serves_keys_of_two_kinds(one: str, other: str) -> None:
    """Across two files, and within one."""
    files = [f'{{"n": 1, "a": {value}}}\n'.encode() for value in (one, other)]
    for shards in (files, [b"".join(files)]):
        options: dict[str, Any] = {"columns": ("*",)}
        for _ in range(3):
            dataset_format = shard_format("jsonl", **options)
            listed = [Shard(f"{at}.jsonl", len(data), "1") for at, data in enumerate(shards)]
            try:
                found = [inspected(dataset_format, data, "0.jsonl") for data in shards]
                index = dataset_format.assemble(listed, found)
                break
            except CorruptSample as error:
                message = str(error)
            if "`types = " in message:
                kind = message.partition('`types = {a = "')[2].partition('"')[0]
                assert "types" not in options
                options["types"] = {"a": kind}
            if '`schema = "union"`' in message:
                assert "schema" not in options
                options["schema"] = "union"
            assert len(options) > 1, message
        else:
            raise AssertionError(message)
        assert index.num_samples == 2
        if not {one, other} - {"1", "0.5"}:
            assert options.get("types", {}) in ({}, {"a": "float64"})
