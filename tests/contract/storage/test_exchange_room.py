"""Memory that is shared with processes that decode: within bounds of bytes and of descriptors."""

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path

from gyre_daemon.runtime.limits import descriptor_shares
from gyre_daemon.runtime.threads import Claims, Flow
from gyre_daemon.workers.compute_workers import ExchangeRoom

MIB = 1 << 20


def num_files() -> int:
    links = [Path(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]  # noqa: PTH208
    return sum("gyre-decode" in os.path.realpath(link) for link in links)


def test_files_in_use_and_kept_stay_within_the_share_of_descriptors(few_descriptors: int) -> None:
    most = descriptor_shares().exchanges
    assert 0 < most < few_descriptors // 32

    async def check() -> None:
        room, claims = ExchangeRoom(1 << 30), Claims(Flow("job"), 0)
        async with AsyncExitStack() as stack:
            for number in range(most):
                await stack.enter_async_context(room.hold(MIB << (number % 3), claims))
            assert num_files() == 2 * most
            another = asyncio.create_task(stack.enter_async_context(room.hold(1, claims)))
            await asyncio.sleep(0)
            assert not another.done(), "it waits until one is given back"
            another.cancel()
        assert num_files() <= 2 * most, "they are kept"
        for size in (1, 2, 3, 8, 16):
            async with room.hold(size * MIB, claims):
                assert num_files() <= 2 * most
        room.close()
        assert num_files() == 0

    asyncio.run(check())
