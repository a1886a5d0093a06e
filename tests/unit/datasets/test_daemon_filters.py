"""Filters: what an expression leaves, and the index of what is left."""

from typing import Any

import numpy as np
import pytest
from gyre_daemon.datasets.filters import Filter, apply_filter, asked_of, numbered
from gyre_daemon.datasets.formats import FieldSpec
from gyre_daemon.datasets.formats.concat import View
from gyre_daemon.datasets.formats.sample_table import SampleTable
from gyre_daemon.errors import ConfigError
from hypothesis import given
from hypothesis import strategies as st

FIELDS = [
    FieldSpec("text", np.dtype("u1"), (), ragged=True, codec="text"),
    FieldSpec("ids", np.dtype("<u2"), (), ragged=True, codec="ids", token_ids=True),
    FieldSpec("row", np.dtype("<f4"), (4,), ragged=False, codec="npy"),
    FieldSpec("class", np.dtype("<i4"), (), ragged=False, codec="indexed", categories=("a", "b")),
    FieldSpec("text.present", np.dtype("?"), (), ragged=False, codec="indexed"),
    FieldSpec("score", np.dtype("<f8"), (), ragged=False, codec="indexed"),
]
SHARDS = [7, 0, 5, 8]


def table(lengths: list[tuple[int, int]]) -> SampleTable:
    """Samples of these bytes of text and numbers of ids, in shards of 7, 0, 5 and 8."""
    size = np.array([[text, 2 * ids, 16] for text, ids in lengths], np.int64)
    start = np.zeros_like(size)
    for first, count in zip(np.cumsum([0, *SHARDS]), SHARDS, strict=False):
        some = slice(first, first + count)
        ends = np.cumsum(size[some]).reshape(-1, 3)
        start[some] = ends - size[some]
    count = len(lengths)
    indexed = [
        np.arange(count, dtype=np.int32) % 2,
        np.arange(count) % 3 > 0,
        np.arange(count) / 4.0,
    ]
    return SampleTable(FIELDS, SHARDS, start, size, identity=b"", indexed=indexed)


sizes = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 9)), min_size=20, max_size=20)
WHOLE = [(5 * each, each % 7) for each in range(20)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("length(text) >= 50", lambda n: 5 * n >= 50),
        ("10 <= length(text) < 60 and length(ids) > 2", lambda n: 10 <= 5 * n < 60 and n % 7 > 2),
        ('length("ids") * 2 + 1 == 5 or not length(text) > 5', lambda n: n % 7 == 2 or n <= 1),
        ('value("class") == "b"', lambda n: n % 2),
        ('value("class") not in ["b"] and score <= 2.5', lambda n: n % 2 == 0 and n / 4 <= 2.5),
        ('value("class") in (0, 1)', lambda n: True),
        ("text.present", lambda n: n % 3 > 0),
        ("not text.present or score * 1e999 > -score", lambda n: n % 3 == 0 or n > 0),
        ("score < 9999999999999999999999 and score > -1e30", lambda n: True),
        ("length(ids) != 0 and 5 // length(ids) > 1", lambda n: n % 7 in (1, 2)),
        ("length(ids) == 0 or not 1 / length(ids) > 0.3", lambda n: n % 7 not in (1, 2, 3)),
        ("0 < length(ids) < 6 / length(ids)", lambda n: n % 7 in (1, 2)),
        ("length(ids) % 2 == 1 and length(text) // 10 == 1", lambda n: n % 7 % 2 and n in (2, 3)),
    ],
)
def test_what_an_expression_leaves(text: str, expected: Any) -> None:
    index = table(WHOLE)
    _, kept = apply_filter(index, FIELDS, text)
    assert kept.tolist() == [n for n in range(20) if expected(n)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no expression"),
        ("length(text) >", "no expression"),
        ("length(text)", "`length\\(text\\)` does not belong there"),
        ("score", "neither true nor false"),
        (
            "length(row) > 1",
            "`row` is no field whose samples differ in length; these are: text, ids",
        ),
        (
            "row > 1",
            "values of `row`; it has lengths, and the values of: class, text.present, score",
        ),
        ('value("class") == "c"', "'c' is no class of `class`; its classes are: a, b"),
        ('value("class") < "b"', "'b' can only be equal to a field of classes"),
        ("score in 3", "`3` is no list"),
        ("score in []", "a list is empty"),
        ("__import__('os').system('true') == 0", "does not belong there"),
        ("score ** 99 > 1", "does not belong there"),
        ("(lambda: 1)() == 1", "does not belong there"),
        ("score is 1", "`Is` does not belong there"),
        ("score > 9999999999999999999999", "leaves none of 20 samples"),
        ("1 / score > 1", "`1 / score` divides by 0 in sample 0 of all.*`score != 0 and`"),
        ("5 % length(ids) == 1", "`5 % length\\(ids\\)` divides by 0 in sample 0 of all"),
        ("length(ids) >= 1 and 1 / (length(ids) - 4) > 1", "divides by 0 in sample 4 of all"),
        ("score / 0 > -score", "divides by 0"),
        ("score < 1 / 0", "divides by 0"),
        ("[score][0] > 1", "does not belong there"),
        ("not " * 400 + "text.present", "at most 1000"),
        ("(" * 480 + "score" + ")" * 480 + " > 1", "no expression|too many"),
        ("length(text) > 1000", "leaves none of 20 samples"),
    ],
)
def test_filters_that_are_none(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        apply_filter(table(WHOLE), FIELDS, text)
    assert str(caught.value).count("the filter") == 1


def test_nothing_is_read_for_a_filter_that_calls_what_there_is_not() -> None:
    assert asked_of("text == 'x' and length(text) > 3", FIELDS).columns == ("text",)
    assert not asked_of("text == 'x' and size(text) > 3", FIELDS)


HASHES = np.array([1, 5, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 51, 2**64 - 1], np.uint64)
IDS = np.array([-(2**63), -(2**62) - 1, -1, 2, 2**53 + 1, 2**62, 2**63 - 1], np.int64)


def passes(text: str) -> list[bool]:
    """The outcome of a filter for each of `HASHES` and `IDS`."""
    fields = [
        FieldSpec(name, values.dtype, (), ragged=False, codec="indexed")
        for name, values in (("hash", HASHES), ("id", IDS))
    ]
    nothing = np.zeros((len(IDS), 0), np.int64)
    index = SampleTable(fields, [len(IDS)], nothing, nothing, identity=b"", indexed=[HASHES, IDS])
    left: list[bool] = Filter(text, fields, ["hash", "id"])(
        index.locate(np.arange(len(IDS)))
    ).tolist()
    return left


@pytest.mark.parametrize(
    "text",
    [
        "hash % 100 < 50",
        "hash >= 1",
        "hash - 1 < hash",
        "-hash < 0",
        "hash < 9223372036854775808",
        "9223372036854775807 < hash <= 18446744073709551564",
        "hash in [18446744073709551615, 9007199254740993]",
        "hash < 18446744073709551616",
        "hash < 99999999999999999999999999",
        "hash > -9223372036854775808",
        "hash > id",
        "hash - 9223372036854775808 == id + 1",
        "hash / 3 > 3074457345618258602",
        "id >= -9223372036854775808",
        "id > -9223372036854775808",
        "id < 9223372036854775807",
        "id < 9223372036854775808",
        "id == 9007199254740993",
        "id == 9007199254740992.0",
        "id > 4611686018427387903.5",
        "id < 1e18",
        "-id > 0",
        "id * 3 > 0",
        "id + id < 0",
        "id - 1 < id",
        "id // -1 < 0",
        "id % 1000003 == 2",
        "id * 0.5 < 0",
        "9223372036854775807 + 1 > id",
        "-9223372036854775808 - 1 < id",
        "hash * id * hash > 1e60",
    ],
)
def test_integers_of_64_bits_are_computed_as_python_computes_them(text: str) -> None:
    pairs = zip(HASHES.tolist(), IDS.tolist(), strict=True)
    assert passes(text) == [eval(text, {"hash": hash_, "id": id_}) for hash_, id_ in pairs]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hash % 0 == 1", "divides by 0 in sample 0 of all"),
        ("1 // (hash - 9223372036854775808) == 1", "divides by 0 in sample 4 of all"),
        (f"{'hash * ' * 30} 0.5 > 1", "cannot be computed: int too large to convert to float"),
    ],
)
def test_what_python_cannot_compute_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        passes(text)


def test_renamed_fields_have_their_new_names() -> None:
    names = ["caption", *(spec.name for spec in FIELDS[1:])]
    extents = table(WHOLE).locate(np.arange(20))
    assert Filter("length(caption) > 90", FIELDS, names)(extents).sum() == 1


@given(sizes, st.integers(0, 80), st.integers(1, 200))
def test_the_index_of_what_is_left(
    lengths: list[tuple[int, int]], least: int, block_bytes: int
) -> None:
    index = table(lengths)
    expected = [place for place, (text, _) in enumerate(lengths) if text >= least]
    if not expected:
        return
    left, kept = apply_filter(index, FIELDS, f"length(text) >= {least}")
    assert (left is index) == (len(expected) == 20)
    assert left.num_samples == len(expected)
    here, there = left.locate(np.arange(len(expected))), index.locate(np.array(expected))
    assert here.start.tolist() == there.start.tolist()
    assert here.shard.tolist() == there.shard.tolist()
    blocks, all_blocks = left.blocks(block_bytes), index.blocks(block_bytes)
    assert blocks.num_samples == len(expected)
    owner = all_blocks.block_of(np.array(expected))
    assert (
        blocks.block_of(np.arange(len(expected))).tolist()
        == np.unique(owner, return_inverse=True)[1].tolist()
    )
    for count in (1, len(expected), 30):
        largest = sorted((text + 2 * ids for text, ids in map(lengths.__getitem__, expected)))
        assert left.max_ragged_bytes(count) >= sum(largest[-min(count, len(largest)) :])
    assert (left.digest() == index.digest()) == (left is index)
    if isinstance(left, View):
        assert numbered(np.arange(20), kept).tolist() == list(range(len(expected)))
