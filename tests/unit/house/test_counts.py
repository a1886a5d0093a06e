"""Numbers of things in words: one batch is no batches."""

import pytest
from gyre_common.counts import counted


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (0, "sample", "0 samples"),
        (1, "batch", "1 batch"),
        (1200, "batch", "1200 batches"),
        (2, "epoch", "2 epochs"),
    ],
)
def test_one_thing_is_named_in_the_singular(number: int, noun: str, text: str) -> None:
    assert counted(number, noun) == text


def test_large_numbers_are_formatted() -> None:
    assert counted(1200, "process", ",") == "1,200 processes"
