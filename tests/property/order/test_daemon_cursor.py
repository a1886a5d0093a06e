"""A job that resumes at a cursor reads on as if it had never stopped; bad cursors are refused."""

import json
import zlib
from dataclasses import asdict, replace
from typing import Any, get_args

import pytest
from gyre_daemon.errors import CursorRejected
from gyre_daemon.order.cursor import NUM_BEFORE, Cursor, check_cursor, decode_cursor
from gyre_daemon.order.planner import BatchPlanner, Order, Tail
from gyre_daemon.order.steps import Stage
from hypothesis import given
from hypothesis import strategies as st

ORDER = Order("full", "wrap", 17, 8)
CURSOR = Cursor("0123456789abcdef", ORDER, position=40)

tails = st.sampled_from(get_args(Tail))
orders = st.builds(Order, st.just("full"), tails, st.integers(0, 2**64 - 1), st.integers(1, 2**32))


@st.composite
def cursors(draw: st.DrawFn) -> Cursor:
    order = draw(orders)
    position = draw(st.integers(0, 2**30)) * order.global_batch_size
    numbers = st.sets(st.integers(1, 2**62), max_size=8)
    firsts, samples = sorted(draw(numbers)), sorted(draw(numbers))
    stages = tuple(map(Stage, [0, *firsts], samples))
    return Cursor(
        draw(st.text(max_size=40)),
        order,
        position,
        draw(st.integers(0, position)),
        stages=stages,
        num_shards=draw(st.integers(1, 2**40)) if stages else 0,
    )


def sealed(body: bytes) -> bytes:
    """A cursor of any content with the right checksum."""
    return b"GYRE" + zlib.crc32(body).to_bytes(4, "little") + body


def changed(**fields: Any) -> bytes:
    return sealed(json.dumps([1, {**asdict(CURSOR), **fields}]).encode())


@given(cursors())
def test_a_cursor_survives_its_journey(cursor: Cursor) -> None:
    assert decode_cursor(cursor.encode()) == cursor
    check_cursor(cursor, "wiki", cursor.fingerprint, cursor.order)


@given(cursors(), st.integers(0, 2**62), st.integers(0, 2**62))
def test_an_encoder_writes_what_encode_writes(cursor: Cursor, position: int, number: int) -> None:
    encoder = cursor.encoder()
    encoded = replace(cursor, position=position, num_substitutes=number).encode()
    assert encoder.encode(position, number) == encoded
    own = encoder.own([(0, 0), (position, number)])
    assert own[1][:NUM_BEFORE] + encoder.common + own[1][NUM_BEFORE:] == encoded


@given(tails, st.integers(0, 2**64 - 1), st.integers(1, 30), st.integers(1, 30), st.integers(0, 60))
def test_resuming_anywhere_is_the_uninterrupted_run(
    tail: Tail, seed: int, num_samples: int, size: int, stop: int
) -> None:
    if tail == "drop" and size > num_samples:
        return
    order = Order("full", tail, seed, size)
    whole = [BatchPlanner(order, num_samples).batch(step).sample_ids.tolist() for step in range(64)]
    cursor = decode_cursor(Cursor("f", order, position=stop * size).encode())
    check_cursor(cursor, "wiki", "f", order)
    resumed = BatchPlanner(cursor.order, num_samples)
    first = cursor.position // size
    assert [resumed.batch(step).sample_ids.tolist() for step in range(first, 64)] == whole[stop:]


def test_every_flipped_bit_is_noticed() -> None:
    data = CURSOR.encode()
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CursorRejected, match="damaged"):
            decode_cursor(bytes(damaged))


def test_every_truncation_is_noticed() -> None:
    data = CURSOR.encode()
    for length in range(len(data)):
        with pytest.raises(CursorRejected, match="damaged"):
            decode_cursor(data[:length])
    with pytest.raises(CursorRejected, match="damaged"):
        decode_cursor(data + b" ")


@given(st.binary(max_size=200))
def test_random_bytes_are_no_cursor(data: bytes) -> None:
    with pytest.raises(CursorRejected):
        decode_cursor(data)
    with pytest.raises(CursorRejected):
        decode_cursor(sealed(data))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(values)
def test_a_right_checksum_over_nonsense(value: Any) -> None:
    for body in (value, [1, value], [1, value, value], {"a": 1, "b": value}):
        with pytest.raises(CursorRejected):
            decode_cursor(sealed(json.dumps(body).encode()))


@given(st.sampled_from(sorted(asdict(CURSOR))), values)
def test_a_right_checksum_over_one_wrong_field(name: str, value: Any) -> None:
    """A forged cursor is refused, or says what an honest one may say."""
    try:
        cursor = decode_cursor(changed(**{name: value}))
        check_cursor(cursor, "wiki", CURSOR.fingerprint, ORDER)
    except CursorRejected:
        return
    assert type(cursor.position) is int
    assert type(cursor.num_substitutes) is int
    assert 0 <= cursor.num_substitutes <= cursor.position
    assert cursor.position % ORDER.global_batch_size == 0
    assert decode_cursor(cursor.encode()) == cursor


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GYRE",
        bytes(10_000),
        sealed(b""),
        sealed(b"5"),
        sealed(b"null"),
        sealed(b"[" * 4000),
        sealed(b"[1," + b'{"a":' * 600 + b"1" + b"}" * 600 + b"]"),
        sealed(b"[1, {}]"),
        sealed(b"\xff\xfe"),
        changed(position=41),
        changed(position=-8),
        changed(position=40.0),
        changed(position=1 << 63),
        changed(position=True),
        changed(position="40"),
        changed(num_substitutes=-1),
        changed(num_substitutes=41),
        changed(num_substitutes=0.5),
        changed(num_substitutes=[]),
        changed(order={**asdict(ORDER), "global_batch_size": 0}),
        changed(order={**asdict(ORDER), "global_batch_size": -8}),
        changed(order={**asdict(ORDER), "global_batch_size": 0.5}),
        changed(order=None),
        changed(unknown=1),
    ],
)
def test_bad_cursors(data: bytes) -> None:
    with pytest.raises(CursorRejected, match=r"cursor"):
        decode_cursor(data)


def test_a_newer_version_says_so() -> None:
    with pytest.raises(
        CursorRejected,
        match=r"format version 6, but this daemon reads versions 1 to 5; upgrade the daemon",
    ):
        decode_cursor(sealed(b'[6, "whatever"]'))


def test_a_cursor_of_before_datasets_could_grow_is_read_and_written_as_it_was() -> None:
    body = (
        b'[1,{"algorithm":2,"fingerprint":"0123456789abcdef","order":{"global_batch_size":8,'
        b'"mode":"full","seed":17,"tail":"wrap"},"position":40,"num_substitutes":0}]'
    )
    assert decode_cursor(sealed(body)) == CURSOR
    assert CURSOR.encode() == sealed(body)


@pytest.mark.parametrize(
    ("cursor", "differs", "sentence"),
    [
        (
            replace(CURSOR, fingerprint="fedc"),
            "fingerprint",
            r"other data: .* fingerprint is fedc, that of `wiki` is 0123456789abcdef",
        ),
        (
            replace(CURSOR, algorithm=1),
            "the order algorithm's version",
            r"the order algorithm's version is 1 there and 2 here",
        ),
        (
            replace(CURSOR, order=replace(ORDER, tail="drop")),
            "the tail",
            r"the tail is drop there and wrap here",
        ),
        (
            replace(CURSOR, order=replace(ORDER, seed=18)),
            "the seed",
            r"the seed is 18 there and 17 here",
        ),
        (
            replace(CURSOR, order=replace(ORDER, global_batch_size=4)),
            "the global batch size",
            r"the global batch size is 4 there and 8 here",
        ),
    ],
)
def test_a_cursor_that_does_not_fit_says_what_differs(
    cursor: Cursor, differs: str, sentence: str
) -> None:
    with pytest.raises(CursorRejected, match=sentence) as caught:
        check_cursor(decode_cursor(cursor.encode()), "wiki", CURSOR.fingerprint, ORDER)
    assert str(caught.value).count(".") == 0, "one sentence"
    assert caught.value.facts == {"differs": differs}


def test_a_cursor_is_tiny() -> None:
    assert (
        len(Cursor("f" * 32, Order("full", "wrap", 2**64 - 1, 2**32), position=(1 << 62)).encode())
        < 300
    )
