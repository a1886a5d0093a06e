"""Whether two statements of a storage are about one version of an object."""

import asyncio
from typing import Any

import pytest
from gyre_daemon.errors import GyreError
from gyre_daemon.storage.engine.changes import ChangeCheck
from gyre_daemon.storage.shard import Shard
from gyre_daemon.storage.validators import UNKNOWN, Validators, is_same

TIME = "Sun, 06 Nov 1994 08:49:37 GMT"


@pytest.mark.parametrize(
    ("known", "told", "same"),
    [
        (('"1"',), ('"1"',), True),
        (('"1"',), ("1",), True),
        (('"1"',), ('W/"1"',), True),
        (('"1"',), ('"2"',), False),
        (('"1"', "", TIME), ('"1"', "", "1994-11-07"), True),
        (('W/"1"', "", TIME), ('"1"', "", "1994-11-07"), False),
        (('W/"1"', "v1"), ('W/"1"', "v2"), False),
        (("", "v1", TIME), ("", "v1", "1994-11-07"), True),
        (("", "v1"), ("", "v2"), False),
        (("", "v1"), ('"1"',), None),
        (('"1"', "", TIME), ("", "", TIME), True),
        ((), ('"1"', "v1", TIME), None),
        *((("", "", TIME), ("", "", other), True) for other in (
            "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994", "1994-11-06T08:49:37Z",
            "1994-11-06 09:49:37.250000+01:00", "1994-11-06 08:49:37", "784111777", "784111777.9",
        )),
        (("", "", "784111777.25"), ("", "", "784111777.26"), False),
        (("", "", TIME), ("", "", "784111778"), False),
        (("", "", TIME), ("", "", "yesterday"), None),
        (("", "", "nan"), ("", "", "inf"), None),
    ],
)  # fmt: skip
def test_the_strongest_that_both_have_decides(known: Any, told: Any, same: bool | None) -> None:
    assert is_same(Validators(*known), Validators(*told)) is same
    assert is_same(Validators(*told), Validators(*known)) is same


@pytest.mark.parametrize("each", [UNKNOWN, Validators('"1"', "v", TIME), Validators(digest="ab")])
def test_they_travel_as_bytes(each: Validators) -> None:
    assert Validators.decoded(each.encoded()) == each


def decided(listed: Validators, *told: Validators) -> list[bool]:
    """Whether the bytes of answers are taken that tell this, one after another."""

    async def whole() -> list[bool]:
        found: list[GyreError | None] = []
        changes = ChangeCheck("there", ["a"], [Shard("a", 10, "", validators=listed)], None)
        for each in told:
            changes.check(0, each, found.append)
        return [error is None for error in found]

    return asyncio.run(whole())


def test_answers_of_replicas_agree_with_each_other_where_the_listing_tells_nothing() -> None:
    one, other = Validators('"1"', "", TIME), Validators('"2"', "", "1994-11-07")
    assert decided(UNKNOWN, one, one, other, one) == [True, True, False, True]
    time = Validators(modified="1994-11-07")
    assert decided(UNKNOWN, one, Validators(modified=TIME), time) == [True, True, False]
    assert decided(UNKNOWN, UNKNOWN, one, UNKNOWN, other) == [True, True, True, False]
    assert decided(one, one, other) == [True, False]
