"""Whether two statements of a storage are about one version of an object."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from gyre_daemon.errors import GyreError
from gyre_daemon.storage.engine.endpoint import ChangeCheck, Decide
from gyre_daemon.storage.shard import UNKNOWN, Shard, Validators, is_same

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
        shard = Shard("a", 10, "", validators=listed)
        changes = ChangeCheck("there", ["a"], [shard], None)
        for each in told:
            changes.check(0, shard, each, found.append)
        return [error is None for error in found]

    return asyncio.run(whole())


def test_answers_of_replicas_agree_with_each_other_where_the_listing_tells_nothing() -> None:
    one, other = Validators('"1"', "", TIME), Validators('"2"', "", "1994-11-07")
    assert decided(UNKNOWN, one, one, other, one) == [True, True, False, True]
    time = Validators(modified="1994-11-07")
    assert decided(UNKNOWN, one, Validators(modified=TIME), time) == [True, True, False]
    assert decided(UNKNOWN, UNKNOWN, one, UNKNOWN, other) == [True, True, True, False]
    assert decided(one, one, other) == [True, False]


async def until(holds: Callable[[], bool]) -> None:
    # The condition reads lists, which signal nothing.
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0)


def test_a_look_begins_after_the_bytes_that_it_decides_about() -> None:
    listed, newer = Validators('"1"'), Validators('"2"')
    shard = Shard("a", 10, "", validators=listed)

    async def scene() -> None:
        looks: list[asyncio.Future[tuple[int, Validators]]] = []

        async def look(_: str) -> tuple[int, Validators]:
            looks.append(asyncio.get_running_loop().create_future())
            return await looks[-1]

        found: list[tuple[str, GyreError | None]] = []

        def decide(name: str) -> Decide:
            return lambda error: found.append((name, error))

        changes = ChangeCheck("there", ["a"], [shard], look)
        changes.check(0, shard, UNKNOWN, decide("first"))
        await asyncio.sleep(0)
        for name in ("second", "third"):
            changes.check(0, shard, UNKNOWN, decide(name))
        await asyncio.sleep(0)
        assert len(looks) == 1
        looks[0].set_result((10, listed))
        await until(lambda: len(looks) == 2)
        assert found == [("first", None)]
        looks[1].set_result((10, newer))
        await until(lambda: len(found) == 3)
        assert [(name, str(error)[:19]) for name, error in found[1:]] == [
            ("second", "shard a has changed"),
            ("third", "shard a has changed"),
        ]
        changes.check(0, shard, UNKNOWN, decide("fourth"))
        await until(lambda: len(looks) == 3)
        looks[2].set_result((9, listed))
        await until(lambda: len(found) == 4)
        assert found[3][1] is not None

    asyncio.run(asyncio.wait_for(scene(), 60))
