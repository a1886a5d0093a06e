"""Texts and documents that lie back to back: checked at once as they are one by one."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from gyre_daemon.datasets.formats.values import (
    check_documents,
    check_json,
    check_text,
    check_texts,
)
from hypothesis import example, given
from hypothesis import strategies as st

TEXTS = st.one_of(st.binary(max_size=3), st.text("aß\u20ac", max_size=3).map(str.encode))
DOCUMENTS = st.one_of(
    st.sampled_from([b"", b"NaN", b"[", b'"\xc3"', b"[1] ", b'{"a":', b"\xc3", b"\xb1", b"1"]),
    st.dictionaries(st.text("a\u00f6", max_size=2), st.floats()).map(lambda it: dump(it).encode()),
)


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def is_refused(check: Callable[..., None], *data: Any) -> bool:
    try:
        check(*data)
    except ValueError:
        return True
    return False


def compare(
    check: Callable[[bytes], None],
    check_all: Callable[[memoryview, Any], None],
    parts: Sequence[bytes],
) -> None:
    ends = np.cumsum([len(part) for part in parts])
    begins = ends - [len(part) for part in parts]
    expected = any(is_refused(check, part) for part in parts)
    assert is_refused(check_all, memoryview(b"".join(parts)), begins) == expected


@given(st.lists(TEXTS, min_size=1, max_size=6))
@example([b"a\xc3", b"\xb1b"])
@example([b"\xc3\xb1", b"", b""])
def test_texts(parts: list[bytes]) -> None:
    """Also where a letter of two bytes is cut by the end of a text."""
    compare(check_text, check_texts, parts)


@given(st.lists(DOCUMENTS, min_size=1, max_size=6))
@example([b"1", b"NaN", b"2"])
@example([b"1", b"[1", b"]"])
def test_documents(parts: list[bytes]) -> None:
    """Also where two that are none would make one."""
    compare(check_json, check_documents, parts)


def test_nested_too_deeply() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    with pytest.raises(ValueError, match="nested too deeply"):
        check_documents(memoryview(b"1" + deep), np.array([0, 1]))
