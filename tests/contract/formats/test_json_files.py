"""JSON arrays, lone surrogates, and keys whose values differ between files."""

import io
import itertools
import json
from typing import Any, BinaryIO, cast

import numpy as np
import pytest
from gyre_daemon.datasets.formats import SampleIndex, jsonl, lines
from gyre_daemon.datasets.formats.base import Arrays, Format, Scan
from gyre_daemon.datasets.formats.chunk_index import chunks_of
from gyre_daemon.datasets.formats.values import check_json, without_surrogates
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.storage.shard import Shard
from hypothesis import example, given
from hypothesis import strategies as st

from tests.contract.formats.chunk_contract import decode_all
from tests.contract.formats.compressed_shards import compressed
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


@given(RECORDS, st.sampled_from([None, 1]), st.booleans())
def test_records_are_those_that_json_finds(
    records: list[Any], indent: int | None, escapes: bool
) -> None:
    data = b" \n" + json.dumps(records, indent=indent, ensure_ascii=escapes).encode() + b"\n"
    found = [data[start:stop] for start, stop in jsonl.array_bounds(data)]
    assert [json.loads(each) for each in found] == records


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
        bounds = jsonl.array_bounds(data)
    except ValueError:
        assert not is_array
        return
    found = [data[start:stop] for start, stop in bounds]
    try:
        assert [json.loads(each) for each in found] == (wanted if is_array else None) or not found
    except ValueError:
        assert not is_array


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b'[{"a": 1}, 5]', "record 2 of its array is no object"),
        (b'[{"a": 1} {"a": 2}]', "no JSON array of objects: .* expected ','"),
        (b'[{"a": 1},, {"a": 2}]', "no JSON array of objects"),
        (b'[{"a": 1},]', "no JSON array of objects: .* trailing comma"),
        (b'[{"a": 1}', "no JSON array of objects: .* truncated"),
        (b'[{"a": 1}]\n[{"a": 2}]', "no JSON array of objects: .* trailing characters"),
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


@pytest.mark.parametrize("wanted", [(), ("*",)])
def test_an_array_has_the_samples_of_the_same_lines(
    wanted: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "MIN_CHUNK_BYTES", 2000)
    monkeypatch.setattr(lines, "PIECE_BYTES", 999)
    dataset_format = shard_format("jsonl", columns=wanted)
    whole = b"\xef\xbb\xbf" + json.dumps(rows(300), indent=1).encode()
    as_lines = b"\n".join(json.dumps(row).encode() for row in rows(300))
    samples = []
    for name, data in (("a.json", whole), ("a.jsonl", as_lines)):
        index = dataset_format.assemble(
            [Shard(name, len(data), "1")], [inspected(dataset_format, data, name)]
        )
        samples.append(values_of(index, data))
    assert len(samples[0]) == 300
    assert samples[0] == samples[1]


@pytest.mark.parametrize("wanted", [(), ("*",)])
def test_arrays_that_are_compressed_or_too_large_are_refused(
    wanted: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "_MAX_ARRAY_BYTES", 100)
    dataset_format, data = shard_format("jsonl", columns=wanted), json.dumps(rows(9)).encode()
    with pytest.raises(CorruptSample, match=r"array has more than .*jq -c"):
        inspected(dataset_format, data)
    with pytest.raises(CorruptSample, match="JSON array that zstd compressed"):
        inspected(dataset_format, compressed(data), "a.json.zst")


def test_numbers_and_halves_of_characters_of_python_are_found_in_arrays() -> None:
    data = b'[{"a": NaN}, {"b": "\\ud800 NaN"}, {"c": [-Infinity]}]'
    found = [data[start:stop] for start, stop in jsonl.array_bounds(data)]
    assert found == [b'{"a": NaN}', b'{"b": "\\ud800 NaN"}', b'{"c": [-Infinity]}']


def values_of(index: SampleIndex, stored: bytes) -> list[Any]:
    """Each sample as its fields; documents are parsed."""

    data = b"".join(decode_all([stored], index)) if chunks_of(index) else stored
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
            r"line 2 .* it has a lone surrogate \(\\ud800\).*`surrogates = \"replace\"`",
        ),
        (r'{"a": ["\udc00"]}', r"it has a lone surrogate \(\\udc00\)"),
        (r'{"a\udfff": 1}', r"it has a lone surrogate \(\\udfff\)"),
        (r'{"a": "\udc00\ud800"}', r"it has a lone surrogate \(\\udc00\)"),
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
    data, name = f'{{"n": 1, "a": {one}}}\n{{"n": 1, "a": {other}}}\n'.encode(), "0.jsonl"

    def index(**options: Any) -> SampleIndex:
        form = shard_format("jsonl", columns=("*",), **options)
        return form.assemble([Shard(name, len(data), "1")], [inspected(form, data, name)])

    try:
        assert index().num_samples == 2
    except CorruptSample as error:
        kind = str(error).partition('`types = {a = "')[2].partition('"')[0]
        assert index(types={"a": kind}).num_samples == 2


@pytest.mark.parametrize("other", ['{"a": 0.5}', '{"b": 1}'])
def test_files_whose_keys_differ_are_refused_with_the_options(other: str) -> None:
    form = shard_format("jsonl", columns=("*",))
    files = [b'{"a": 1}\n', other.encode()]
    listed = [Shard(f"{at}.jsonl", len(data), "1") for at, data in enumerate(files)]
    with pytest.raises(CorruptSample, match=r"1\.jsonl does not fit: .*`types` .*schema ="):
        form.assemble(listed, [inspected(form, data, "0.jsonl") for data in files])
