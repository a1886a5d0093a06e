"""The engine and refused credentials, over a source whose responses the test controls."""

import asyncio

import pytest
from gyre_daemon.errors import NotAllowed

from tests.contract.storage.engine import DATA, FORBIDDEN, Asked, Engine, play, until


def test_one_refresh_serves_all_requests_that_were_sent_with_old_credentials() -> None:
    async def scene() -> None:
        engine = Engine()
        reading = engine.read(0, 100, 200)
        await until(lambda: len(engine.source.asked) == 3)
        for asked in engine.source.asked[:3]:
            asked.answer(FORBIDDEN)
        await until(lambda: len(engine.source.asked) == 4)
        await asyncio.sleep(0.02)
        assert len(engine.source.asked) == 4, "one asks with the new ones, two wait for it"
        assert engine.source.refreshed == [403]
        engine.source.asked[3].answer()
        await until(lambda: len(engine.source.asked) == 6)
        for asked in engine.source.asked[4:]:
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


def test_one_request_probes_new_credentials_and_all_others_wait_for_it() -> None:
    async def scene() -> None:
        engine = Engine(max_requests=64)
        reading, source = engine.read(*range(0, 640, 16)), engine.source
        await until(lambda: len(source.asked) == 40)
        for asked in source.asked[:40]:
            asked.answer(FORBIDDEN)
        await until(lambda: len(source.asked) == 41)
        another = engine.read(2000)
        await asyncio.sleep(0.2)
        assert len(source.asked) == 41
        assert source.refreshed == [403]
        source.at_once = Asked.answer
        source.asked[40].answer()
        assert len(await reading) == 40
        assert await another == [DATA[2000:2016]]
        assert engine.outcomes() == {"retried": 40, "ok": 41}

    play(scene)


def test_a_storm_of_refusals_is_no_storm_of_requests_or_refreshes() -> None:
    async def scene() -> None:
        engine = Engine(max_requests=64)
        engine.source.at_once = lambda asked: asked.answer(FORBIDDEN)
        for _ in range(4):
            with pytest.raises(NotAllowed):
                await engine.read(*range(0, 640, 16))
        assert len(engine.source.asked) <= 40 + 4
        assert len(engine.source.refreshed) <= 4
        engine.source.at_once = Asked.answer
        assert len(await engine.read(*range(0, 640, 16))) == 40

    play(scene)


def test_a_single_forbidden_object_does_not_block_the_others() -> None:
    async def scene() -> None:
        engine = Engine(max_requests=64)
        engine.source.at_once = lambda asked: asked.answer(FORBIDDEN if asked.start == 0 else None)
        for number in range(5):
            outcomes = await asyncio.gather(
                engine.read(0), engine.read(160 + 16 * number), return_exceptions=True
            )
            assert isinstance(outcomes[0], NotAllowed)
            assert outcomes[1] == [DATA[160 + 16 * number : 176 + 16 * number]]

    play(scene)


def test_a_hedge_sent_with_old_credentials_says_nothing_about_new_ones() -> None:
    async def scene() -> None:
        engine = Engine()
        await engine.learn_delays()
        late = engine.read(2000)
        # On a busy machine, a second hedge may follow the first before this runs again.
        await until(lambda: len(engine.source.asked) >= 2)
        old = list(engine.source.asked)
        for asked in old:
            asked.answer(FORBIDDEN)
        await until(lambda: len(engine.source.asked) > len(old))
        engine.source.asked[len(old)].answer()
        assert await late == [DATA[2000:2016]]
        assert engine.source.refreshed == [403]

    play(scene)
