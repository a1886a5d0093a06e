"""The memory of a shared stream is there when batches need it, and not before."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from gyre_daemon.memory.arenas import ArenaRegistry, Arenas, Budget, Slot
from gyre_daemon.memory.share import share_within
from gyre_daemon.runtime.threads import NO_JOB, FairExecutor

BATCH_BYTES = 1 << 20


@pytest.mark.parametrize(
    ("window_batches", "group_bytes"), [(12, 4 << 20), (1, 1 << 20), (48, 16 << 20), (96, 26 << 20)]
)
def test_a_piece_follows_when_there_is_no_slot(window_batches: int, group_bytes: int) -> None:
    async def fill() -> tuple[int, list[Slot]]:
        share = share_within(BATCH_BYTES, window_batches, 1 << 30, in_groups=True)
        assert share.num_together * BATCH_BYTES == group_bytes
        with ThreadPoolExecutor(2) as threads:
            arenas = Arenas(share, Budget(0), ArenaRegistry(1 << 30), FairExecutor(threads, 2))
            await arenas.allocate(NO_JOB)
            first_bytes = arenas.first.num_bytes
            made = asyncio.Event()
            completing = asyncio.create_task(arenas.complete(NO_JOB, made.set))
            slots: list[Slot] = []
            while len(slots) < share.num_bytes // group_bytes:
                was_complete = arenas.is_complete
                if slot := arenas.take(group_bytes):
                    slots.append(slot)
                    await asyncio.sleep(0)
                    assert arenas.is_complete == was_complete, (
                        "nothing is made while there are slots"
                    )
                else:
                    assert not arenas.is_complete, "what a share promises is there"
                    await made.wait()
                    made.clear()
            held_bytes = arenas.held_bytes
            completing.cancel()
            arenas.close()
        assert held_bytes == len(slots) * group_bytes
        return first_bytes, slots

    first_bytes, slots = asyncio.run(fill())
    assert group_bytes <= first_bytes <= max(8 << 20, group_bytes)
    assert len({(slot.arena, slot.offset_bytes) for slot in slots}) == len(slots)
