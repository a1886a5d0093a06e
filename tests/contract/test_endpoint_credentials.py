"""The engine and credentials that are no longer accepted, over a source that answers when and what a test says."""

import asyncio

import pytest
from gyre_daemon.errors import NotAllowed

from tests.contract.engine import DATA, FORBIDDEN, Asked, Engine, play, until


def test_credentials_are_read_again_once_for_all_that_was_sent_with_the_old_ones() -> None:
    async def scene() -> None:
        engine = Engine()
        reading = engine.read(0, 100, 200)
        await until(lambda: len(engine.source.asked) == 3)
        for asked in engine.source.asked[:3]:
            asked.answer(FORBIDDEN)
        await until(lambda: len(engine.source.asked) == 6)
        assert engine.source.refreshed == [403]
        for asked in engine.source.asked[3:]:
            asked.answer()
        assert await reading == [DATA[0:16], DATA[100:116], DATA[200:216]]

    play(scene)


def test_credentials_that_are_refused_again_are_an_error() -> None:
    async def scene() -> None:
        engine = Engine()
        engine.source.at_once = lambda asked: asked.answer(FORBIDDEN)
        with pytest.raises(NotAllowed):
            await engine.read(0)
        assert len(engine.source.asked) == 2
        assert engine.outcomes() == {"retried": 1, "error": 1}

    play(scene)


def test_only_a_few_ask_while_credentials_are_in_doubt_and_all_others_once_they_are_accepted() -> None:
    async def scene() -> None:
        engine = Engine(max_requests=64)
        reading, source = engine.read(*range(0, 640, 16)), engine.source
        await until(lambda: len(source.asked) == 40)
        for asked in source.asked[:40]:
            asked.answer(FORBIDDEN)
        await until(lambda: len(source.asked) >= 44)
        another = engine.read(2000)
        await asyncio.sleep(0.02)
        assert len(source.asked) <= 40 + 4 * 3, "four at once, and again after pauses that grow"
        source.at_once = Asked.answer
        for asked in source.asked[40:]:
            asked.answer()
        assert len(await reading) == 40
        assert await another == [DATA[2000:2016]]
        assert engine.outcomes() == {"retried": 40, "ok": 41}

    play(scene)


def test_jobs_that_come_back_again_and_again_ask_little_while_credentials_are_refused() -> None:
    async def scene() -> None:
        engine = Engine(max_requests=64)
        engine.source.at_once = lambda asked: asked.answer(FORBIDDEN)
        for _ in range(4):
            with pytest.raises(NotAllowed):
                await engine.read(*range(0, 640, 16))
        assert len(engine.source.asked) <= 40 + 4 * 8
        engine.source.at_once = Asked.answer
        assert len(await engine.read(*range(0, 640, 16))) == 40

    play(scene)


def test_an_object_that_is_forbidden_by_itself_keeps_no_other_for_long() -> None:
    async def scene() -> None:
        engine = Engine(max_requests=64)
        engine.source.at_once = lambda asked: asked.answer(FORBIDDEN if asked.start == 0 else None)
        for number in range(5):
            outcomes = await asyncio.gather(engine.read(0), engine.read(160 + 16 * number), return_exceptions=True)
            assert isinstance(outcomes[0], NotAllowed)
            assert outcomes[1] == [DATA[160 + 16 * number : 176 + 16 * number]]

    play(scene)


def test_a_twin_that_was_sent_with_old_credentials_says_nothing_about_new_ones() -> None:
    async def scene() -> None:
        engine = Engine()
        await engine.learn_delays()
        late = engine.read(2000)
        await until(lambda: len(engine.source.asked) == 2)
        for asked in engine.source.asked[:2]:
            asked.answer(FORBIDDEN)
        await until(lambda: len(engine.source.asked) == 3)
        engine.source.asked[2].answer()
        assert await late == [DATA[2000:2016]]
        assert engine.source.refreshed == [403]

    play(scene)
