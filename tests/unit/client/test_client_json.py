"""`objects` returns what Python's `json` returns, for documents that it writes and for odd ones."""

import json
from typing import Any

import pytest
import torch
from gyre_client import objects
from hypothesis import given
from hypothesis import strategies as st

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats() | st.text(),
    lambda each: st.lists(each) | st.dictionaries(st.text(), each),
)


def parsed(document: bytes) -> Any:
    data = torch.frombuffer(bytearray(document), dtype=torch.uint8)
    offsets = torch.tensor([0, len(document)])
    (value,) = objects({"json": data, "json.offsets": offsets}, "json")
    return value


@given(VALUES, st.booleans())
def test_documents_of_pythons_json_are_read_as_it_reads_them(value: Any, is_ascii: bool) -> None:
    document = json.dumps(value, ensure_ascii=is_ascii).encode()
    assert repr(parsed(document)) == repr(json.loads(document))


@pytest.mark.parametrize(
    "document", [b"-0", b"1e400", b'"\\ud800"', b'{"a": 1, "a": 2}', "[1]".encode("utf-16")]
)
def test_odd_documents_are_read_as_pythons_json_reads_them(document: bytes) -> None:
    assert repr(parsed(document)) == repr(json.loads(document))


def test_a_document_that_is_none_raises_what_the_docstring_says() -> None:
    with pytest.raises(json.JSONDecodeError):
        parsed(b'{"a": ')
