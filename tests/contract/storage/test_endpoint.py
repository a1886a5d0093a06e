"""The engine, over a source whose responses the test controls."""

import asyncio
import mmap
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from gyre_daemon.errors import GyreError, StorageUnavailable
from gyre_daemon.runtime.threads import Claims, Flow
from gyre_daemon.storage.reads import Delays, Reads
from gyre_daemon.storage.response import OnResponse, Response, response_from_error
from gyre_daemon.storage.shard import Validators

from tests.contract.storage.engine import DATA, JOB, Asked, Engine, ScriptedSource, play, until


def test_two_reads_of_the_same_range_share_one_request() -> None:
    async def scene() -> None:
        engine, delays = Engine(), Delays()
        first, second = engine.read(0, 100), engine.read(100, 200, delays=delays)
        await until(lambda: len(engine.source.asked) == 3)
        for asked in engine.source.asked:
            asked.answer()
        assert await first == [DATA[0:16], DATA[100:116]]
        assert await second == [DATA[100:116], DATA[200:216]]
        assert (delays.num_requests, delays.num_joined) == (2, 1)
        assert engine.outcomes() == {"ok": 3}

    play(scene)


def test_one_of_two_reads_may_be_cancelled_and_the_other_is_served() -> None:
    async def scene() -> None:
        engine = Engine()
        first, second = engine.read(0), engine.read(0)
        await until(lambda: len(engine.source.asked) == 1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert not engine.source.asked[0].is_cancelled
        engine.source.asked[0].answer()
        assert await second == [DATA[:16]]

    play(scene)


def test_an_abandoned_request_is_cancelled_and_gives_its_turn_back() -> None:
    async def scene() -> None:
        engine = Engine(max_requests=2)
        left = engine.read(0, 100, 200, 300)
        await until(lambda: len(engine.source.asked) == 2)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert all(asked.is_cancelled for asked in engine.source.asked)
        assert engine.outcomes() == {"abandoned": 2}
        assert engine.endpoint.queue.num_taken == 0
        after = engine.read(400)
        await until(lambda: len(engine.source.waiting) == 1)
        engine.source.waiting[0].answer()
        assert await after == [DATA[400:416]]
        assert (engine.endpoint.queue.num_taken, engine.endpoint.queue.num_waiting) == (0, 0)

    play(scene)


def test_the_head_of_the_window_goes_first() -> None:
    async def scene() -> None:
        engine = Engine(max_requests=1)
        tasks = [
            engine.read(start, urgency=urgency)
            for start, urgency in ((0, 5), (100, 9), (200, 7), (300, 6))
        ]
        await until(lambda: engine.endpoint.queue.num_waiting == 3)
        for number in range(4):
            await until(lambda number=number: len(engine.source.asked) == number + 1)  # type: ignore[misc]
            engine.source.asked[number].answer()
        await asyncio.gather(*tasks)
        assert [asked.start for asked in engine.source.asked] == [0, 300, 200, 100]

    play(scene)


def test_a_range_goes_at_the_first_turn_of_those_that_wait_for_it() -> None:
    async def scene() -> None:
        engine, light, heavy = Engine(max_requests=1), Flow("light"), Flow("heavy", weight=8.0)
        tasks = [engine.read(start, urgency=start, flow=light) for start in range(0, 1000, 100)]
        await until(lambda: engine.endpoint.queue.num_waiting == 9)
        # The share of the job that asked first is smaller, or its need is not so urgent.
        tasks += [engine.read(900, flow=heavy), engine.read(800, urgency=1, flow=light)]
        await until(lambda: engine.endpoint.queue.num_waiting == 11)
        for number in range(10):
            await until(lambda number=number: len(engine.source.asked) == number + 1)  # type: ignore[misc]
            engine.source.asked[number].answer()
        assert await asyncio.gather(*tasks) == [
            [DATA[start : start + 16]] for start in (*range(0, 1000, 100), 900, 800)
        ]
        order = [asked.start for asked in engine.source.asked]
        assert order == [0, 900, 800, 100, 200, 300, 400, 500, 600, 700]
        assert engine.endpoint.queue.num_taken == 0

    play(scene)


def test_parts_of_a_body_in_a_mapping_go_to_their_places() -> None:
    async def scene() -> None:
        engine = Engine()
        memories = [np.zeros(size, np.uint8) for size in (16, 100, 1)]
        reads = Reads.into(memories, [0] * 3, [10, 40, 140])
        of_one = replace(reads, sample=np.zeros(3, np.int64), flow=JOB)
        reading = asyncio.create_task(engine.storage.read(of_one))
        await until(lambda: len(engine.source.asked) == 1)
        (asked,) = engine.source.asked
        body = mmap.mmap(-1, asked.stop - asked.start)
        body.write(DATA[asked.start : asked.stop])
        asked.answer(Response(206, body, Validators('"v1"'), len(DATA)))
        await reading
        assert [each.tobytes() for each in memories] == [DATA[10:26], DATA[40:140], DATA[140:141]]
        body.close()  # nothing refers to it any more

    play(scene)


def test_reads_that_cannot_be_sent_soon_wait_and_the_most_urgent_is_admitted_first() -> None:
    async def scene() -> None:
        engine = Engine(max_requests=8)
        first = engine.read(*range(0, 1600, 16))
        others = [
            engine.read(start, urgency=urgency)
            for start, urgency in ((1600, 1), (2000, 3), (3000, 2))
        ]
        await until(lambda: len(engine.source.asked) == 8)
        assert engine.endpoint.queue.num_waiting == 92
        while len(engine.source.asked) < 36:  # 64 wait
            engine.source.asked[len(engine.source.asked) - 8].answer()
        await until(lambda: engine.endpoint.queue.num_waiting == 65)
        engine.source.at_once = Asked.answer
        for asked in engine.source.asked[28:36]:
            asked.answer()
        await asyncio.gather(first, *others)
        assert [asked.start for asked in engine.source.asked[-3:]] == [1600, 3000, 2000]

    play(scene)


def test_a_late_request_is_hedged_and_the_first_response_counts() -> None:
    async def scene() -> None:
        engine = Engine()
        engine.source.at_once = Asked.answer
        await engine.read(*range(0, 1280, 16))  # what is late is known by now
        engine.source.at_once = None
        engine.source.asked.clear()
        late = engine.read(2000)
        await until(lambda: len(engine.source.asked) == 2)
        original, second = engine.source.asked
        second.answer()
        assert await late == [DATA[2000:2016]]
        assert original.is_cancelled
        assert engine.outcomes() == {"ok": 81, "hedged": 1}
        assert engine.endpoint.queue.num_taken == 0

    play(scene)


def test_a_late_hedge_is_hedged_once_more_and_not_again() -> None:
    async def scene() -> None:
        engine = Engine()
        await engine.learn_delays()
        late = engine.read(2000)
        await until(lambda: len(engine.source.asked) == 3)
        await asyncio.sleep(0.1)
        assert len(engine.source.asked) == 3
        engine.source.asked[2].answer()
        assert await late == [DATA[2000:2016]]
        assert [asked.is_cancelled for asked in engine.source.asked] == [True, True, False]
        assert engine.outcomes() == {"ok": 81, "hedged": 2}
        assert engine.endpoint.queue.num_taken == 0

    play(scene)


def test_nothing_is_hedged_while_the_storage_throttles() -> None:
    async def scene() -> None:
        engine, loop = Engine(), asyncio.get_running_loop()
        engine.source.at_once = lambda asked: loop.call_later(0.05, asked.answer)
        await engine.read(*range(0, 1280, 16))
        engine.source.at_once = None
        engine.source.asked.clear()
        before = Counter(engine.outcomes())  # on a busy machine some were late
        refused, late = engine.read(1500), engine.read(2000)
        await until(lambda: len(engine.source.asked) == 2)
        engine.source.asked[0].answer(Response(503))
        await until(lambda: len(engine.source.asked) == 3)  # again
        await asyncio.sleep(0.2)
        assert [asked.start for asked in engine.source.asked] == [1500, 2000, 1500]
        for asked in engine.source.asked[1:]:
            asked.answer()
        await asyncio.gather(refused, late)
        assert Counter(engine.outcomes()) - before == {"ok": 2, "refused": 1}

    play(scene)


def test_a_failure_before_anything_was_sent_is_retried() -> None:
    async def scene() -> None:
        engine, get = Engine(), ScriptedSource.get
        num_tries = 0

        def fail_once(path: str, start: int, stop: int, done: OnResponse) -> Asked:
            nonlocal num_tries
            num_tries += 1
            asked = get(engine.source, path, start, stop, done)
            if num_tries == 1:
                failed = response_from_error(OSError("no descriptors"))
                asyncio.get_running_loop().call_soon(asked.answer, failed)
            else:
                asyncio.get_running_loop().call_soon(asked.answer)
            return asked

        engine.source.get = fail_once  # type: ignore[method-assign]
        assert await engine.read(0) == [DATA[:16]]
        assert engine.outcomes() == {"retried": 1, "ok": 1}

    play(scene)


def test_retries_end_with_the_budget() -> None:
    """Everything in flight once, and a part of the requests; then the storage is left alone."""

    async def scene() -> None:
        engine = Engine(max_requests=16)
        engine.source.at_once = lambda asked: asked.answer(Response(500))
        reading = engine.read(*range(0, 1600, 16))
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(1.0)
        refilled = (asyncio.get_running_loop().time() - began + 1) * 16 / 30
        num_extra = len(engine.source.asked) - 100
        # the reserve, the share of 100 requests, and the refill over time
        assert 0 < num_extra <= 16 + 15 + refilled
        reading.cancel()
        assert isinstance(
            (await asyncio.gather(reading, return_exceptions=True))[0],
            asyncio.CancelledError | GyreError,
        )

    play(scene)


def test_retries_that_succeed_do_not_use_up_the_budget() -> None:
    """Otherwise it would last for 25 of these, and then allow one in two seconds."""

    async def scene() -> None:
        engine, failed = Engine(max_requests=16), set[int]()

        def fail_once(asked: Asked) -> None:
            asked.answer(None if asked.start in failed else Response(500))
            failed.add(asked.start)

        engine.source.at_once = fail_once
        assert len(await engine.read(*range(0, 960, 16))) == 60
        assert engine.outcomes() == {"retried": 60, "ok": 60}

    play(scene)


def test_reads_that_wait_for_a_dead_endpoint_fail_and_later_ones_are_served() -> None:
    async def scene() -> None:
        engine = Engine(deadline_s=0.3)
        engine.source.at_once = lambda asked: asked.answer(Response(0, unreachable=True))
        readings = [engine.read(*range(0, 3200, 16), urgency=number) for number in range(3)]
        outcomes = await asyncio.gather(*readings, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [StorageUnavailable] * 3
        engine.source.at_once = Asked.answer
        (outcome,) = await asyncio.gather(engine.read(0), return_exceptions=True)
        # the pause after so many failures is longer than the deadline
        while isinstance(outcome, StorageUnavailable):
            (outcome,) = await asyncio.gather(engine.read(0), return_exceptions=True)
        assert outcome == [DATA[:16]]
        assert (engine.endpoint.queue.num_taken, engine.endpoint.queue.num_waiting) == (0, 0)

    play(scene)


def test_a_read_waits_for_admission_no_longer_than_nothing_is_answered() -> None:
    async def scene() -> None:
        loop, ends = asyncio.get_running_loop(), [asyncio.get_running_loop().time() + 0.05]
        endpoint = Engine().endpoint
        endpoint._has_room = lambda: False  # type: ignore[method-assign]
        endpoint._left_s = lambda asked_at: ends[-1] - loop.time()  # type: ignore[method-assign]
        began = loop.time()

        async def enter() -> None:
            await endpoint.admit(Claims(JOB, 0), began)
            pytest.fail("there is no room")

        waiting = asyncio.create_task(enter())
        await asyncio.sleep(0.03)
        ends.append(began + 0.15)  # an answer came
        with pytest.raises(StorageUnavailable):
            await waiting
        assert loop.time() - began >= 0.15

    play(scene)
