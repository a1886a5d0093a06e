"""npy headers.

What a tensor can be is read, everything else is refused before anything is allocated.
"""

import io
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from gyre_daemon.datasets.formats.npy import parse_npy_header
from hypothesis import given, settings
from hypothesis import strategies as st


def npy(array: Any, version: tuple[int, int] | None = None, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version=version, **options)
    return stream.getvalue()


def with_header(text: str, version: int = 1) -> bytes:
    """A file with this text as its header."""
    header = text.encode("latin1") + b"\n"
    return (
        b"\x93NUMPY"
        + bytes([version, 0])
        + struct.pack("<H" if version == 1 else "<I", len(header))
        + header
    )


def declared(descr: str = "'<f4'", order: str = "False", shape: str = "(2, 3)") -> bytes:
    return with_header(f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}")


DTYPES = ["?", "u1", "<i2", ">i4", "<i8", ">u2", "<f2", "<f4", ">f8", "<c8", "<c16"]
SHAPES: list[tuple[int, ...]] = [(), (0,), (5,), (0, 7), (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("dtype", "shape"), [*((each, (2, 3)) for each in DTYPES), *(("<f4", each) for each in SHAPES)]
)
def test_what_numpy_writes(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, dtype)
    for version in ((1, 0), (2, 0), (3, 0)):
        data = npy(array, version)
        header = parse_npy_header(data)
        assert (header.dtype, header.shape) == (np.dtype(dtype), shape)
        assert header.num_bytes + array.nbytes == len(data)
        assert parse_npy_header(memoryview(data)[: header.num_bytes]) == header, (
            "the array itself is not needed"
        )


def test_one_dim_has_no_order() -> None:
    assert parse_npy_header(declared(order="True", shape="(7,)")).shape == (7,)


def test_large_arrays_are_only_declared() -> None:
    tracemalloc.start()
    assert parse_npy_header(declared(shape="(1000000, 1000)")).shape == (1_000_000, 1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", None),
        (b"\x93NUM", None),
        (b"\x80\x04]\x94.", None),  # a pickle
        (npy(np.zeros(3))[:20], None),
        (npy(np.array([{}, []], object), allow_pickle=True), "is no tensor"),
        (npy(np.array(["text"])), "is no tensor"),
        (npy(np.array([b"bytes"])), "is no tensor"),
        (npy(np.zeros(2, "M8[s]")), "is no tensor"),
        (npy(np.zeros(2, [("a", "<i4"), ("b", "<f4")])), "is no tensor"),
        (npy(np.zeros(2, np.longdouble)), "is no tensor"),
        (npy(np.zeros(2, np.clongdouble)), "is no tensor"),
        (npy(np.asfortranarray(np.zeros((2, 3)))), "Fortran order; store it in C order"),
        (
            with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }", version=4),
            "version 1.0, 2.0 or 3.0",
        ),
        (declared(shape="(1 << 60,)"), None),
        (declared(shape=f"({1 << 60},)"), "declares an array of shape"),
        (declared(shape="(" + "100000, " * 40 + ")"), "declares an array of shape"),
        (declared(shape="(-1,)"), "declares an array of shape"),
        (declared(shape="(-1, -5)"), "declares an array of shape"),
        (declared(shape="(0, -5)"), "declares an array of shape"),
        (declared(shape="(True, 2)"), "declares an array of shape"),
        (declared(shape="(" + "1, " * 65 + ")"), "declares an array of shape"),
        (declared(shape="[2, 3]"), None),
        (declared(shape="(2.0,)"), None),
        (declared(shape="None"), None),
        (declared(order="0"), None),
        (declared(descr="'|O'"), "is no tensor"),
        (declared(descr="'nonsense'"), None),
        (declared(descr="'<f3'"), None),
        (declared(descr="['<f4']"), None),
        (declared(descr="[('a', '<f4', (1000000, 1000000, 1000000))]"), None),
        (declared(descr="('<f4', (2,))"), None),
        (declared(descr="None"), None),
        (with_header(""), None),
        (with_header("{}"), None),
        (with_header("[1, 2"), None),
        (with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'more': 1}"), None),
        (with_header("__import__('os').system('true')"), None),
        (with_header("(" * 5000), None),
        (with_header("-" * 5000 + "1"), None),
        (with_header("'''"), None),
        (with_header("{'shape': (1L,\\"), None),
        (with_header("x" * 60000), None),
        (with_header("9" * 5000, version=2), None),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b"x" * 100, None),
    ],
    ids=range(44),
)
def test_what_is_refused(data: bytes, sentence: str | None) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_npy_header(data)


GOOD = npy(np.zeros((2, 3), "<f4"))


@given(
    st.lists(st.tuples(st.integers(0, 79), st.integers(0, 255)), max_size=6),
    st.integers(0, len(GOOD)),
)
@settings(max_examples=300)
def test_damage_is_a_value_error_or_another_header(
    changes: list[tuple[int, int]], length: int
) -> None:
    data = bytearray(GOOD)
    for position, value in changes:
        data[position] = value
    try:
        header = parse_npy_header(bytes(data[:length]))
    except ValueError:
        return
    assert all(0 <= size <= 1 << 40 for size in header.shape)
    assert header.dtype.kind in "biufc"


@given(
    st.dictionaries(
        st.sampled_from(["descr", "fortran_order", "shape", "x"]),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats()
            | st.text(max_size=3)
            | st.sampled_from(["<f4", "|O", "|V8"]),
            lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
            max_leaves=5,
        ),
    )
)
def test_any_literal_is_a_value_error_or_a_header(fields: dict[str, Any]) -> None:
    try:
        header = parse_npy_header(with_header(ascii(fields)))
    except ValueError:
        return
    assert fields["shape"] == header.shape
