"""The memory of a feed is there when batches need it, and not before."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from gyre_daemon.memory.arena import Slot
from gyre_daemon.memory.arenas import Arenas
from gyre_daemon.memory.budget import Budget
from gyre_daemon.memory.mapped import Mapped
from gyre_daemon.memory.share import divide
from gyre_daemon.runtime.fair import NO_JOB, FairExecutor

BATCH_BYTES = 1 << 20


@pytest.mark.parametrize(("num_ahead", "strip_bytes"), [(12, 4 << 20), (1, 1 << 20), (48, 16 << 20), (96, 26 << 20)])
def test_a_piece_follows_when_there_is_no_slot(num_ahead: int, strip_bytes: int) -> None:
    async def fill() -> tuple[int, list[Slot]]:
        share = divide(BATCH_BYTES, num_ahead, 1 << 30, in_strips=True)
        assert share.num_together * BATCH_BYTES == strip_bytes
        with ThreadPoolExecutor(2) as threads:
            arenas = Arenas(share, Budget(0), Mapped(1 << 30), 1 << 30, FairExecutor(threads, 2))
            await arenas.allocate(NO_JOB)
            first_bytes = arenas.first.num_bytes
            made = asyncio.Event()
            completing = asyncio.create_task(arenas.complete(NO_JOB, made.set))
            slots: list[Slot] = []
            while len(slots) < share.num_bytes // strip_bytes:
                was_complete = arenas.is_complete
                if slot := arenas.take(strip_bytes):
                    slots.append(slot)
                    await asyncio.sleep(0)
                    assert arenas.is_complete == was_complete, "nothing is made while there are slots"
                else:
                    assert not arenas.is_complete, "what a share promises is there"
                    await made.wait()
                    made.clear()
            held_bytes = arenas.held_bytes
            completing.cancel()
            arenas.close()
        assert held_bytes == len(slots) * strip_bytes
        return first_bytes, slots

    first_bytes, slots = asyncio.run(fill())
    assert strip_bytes <= first_bytes <= max(8 << 20, strip_bytes)
    assert len({(slot.arena, slot.offset_bytes) for slot in slots}) == len(slots)


def test_what_is_added_and_what_follows_the_first_piece_hold_longer_strips() -> None:
    share = divide(1 << 17, 192, 1 << 30, in_strips=True, may_grow=True)

    async def fill() -> tuple[list[Slot], int]:
        budget = Budget(5 * share.num_bytes)
        budget.reserve(share.num_bytes, "a test")
        with ThreadPoolExecutor(2) as threads:
            arenas = Arenas(share, budget, Mapped(1 << 30), 1 << 30, FairExecutor(threads, 2), in_bulk=True)
            await arenas.allocate(NO_JOB)
            completing = asyncio.create_task(arenas.complete(NO_JOB, lambda: None))
            for num_windows in (2, 3):
                growing = arenas.grow(num_windows, NO_JOB)
                assert growing
                await growing
                assert arenas.num_windows == num_windows
            assert arenas.grow(5, NO_JOB) is None, "a share is left for somebody else"
            slots = []
            while (slot := arenas.take(share.times(3).strip_bytes)) or not arenas.is_complete:
                slots += [slot] if slot else []
                await asyncio.sleep(0.001)
            reserved_bytes = budget.reserved_bytes
            shrinking = arenas.shrink()
            assert shrinking
            assert not shrinking.is_set(), "batches lie there"
            for slot in slots:
                arenas.put_back(slot)
            await asyncio.wait_for(shrinking.wait(), 120)
            completing.cancel()
            arenas.close()
        assert budget.reserved_bytes == share.num_bytes
        return slots, reserved_bytes

    slots, reserved_bytes = asyncio.run(fill())
    assert len(slots) * slots[0].num_bytes > 0.9 * reserved_bytes, "nearly all of the memory is used"
    assert len(slots) == share.num_bytes // share.strip_bytes, "as many as there are short ones without it"
