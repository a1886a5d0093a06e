"""Windows of token files: arithmetic against brute force."""

from typing import Any

import numpy as np
import pytest
from gyre_daemon.datasets.formats import SampleIndex
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.storage.shard import Shard
from hypothesis import given
from hypothesis import strategies as st

from tests.shard_formats import shard_format


def index_of(num_tokens: list[int], itemsize: int = 2, **options: Any) -> SampleIndex:
    shards = [
        Shard(f"{number}.bin", count * itemsize, "") for number, count in enumerate(num_tokens)
    ]
    return shard_format("tokens", **options).assemble(shards, [])


def by_brute_force(num_tokens: list[int], length: int, stride: int) -> list[tuple[int, int]]:
    """(shard, first token) of every window."""
    return [
        (shard, first)
        for shard, count in enumerate(num_tokens)
        for first in range(0, count, stride or length)
        if first + length <= count
    ]


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.integers(1, 12),
    st.integers(0, 15),
    st.sampled_from(["uint8", "uint16", "int32", "int64"]),
)
def test_windows(num_tokens: list[int], length: int, stride: int, dtype: str) -> None:
    """Strides below and above the length; shards that are empty, short or of any size."""
    itemsize = np.dtype(dtype).itemsize
    index = index_of(num_tokens, itemsize, sequence_length=length, stride=stride, dtype=dtype)
    expected = by_brute_force(num_tokens, length, stride)
    assert index.num_samples == len(expected)
    extents = index.locate(np.arange(len(expected)))
    assert (
        list(zip(extents.shard.tolist(), (extents.start[:, 0] // itemsize).tolist(), strict=True))
        == expected
    )
    assert extents.size.tolist() == [[length * itemsize]] * len(expected)
    assert extents.start.dtype == extents.size.dtype == np.int64
    shuffled = np.random.default_rng(0).permutation(len(expected))
    assert index.locate(shuffled).start.tolist() == extents.start[shuffled].tolist()


def test_the_field() -> None:
    (spec,) = index_of([100], sequence_length=7, dtype="uint16").fields
    assert (spec.name, spec.dtype, spec.shape, spec.ragged, spec.codec) == (
        "tokens",
        np.dtype("<u2"),
        (7,),
        False,
        "bytes",
    )
    assert index_of([100], sequence_length=7, dtype="uint16").max_ragged_bytes(10) == 0


def test_a_dataset_of_many_terabytes() -> None:
    index = index_of([1 << 40] * 1000, sequence_length=2048, dtype="uint16")
    assert index.num_samples == 1000 << 29
    last = index.locate(np.array([index.num_samples - 1]))
    assert (last.shard.tolist(), last.start.tolist()) == ([999], [[(1 << 41) - 4096]])


@pytest.mark.parametrize("num_bytes", [1, 3, 101])
def test_half_a_token(num_bytes: int) -> None:
    dataset_format = shard_format("tokens", sequence_length=1, dtype="uint16")
    with pytest.raises(
        CorruptSample,
        match=rf"shard b\.bin has {num_bytes} bytes, no multiple of the 2 bytes of a uint16",
    ) as caught:
        dataset_format.assemble([Shard("a.bin", 10, ""), Shard("b.bin", num_bytes, "")], [])
    assert caught.value.facts["shard"] == "b.bin"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "`sequence_length` of a tokens dataset is missing"),
        ({"sequence_length": 0}, "`sequence_length` .* is missing: .* 1 to"),
        ({"sequence_length": -1}, "sequence_length .* is -1: expected `int` >= 0"),
        ({"sequence_length": (1 << 40) + 1}, "sequence_length .*: expected `int` <= 1099511627776"),
        ({"sequence_length": 1 << 70}, "sequence_length .* is 1180591620717411303424: "),
        ({"sequence_length": 2, "stride": -1}, "stride .* is -1: expected `int` >= 0"),
        (
            {"sequence_length": 2, "stride": 10**30},
            "stride .* is 1000000000000000000000000000000: ",
        ),
        ({"sequence_length": 2, "vocabulary": -1}, "vocabulary .* is -1: expected `int` >= 0"),
        (
            {"sequence_length": 2, "samples": "lines"},
            "samples .*: expected one of windows, documents",
        ),
        ({"sequence_length": "many"}, "is 'many': expected `int`"),
        ({"sequence_length": 2.5}, "is 2.5: expected `int`"),
        (
            {"sequence_length": 2, "dtype": "float32"},
            "dtype of a tokens dataset is `float32`; it must be one of uint8, uint16",
        ),
        ({"sequence_length": 2, "dtype": "object"}, "it must be one of"),
        ({"sequence_length": 2, "dtype": ">u2"}, "it must be one of"),
        ({"sequence_length": 2, "dtype": 16}, "expected `str`"),
        ({"sequence_lenght": 2}, "did you mean `sequence_length`"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        index_of([100], **options)


def test_extreme_options_make_no_sample() -> None:
    assert index_of([100], sequence_length=1 << 40, dtype="uint16").num_samples == 0
    assert index_of([100], sequence_length=1, stride=1 << 40, dtype="uint16").num_samples == 1


def test_the_digest_covers_the_windows() -> None:
    digests = {
        index_of([100], sequence_length=length, stride=stride, dtype=dtype).digest()
        for length in (4, 8)
        for stride in (2, 3)
        for dtype in ("uint16", "int16")
    }
    assert len(digests) == 8
    unstrided = index_of([100], sequence_length=4, dtype="uint16")
    assert (
        unstrided.digest() == index_of([100], sequence_length=4, stride=4, dtype="uint16").digest()
    )
