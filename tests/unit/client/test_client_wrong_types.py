"""Wrong values in Python calls: the error names the argument, what was given and what is expected.

None of them reaches a daemon, or ends with an error of the code below.
"""

import math
import types
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gyre_client import Loader, objects, texts
from gyre_client.errors import DaemonUnavailable, GyreError, InvalidRequest

HALF = "half \ud800"  # of a pair of surrogates
DIGITS = 10**5000
DEEP: list[Any] = []
DEEP.append(DEEP)


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


NO_NUMBERS: list[Any] = [
    None,
    "8",
    b"8",
    8.0,
    True,
    math.nan,
    [8],
    {},
    Unprintable(),
    torch.ones(2),
]
NO_TEXTS: list[Any] = [3, 3.5, True, b"text", ["text"], {}, object(), Unprintable()]
NO_SECONDS: list[Any] = [
    None,
    "1",
    b"1",
    True,
    [1],
    math.nan,
    math.inf,
    -1,
    -0.5,
    1e300,
    DIGITS,
    1j,
]


def rows() -> list[tuple[str, Any, str]]:
    """An argument of `Loader`, a wrong value, and what the error expects."""
    found: list[tuple[str, Any, str]] = []
    # One check serves several arguments: all values for the first of them, one for the others.
    found += [("batch_size", value, "it must be a whole number") for value in NO_NUMBERS]
    found += [("batch_size", value, "it must be from") for value in (-1, 2**64, DIGITS, -DIGITS)]
    for name in ("seed", "io_block_bytes", "window_blocks", "prefetch_batches", "rank"):
        found += [(name, "8", "it must be a whole number"), (name, -1, "it must be from")]
    found += [("world_size", 8.0, "it must be a whole number"), ("world_size", -1, "must be from")]
    found += [("epochs", "8", "it must be a whole number")]
    found += [("epochs", value, "it must be from") for value in (0, 2**40)]
    found += [("reattach_timeout_s", value, "seconds") for value in NO_SECONDS]
    found += [("stall_timeout_s", value, "seconds") for value in ("1", -1)]
    found += [("tail", value, "it can be") for value in (None, "", HALF, torch.int64, *NO_TEXTS)]
    for name in ("order", "token_dtype"):
        found += [(name, value, "it can be") for value in (None, "")]
    found += [("job", value, "it must be a string") for value in NO_TEXTS]
    found += [("job", HALF, "not UTF-8"), ("job", "a\x1b[2J", "control characters")]
    found += [("address", value, "it must be a string") for value in (Path("/x"), 0)]
    found += [("address", f"unix:/{HALF}", "half a character"), ("address", "x", "an address is")]
    found += [("dataset", value, "must be a name or a path") for value in (None, *NO_TEXTS)]
    found += [("dataset", HALF, "not UTF-8"), ("dataset", Path(HALF), "not UTF-8")]
    found += [("dataset", "", "is empty")]
    found += [("format", value, "it must be a string") for value in (3, b"text")]
    found += [("format", HALF, "not UTF-8")]
    flags: list[Any] = [None, 0, 1, "no", []]
    found += [("restart", value, "it must be True or False") for value in flags]
    users: list[Any] = [1.5, True, b"x", [], object()]
    found += [("daemon_user", value, "whole number") for value in users]
    found += [("daemon_user", value, "it must be from") for value in (-1, 2**32, DIGITS)]
    found += [
        ("daemon_user", value, "no user of that name") for value in ("nobody here", HALF, "\0")
    ]
    devices: list[Any] = ["gpu", HALF, b"cpu", 1.5, True, [], DIGITS, -7]
    found += [("device", value, "") for value in devices]
    return found


def options() -> list[tuple[Any, str]]:
    """Wrong `options`."""
    return [
        ([("dtype", "int16")], "it must be a dict"),
        ("dtype=int16", "it must be a dict"),
        (7, "it must be a dict"),
        ({1: "int16"}, "a key of options is 1; it must be a string"),
        ({b"dtype": "int16"}, "it must be a string"),
        ({HALF: "int16"}, "not UTF-8"),
        ({"dtype": None}, r"options\['dtype'\] is None"),
        ({"dtype": b"int16"}, r"options\['dtype'\] is b'int16'"),
        ({"dtype": np.dtype("int16")}, "neither a string, number"),
        ({"dtype": HALF}, "not UTF-8"),
        ({"dtype": {1: 2}}, "a key of .* it must be a string"),
        ({"dtype": DEEP}, "levels of lists"),
        ({"dtype": 2**63}, "it must be from"),
        ({"dtype": DIGITS}, "integer of 16610 bits"),
        ({"dtype": object()}, "neither a string"),
        ({"dtype": Unprintable()}, "an object of Unprintable"),
        ({"dtype": 1j}, "neither a string"),
        ({"dtype": {"a"}}, "neither a string"),
    ]


def loader(**arguments: Any) -> Loader:
    usual: dict[str, Any] = {"dataset": "d", "batch_size": 8, "address": "unix:/nowhere/gyre.sock"}
    if "format" in arguments or "options" in arguments:
        usual |= {"format": "tokens"}
    if "rank" in arguments or "world_size" in arguments:
        usual |= {"rank": 0, "world_size": 1}
    if "io_block_bytes" in arguments or "window_blocks" in arguments:
        usual |= {"order": "block"}
    return Loader(**{"reattach_timeout_s": 0, **usual, **arguments})


@pytest.mark.parametrize(("name", "value", "expected"), rows(), ids=lambda value: "")
def test_a_wrong_argument_is_named(name: str, value: object, expected: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        loader(**{name: value})
    text = str(caught.value)
    assert name in text
    assert expected in text
    assert len(text) < 1000
    assert text.encode().isascii()
    assert text.replace("\n", "").isprintable()


@pytest.mark.parametrize(("value", "expected"), options(), ids=lambda value: "")
def test_wrong_options_are_named(value: Any, expected: str) -> None:
    with pytest.raises(InvalidRequest, match=expected) as caught:
        loader(options=value)
    assert "option" in str(caught.value)


def test_an_argument_that_a_loader_does_not_have() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'batchsize'"):
        loader(batchsize=8)


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": np.int32(8), "seed": np.uint64(2**64 - 1)},
        {"batch_size": torch.tensor(8), "prefetch_batches": np.int8(3)},
        {"rank": np.int64(0), "world_size": np.int64(1)},
        {"reattach_timeout_s": np.float32(0), "stall_timeout_s": Fraction(1, 3)},
        {"daemon_user": np.int64(7)},
        {"dataset": Path("/data"), "format": "tokens"},
        {"dataset": "déjà vu", "job": "déjà"},
        {"options": {"sequence_length": np.int64(8), "weight": np.float32(1), "at": Path("/x")}},
        {"options": types.MappingProxyType({"nested": {"a": [1, 2.5, True, "x"]}})},
        {"epochs": None, "rank": None, "world_size": None, "job": None, "device": "cpu"},
    ],
)
def test_what_means_the_same_is_taken(arguments: dict[str, Any]) -> None:
    with pytest.raises(DaemonUnavailable, match="no daemon answers"):
        loader(**arguments)


BATCH = {"txt": torch.tensor([1, 2], dtype=torch.uint8), "txt.offsets": torch.tensor([0, 2])}


@pytest.mark.parametrize("function", [texts, objects])
@pytest.mark.parametrize(
    ("batch", "name", "expected"),
    [
        (None, "txt", "batch is None; it must be a dict"),
        ([1], "txt", r"batch is \[1\]"),
        ({1: 2}, "txt", "a key of batch is 1"),
        (BATCH, None, "name is None; it must be a string"),
        (BATCH, b"txt", "name is b'txt'"),
        (BATCH, "jpg", "'jpg' is not a field of ragged bytes; the batch has txt, txt.offsets"),
        ({"txt.offsets": BATCH["txt.offsets"]}, "txt", "not a field of ragged bytes"),
        ({"txt": b"x", "txt.offsets": [0, 1]}, "txt", "not a field of ragged bytes"),
    ],
)
def test_texts_of_what_is_no_batch(function: Any, batch: Any, name: Any, expected: str) -> None:
    with pytest.raises(InvalidRequest, match=expected):
        function(batch, name)


@pytest.mark.parametrize("message", [None, 3, HALF, "\x1b[2J\x9b\u202e"])
def test_an_error_of_any_message_can_be_printed(message: Any) -> None:
    assert str(GyreError(message)).isprintable()
