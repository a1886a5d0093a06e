"""The keys of JSON lines as columns: under the contract of chunks, and as `json` reads them."""

import json
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from gyre_daemon.datasets.formats import jsonl
from gyre_daemon.datasets.formats import lines as lines_format
from gyre_daemon.datasets.formats.base import PRESENT_SUFFIX, FieldSpec, TolerantFormat
from gyre_daemon.datasets.formats.chunk_index import ChunkIndex, DamagedPart
from gyre_daemon.errors import ConfigError, CorruptSample
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.formats.chunk_contract import ChunkContract, decode_all
from tests.contract.formats.compressed_shards import compressed, seekable
from tests.contract.formats.format_contract import Sample, inspect, listed
from tests.shard_formats import shard_format


def documents(count: int) -> list[dict[str, Any]]:
    generator = np.random.default_rng(count)
    return [
        {
            "other": {"a": number},
            "class": number,
            "text": 'wörd\n"' * int(generator.integers(60)),
            "tokens": [0.5, *range(int(generator.integers(4)))],
            "tags": ["a", number],
        }
        for number in range(count)
    ]


def lines(rows: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


class TestJsonColumns(ChunkContract):
    """A line is damaged without notice where it is JSON still."""

    name = "jsonl"
    options: ClassVar = {"columns": ["label=class", "text", "tokens", "tags"]}
    has_checksums = False

    def shards(self) -> tuple[list[bytes], list[Sample]]:
        rows = [documents(count) for count in (40, 1, 35)]
        shards = [
            b"\xef\xbb\xbf" + lines(rows[0]).replace(b"\n", b"\r\n\n"),
            lines(rows[1])[:-1],
            lines(rows[2]),
        ]
        return shards, [
            {
                "label": np.int64(row["class"]).tobytes(),
                "text": row["text"].encode(),
                "tokens": np.array(row["tokens"], np.float64).tobytes(),
                "tags": json.dumps(row["tags"]).encode(),
            }
            for its in rows
            for row in its
        ]

    def empty_shard(self) -> bytes:
        return b"\n\n"

    def damaged_shard(self) -> bytes:
        return b'{"class": 1'

    def test_shards_that_are_cut_off_are_named(self) -> None:
        data = self.shards()[0][0]
        with pytest.raises(CorruptSample, match=r"shard 000: block of lines \d+ \(at byte \d+\)"):
            self.index([data[: len(data) // 3]])

    @pytest.fixture(autouse=True)
    def _small_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(jsonl, "MIN_CHUNK_BYTES", 2000)
        monkeypatch.setattr(lines_format, "MIN_BLOCK_BYTES", 2000)


class TestCompressedJsonColumns(TestJsonColumns):
    has_checksums = True
    test_shards_that_are_cut_off_are_named = ChunkContract.test_shards_that_are_cut_off_are_named

    def shards(self) -> tuple[list[bytes], list[Sample]]:
        shards, samples = super().shards()
        return [seekable(shards[0]), compressed(shards[1]), seekable(shards[2], 700)], samples

    def damaged_shard(self) -> bytes:
        return self.shards()[0][0][:-30]


def served(shards: Sequence[bytes], **options: Any) -> tuple[Sequence[FieldSpec], list[list[Any]]]:
    """The fields, and for each sample its values as Python has them; None if it lacks one.

    JSON is `null` then, which Python reads as None.
    """
    form = shard_format("jsonl", **{"columns": ["*"], **options})
    index = form.assemble(listed(shards), inspect(form, shards))
    decoded = decode_all(shards, index)
    extents = index.locate(np.arange(index.num_samples))
    stored = [spec for spec in index.fields if spec.codec != "indexed"]
    names = [spec.name for spec in index.fields if spec.codec == "indexed"]
    rows = []
    for row in range(index.num_samples):
        values = []
        for place, spec in enumerate(stored):
            start = int(extents.start[row, place])
            raw = decoded[extents.shard[row]][start : start + int(extents.size[row, place])]
            name = spec.name + PRESENT_SUFFIX
            has = name not in names or extents.indexed[names.index(name)][row]
            values.append(_value(spec, raw) if has or spec.codec == "json" else None)
        rows.append(values)
    return stored, rows


def _value(spec: FieldSpec, raw: bytes) -> Any:
    if spec.codec in ("json", "text"):
        return json.loads(raw) if spec.codec == "json" else raw.decode()
    numbers = np.frombuffer(raw, spec.dtype).tolist()
    return numbers if spec.ragged else numbers[0]


KINDS: dict[str, st.SearchStrategy[Any]] = {
    "integers": st.integers(-(1 << 63), (1 << 63) - 1),
    "floats": st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers(-9, 9)),
    "bools": st.booleans(),
    "texts": st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    "lists": st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=3),
    "documents": st.one_of(
        st.lists(st.text("ab", max_size=2), max_size=3),
        st.dictionaries(st.sampled_from("ab"), st.none(), max_size=2),
    ),
}


@st.composite
def tables(draw: st.DrawFn) -> list[dict[str, Any]]:
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4, unique=True))
    one = st.fixed_dictionaries(
        {}, optional={kind: st.one_of(st.none(), KINDS[kind]) for kind in kinds}
    )
    return draw(st.lists(one, min_size=1, max_size=12))


@given(rows=tables(), ascii_only=st.booleans(), chunk_bytes=st.sampled_from([1, 40, 1 << 16]))
def test_values_are_those_of_json(
    rows: list[dict[str, Any]], ascii_only: bool, chunk_bytes: int
) -> None:
    """Also where the first lines know less of a column than the last."""
    shard = b"\n".join(json.dumps(row, ensure_ascii=ascii_only).encode() for row in rows)
    names = sorted({key for row in rows for key, value in row.items() if value is not None})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "MIN_CHUNK_BYTES", chunk_bytes)
        if not names:
            with pytest.raises(ConfigError, match="no key of the objects has a value"):
                served([shard])
            return
        fields, found = served([shard])
    assert [spec.name for spec in fields] == names
    assert found == [[row.get(name) for name in names] for row in rows]


@pytest.mark.parametrize(
    ("data", "offset", "reason"),
    [
        (b'{"a": 1}\n[1]', 9, r"line 2 is no JSON object"),
        (b'{"a": 1}\n{"a": NaN}', 9, r"line 2 is no JSON object"),
        (b'{"a": 1}\n\r\n{"a": "x"}', 11, r"'a' has an integer in line 1, text in line 3, .* JSON"),
        (b'{"a": [1]}\n{"a": ["x"]}', 11, r"a list of integers in line 1, an object or another"),
        (
            b'\n{"a": 12345678901234567890}',
            1,
            "line 2: .* does not fit into int64. Set `types`",
        ),
        (b'{"a": 1}\n{"a": [12345678901234567890]}', 9, "line 2: .* does not fit into int64"),
        (b'\xef\xbb\xbf\n{"a": 1e400}', 4, "line 2: .* out of range"),
        (b'{"a": [1e400]}', 0, "out of range"),
    ],
)
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 16])
@pytest.mark.parametrize("is_compressed", [False, True])
def test_lines_that_do_not_fit_are_named(
    data: bytes,
    offset: int,
    reason: str,
    chunk_bytes: int,
    is_compressed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the byte at which they begin; in a compressed file, that at which their frame does."""
    monkeypatch.setattr(jsonl, "MIN_CHUNK_BYTES", chunk_bytes)
    with pytest.raises(CorruptSample, match=f"shard 000.*{reason}") as caught:
        served([compressed(data) if is_compressed else data])
    assert caught.value.facts["offset"] == str(0 if is_compressed else offset)


@pytest.mark.parametrize("is_compressed", [False, True])
def test_a_line_that_is_damaged_after_it_was_indexed_is_named(is_compressed: bool) -> None:
    """By what lint and jobs decode with; the first frame has the first line."""
    form = shard_format("jsonl", columns=["*"])
    whole = [b'\n{"a": 1}\n', b'{"a": 2}\r\n\n{"a": 3}\n']

    def shard(*parts: bytes) -> bytes:
        return b"".join(compressed(part) for part in parts) if is_compressed else b"".join(parts)

    data = shard(*whole)
    index = form.assemble(listed([data]), inspect(form, [data]))
    assert isinstance(index, ChunkIndex)
    damaged = shard(whole[0], whole[1].replace(b"3}", b"3]"))
    with pytest.raises(DamagedPart, match=r"line 5 is no JSON object") as caught:
        decode_all([damaged], index)
    assert caught.value.offset == (0 if is_compressed else damaged.index(b'{"a": 3]'))


def test_integers_of_any_size_are_served_as_json() -> None:
    rows = [{"a": 10**30, "b": [1, -(10**30)]}, {"a": 1, "b": [2]}]
    _, found = served([lines(rows)], types={"a": "json", "b": "json"})
    assert found == [[row["a"], row["b"]] for row in rows]


def test_types_decide_where_values_do_not() -> None:
    rows = [{"a": 1, "b": "x"}, {"a": 2, "b": [1]}]
    fields, found = served([lines(rows)], types={"a": "float64", "b": "json"})
    assert [spec.dtype.str for spec in fields] == ["<f8", "|u1"]
    assert found == [[1.0, "x"], [2.0, [1]]]
    with pytest.raises(CorruptSample, match=r"an integer in line 1, and `types` has text"):
        served([lines(rows)], types={"a": "text", "b": "json"})


def test_other_columns_in_another_shard_are_shown_or_joined() -> None:
    shards = [lines([{"a": 1, "b": "x"}]), lines([{"a": 2}])]
    with pytest.raises(
        CorruptSample, match=r"001 does not fit: it has the columns a .*`schema = \"union\"`"
    ):
        served(shards)
    form = shard_format("jsonl", columns=["*"], schema="union", defaults={"b": "none"})
    index = form.assemble(listed(shards), inspect(form, shards))
    assert [spec.name for spec in index.fields] == ["a", "b", "b.present"]


@pytest.mark.parametrize("schema", ["equal", "union"])
def test_a_key_may_come_first_in_any_line(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MIN_CHUNK_BYTES", 1)
    rows: list[dict[str, Any]] = [{"a": 1, "c": 9}, {"a": 2}, {"a": 3, "b": 4}, {"a": 5, "b": 6}]
    fields, found = served([lines(rows)], columns=["a", "b"], schema=schema)
    assert [spec.name for spec in fields] == ["a", "b"]
    assert found == [[1, None], [2, None], [3, 4], [5, 6]]
    typed = served([lines(rows)], columns=["a", "b"], types={"b": "float64"}, schema=schema)[1]
    assert typed == [[1, None], [2, None], [3, 4.0], [5, 6.0]]


def test_a_key_may_be_two_fields() -> None:
    fields, found = served([lines([{"a": 1}, {"a": 2}])], columns=["x=a", "y=a"])
    assert [spec.name for spec in fields] == ["x", "y"]
    assert found == [[1, 1], [2, 2]]


def test_a_block_that_cannot_be_parsed_is_kept_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jsonl, "MIN_CHUNK_BYTES", 1)
    form = shard_format("jsonl", columns=["a"])
    assert isinstance(form, TolerantFormat)
    shards = [b'{"a": 1}\n{"a": \n{"a": 3}\n']
    scans = inspect(form, shards)
    with pytest.raises(CorruptSample, match=r"block of lines 1 \(at byte 9\) .* line 2"):
        form.assemble(listed(shards), scans)
    assert form.assemble_tolerantly(listed(shards), scans)[0].num_samples == 3


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"columns": ["b"]}, "there is no key 'b' with a value; the objects have a"),
        ({"columns": ["*", "a"]}, "alone serves all keys"),
        ({"columns": [], "types": {"a": "text"}}, "name some in `columns`"),
        ({"columns": [], "schema": "union"}, "name some in `columns`"),
        ({"types": {"a": "int8"}}, "must be one of int64, float64, bool, text, json"),
        ({"columns": ["sample_id=a"]}, "no field can have the name 'sample_id'"),
        ({"lengths": {"a": 3}}, "`lengths` of the key 'a' is 3; JSON declares no length"),
    ],
)
def test_options_that_serve_nothing_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        served([b'{"a": 1}'], **options)


def test_a_dictionary_is_no_table() -> None:
    shard = lines([{f"key{number}": 1} for number in range(1001)])
    with pytest.raises(ConfigError, match="more than 1000 keys"):
        served([shard])
