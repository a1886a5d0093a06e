"""Brace lists expand as in the WebDataset library, and none exhausts the daemon's memory."""

import re
import time

import pytest
from braceexpand import braceexpand
from gyre_daemon.storage.location import expand
from hypothesis import example, given
from hypothesis import strategies as st

numbers = st.integers(-30, 30).map(str) | st.sampled_from(["007", "-07", "00", "-0", "010"])
ranges = st.tuples(numbers, numbers, st.sampled_from(["", "..2", "..-3", "..0"])).map(
    lambda t: f"{{{t[0]}..{t[1]}{t[2]}}}"
)
letters = st.tuples(
    st.sampled_from("AaZzbM"), st.sampled_from("AaZzbM"), st.sampled_from(["", "..2", "..0"])
).map(lambda t: f"{{{t[0]}..{t[1]}{t[2]}}}")
words = st.text("ab.-/\\,{}0", max_size=4)
lists = st.recursive(
    ranges | letters | words,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda parts: "{" + ",".join(parts) + "}")
        | st.lists(inner, max_size=3).map("".join)
    ),
    max_leaves=4,
)


@given(lists)
@example("shard-{000..127}.tar")
@example("{a..5}")
@example("{}")
@example("{a}")
@example("{,}")
@example(r"a\{1,2\}{b\,c,d}\\")
@example("a}b{c")
def test_they_expand_as_in_the_library(text: str) -> None:
    try:
        expected = [] if closes_too_early(text) else [*braceexpand(text)]
    except ValueError:
        expected = []
    if not expected:
        with pytest.raises(ValueError, match="not balanced"):
            expand(text, 10**9)
        return
    assert expand(text, 10**9) == expected


def closes_too_early(text: str) -> bool:
    """The library accepts an unbalanced closing brace; Gyre refuses it."""
    depth = 0
    for letter in re.sub(r"\\.", "", text):
        depth += (letter == "{") - (letter == "}")
        if depth < 0:
            return True
    return False


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{0..1000}", "more than 1000 shards"),
        ("{a,b}" * 400, "more than 1000 shards"),
        ("{" + "{a,b}" * 400 + ",c}", "more than 1000 shards"),
        ("{1..999999999999999999999999999}", "more than 1000 shards"),
        ("{-" + "9" * 4000 + "..1}", "more than 1000 shards"),
        ("{" * 2000 + "a" + "}" * 2000, "nested more than 16 deep"),
        ("{a,b" * 900 + "}" * 900, "nested more than 16 deep"),
        ("{" * 4000, "not balanced"),
        ("}{", "not balanced"),
    ],
)
def test_bombs_are_refused_at_once(text: str, sentence: str) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match=sentence):
        expand(text, 1000)
    assert time.process_time() - began < 1


def test_as_many_as_allowed() -> None:
    assert len(expand("{0..999}", 1000)) == 1000
    assert len(expand("{a,b}{0..499}", 1000)) == 1000
    assert len(expand("{train-{0..499},val-{0..499}}", 1000)) == 1000
