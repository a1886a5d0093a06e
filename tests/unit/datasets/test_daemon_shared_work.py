"""Work that several wait for: what each of them is told, and what becomes of it without them."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest
from gyre_daemon.errors import StorageUnavailable
from gyre_daemon.fetching.columns import Measuring, Measurings

NUM = 4


async def started(
    fails: bool = False,
) -> tuple[Measuring, Callable[[], Coroutine[Any, Any, None]], list[str]]:
    """Work that does a shard with each call of what is returned; and what was told at its end."""
    work = Measuring(NUM)
    turns: asyncio.Queue[None] = asyncio.Queue()
    ended: list[str] = []

    async def run() -> str:
        for number in range(NUM):
            await turns.get()
            if fails:
                raise StorageUnavailable("the storage is gone")
            work.after(f"{number}.tar", was_kept=number % 2 == 0)
        return "the result"

    async def turn() -> None:
        turns.put_nowait(None)
        for _ in range(10):  # whatever waits for this gets its turn
            await asyncio.sleep(0)

    work.begin(run(), lambda: ended.append("ended"))
    return work, turn, ended


def test_all_that_wait_see_how_far_it_is() -> None:
    async def run() -> None:
        work, turn, ended = await started()

        async def watch() -> list[tuple[int, int, str, bool]]:
            return [
                (each.num_done, each.num_reused, each.shard, each.is_over)
                async for each in work.states()
            ]

        watching = [asyncio.create_task(watch()) for _ in range(2)]
        await asyncio.sleep(0)
        for _ in range(NUM):
            await turn()
        for states in await asyncio.gather(*watching):
            assert [done for done, *_ in states][:3] == [1, 2, 3]
            assert states[-1] == (NUM, 2, "3.tar", True)
            assert len(states) <= NUM + 1
        assert ended == ["ended"]
        assert [each.is_over async for each in work.states()] == [True]  # who comes late

    asyncio.run(run())


def test_it_goes_on_without_those_who_wait() -> None:
    async def run() -> None:
        work, turn, _ = await started()
        states = work.states()
        first = asyncio.ensure_future(anext(states))
        await asyncio.sleep(0)
        await turn()
        assert (await first).num_done == 1
        waiting = asyncio.ensure_future(anext(states))
        await asyncio.sleep(0)
        waiting.cancel()
        for _ in range(NUM - 1):
            await turn()
        assert work.task
        assert await work.task == "the result"

    asyncio.run(run())


def test_a_failure_is_told_to_all() -> None:
    async def run() -> None:
        work, turn, ended = await started(fails=True)
        watching = [asyncio.ensure_future(anext(work.states())) for _ in range(2)]
        await asyncio.sleep(0)
        await turn()
        for each in watching:
            with pytest.raises(StorageUnavailable, match="is gone"):
                await each
        assert ended == ["ended"]
        assert work.has_failed

    asyncio.run(run())


def test_of_work_that_nobody_waits_for_only_the_last_goes_on() -> None:
    async def main() -> None:
        found = Measurings()

        async def forever() -> None:
            await asyncio.Event().wait()

        def begun(number: int, num_waiting: int) -> Measuring:
            work = Measuring(1, num_waiting=num_waiting)
            work.begin(forever(), lambda: None)
            return work

        waited_for = found.begun((0,), lambda: begun(0, 1))
        others = [found.begun((number,), partial(begun, number, 0)) for number in range(1, 31)]
        await asyncio.sleep(0)  # those that are cancelled end
        assert not waited_for.is_over
        assert [each.is_over for each in others] == [True] * 21 + [False] * 9
        assert found.all == [waited_for, *others[21:]]
        found.close()

    asyncio.run(main())
