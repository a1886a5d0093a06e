"""Progress that does not wait for the client that is told of it."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest
from gyre_daemon.errors import InvalidRequest, Overloaded
from gyre_daemon.fetching.columns import unheld


class Source:
    """Yields numbers, and knows whether it has ended."""

    def __init__(self, stop: int, error: Exception | None = None) -> None:
        self.stop, self.error, self.has_ended = stop, error, asyncio.Event()

    async def numbers(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(self.stop):
                yield number
            if self.error:
                raise self.error
        finally:
            self.has_ended.set()


def test_a_source_ends_before_anybody_reads_on() -> None:
    async def main() -> None:
        source = Source(1000)
        async with contextlib.aclosing(unheld(source.numbers())) as told:
            assert await anext(told) == 0
            await source.has_ended.wait()
            assert [number async for number in told] == [*range(1, 1000)]

    asyncio.run(main())


def test_what_a_source_raises_comes_behind_what_it_yielded() -> None:
    async def main() -> None:
        told = unheld(Source(3, InvalidRequest("the end")).numbers())
        assert [await anext(told) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(InvalidRequest, match="the end"):
            await anext(told)

    asyncio.run(main())


def test_a_source_ends_with_who_is_told() -> None:
    async def main() -> None:
        source = Source(1)

        async def endless() -> AsyncGenerator[int, None]:
            async with contextlib.aclosing(source.numbers()) as numbers:
                async for number in numbers:
                    yield number
                    await asyncio.Event().wait()

        told = unheld(endless())
        assert await anext(told) == 0
        await told.aclose()
        assert source.has_ended.is_set()

    asyncio.run(main())


def test_what_is_not_read_in_time_is_dropped_and_the_call_fails() -> None:
    async def main() -> None:
        source = Source(5)
        told = unheld(source.numbers(), taken_within_s=-1.0)
        assert await anext(told) == 0
        await source.has_ended.wait()
        for _ in range(10):  # the end, and then the timer
            await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="did not read the progress"):
            await anext(told)

    asyncio.run(main())
