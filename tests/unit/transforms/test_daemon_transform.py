"""Codecs: good bytes become tensors, bad ones an error that says why."""

import io
import json
from typing import Any

import numpy as np
import pytest
from gyre_daemon.datasets.codecs import CODECS
from gyre_daemon.datasets.formats import FieldSpec
from hypothesis import given
from hypothesis import strategies as st

U1 = np.dtype("u1")
TEXT = FieldSpec("txt", U1, (), ragged=True, codec="text")
JSON = FieldSpec("json", U1, (), ragged=True, codec="json")
INTEGER = FieldSpec("cls", np.dtype("<i8"), (), ragged=False, codec="integer")
BYTES = FieldSpec("bin", U1, (), ragged=True, codec="bytes")
TOKENS = FieldSpec("tokens", np.dtype("<u2"), (4,), ragged=False, codec="bytes")
NPY = FieldSpec("npy", np.dtype("<f4"), (2, 3), ragged=False, codec="npy")


def npy(array: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asarray(array), **options)
    return stream.getvalue()


def place_bytes(spec: FieldSpec, stored: int) -> int:
    return stored if spec.ragged else int(np.prod(spec.shape, dtype=int)) * spec.dtype.itemsize


def decode(spec: FieldSpec, stored: bytes) -> bytes:
    """What a batch would hold: stored bytes split between scratch and place, then finished.

    Raises:
        ValueError: from the codec, or because the sizes do not fit.
    """
    codec = CODECS[spec.codec]
    sizes = np.array([len(stored)]), np.array([place_bytes(spec, len(stored))])
    if codec.misfits(*sizes)[0]:
        raise ValueError(f"{len(stored)} bytes misfit")
    before = int(codec.scratch_bytes(*sizes)[0]) if codec.scratch_bytes else 0
    scratch, place = bytearray(stored[:before]), bytearray(sizes[1][0])
    after = stored[before:]
    place[: len(after)] = after
    if codec.finish:
        codec.finish(spec, memoryview(scratch), memoryview(place))
    return bytes(place)


@given(st.binary())
def test_bytes_are_served_as_they_are(data: bytes) -> None:
    assert decode(BYTES, data) == data
    assert CODECS["bytes"].finish is None


@given(st.text())
def test_text(text: str) -> None:
    assert decode(TEXT, text.encode()) == text.encode()


@given(st.binary())
def test_bytes_that_are_no_text(data: bytes) -> None:
    try:
        data.decode()
    except UnicodeDecodeError:
        with pytest.raises(ValueError, match="utf-8"):
            decode(TEXT, data)
    else:
        assert decode(TEXT, data) == data


documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(documents)
def test_json(value: object) -> None:
    data = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    assert decode(JSON, data) == data


@pytest.mark.parametrize(
    "data",
    [
        *(
            b"",
            b" ",
            b"{",
            b"{}{}",
            b"nothing",
            b"{'a': 1}",
            b'{"a": 1,}',
            b'"\xff"',
            b"[" * 100_000,
            b"\xef\xbb\xbf{}",
        ),
        *('{"a": 1}'.encode("utf-16"), '{"a": 1}'.encode("utf-32"), '{"a": 1}'.encode("utf-16-le")),
    ],
    ids=range(13),
)
def test_bytes_that_are_no_json_in_utf_8(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(JSON, data)


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_integers(value: int) -> None:
    for text in (f"{value}", f" {value}\n", f"{value:+d}", f"{value:032d}"):
        assert np.frombuffer(decode(INTEGER, text.encode()), np.int64).tolist() == [value]


@pytest.mark.parametrize(
    "data",
    [
        *(
            b"",
            b" ",
            b"one",
            b"1.0",
            b"0x10",
            b"1 2",
            b"\xff",
            b"\x00",
            b"-",
            "\u0663".encode(),
            b"1" * 65,
            b"nan",
            b"True",
        ),
        *(b"1_000", b"[1]", b"9" * 64, str(1 << 63).encode(), str(-(1 << 63) - 1).encode()),
    ],
    ids=range(18),
)
def test_bytes_that_are_no_integer(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"decimal number|int64|misfit"):
        decode(INTEGER, data)


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "=f4"])
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_npy_of_either_byte_order(dtype: str, version: tuple[int, int]) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    decoded = np.frombuffer(decode(NPY, npy(array, version=version)), "<f4").reshape(2, 3)
    assert decoded.tolist() == array.tolist()


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *((dtype, (2, 2)) for dtype in ("?", "u1", ">i2", ">i8", ">f8", ">c8")),
        *((">i2", shape) for shape in ((), (5,), (0,), (0, 3))),
    ],
)
def test_npy_of_any_type_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    spec = FieldSpec("npy", np.dtype(dtype).newbyteorder("<"), shape, ragged=False, codec="npy")
    decoded = np.frombuffer(decode(spec, npy(array)), spec.dtype).reshape(shape)
    assert decoded.tolist() == array.tolist()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(24),
        bytes(100),
        npy(np.zeros((3, 2), "<f4")),
        npy(np.zeros((6,), "<f4")),
        npy(np.zeros((2, 3), "<i4")),
        npy(np.zeros((2, 3), "<f8")),
        npy(np.zeros((2, 4), "<f4")),
        npy(np.asfortranarray(np.zeros((2, 3), "<f4"))),
        npy(np.zeros((2, 3), "<f4"))[:-1],
        npy(np.zeros((2, 3), "<f4")) + b"x",
        npy(np.zeros((2, 3), "<f4")) + bytes(70_000),
        npy(np.array([[None] * 3] * 2, object), allow_pickle=True),
        b"\x93NUMPY\x01\x00\xff\xff" + bytes(114),
    ],
    ids=range(14),
)
def test_bytes_that_are_no_such_array(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"shape|tensor|npy|misfit"):
        decode(NPY, data)


def test_sizes_are_judged_for_a_whole_batch() -> None:
    stored = np.array([8, 7, 9, 0, 8])
    assert CODECS["bytes"].misfits(stored, np.full(5, 8)).tolist() == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert CODECS["integer"].misfits(np.array([0, 1, 64, 65]), np.full(4, 8)).tolist() == [
        True,
        False,
        False,
        True,
    ]
    assert CODECS["npy"].misfits(
        np.array([8, 9, 8 + 65536, 9 + 65536]), np.full(4, 8)
    ).tolist() == [True, False, False, True]
    scratch_bytes = CODECS["npy"].scratch_bytes
    assert scratch_bytes
    assert scratch_bytes(np.array([136]), np.array([8])).tolist() == [128]
    assert decode(TOKENS, bytes(range(8))) == bytes(range(8))
    with pytest.raises(ValueError, match="misfit"):
        decode(TOKENS, bytes(7))
