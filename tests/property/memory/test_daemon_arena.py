"""Budget, shares and arenas against models: limits hold, and no memory is handed out twice."""

import resource

import numpy as np
import pytest
from gyre_daemon.errors import Overloaded
from gyre_daemon.memory.arenas import Arena, Budget, Slot
from gyre_daemon.memory.share import share_within
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

PAGE = 4096


def whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


class ArenaModel(RuleBasedStateMachine):
    """An arena beside a list of the slots that are taken, each filled with its own stamp."""

    slots = Bundle("slots")

    @initialize(num_bytes=st.integers(1, 40 * PAGE))
    def start(self, num_bytes: int) -> None:
        self.arena = Arena(num_bytes)
        self.arena.allocate(0, self.arena.num_bytes)
        self.arena.seal()
        self.held: list[tuple[Slot, int]] = []
        self.stamp = 0

    @rule(target=slots, num_bytes=st.integers(1, 12 * PAGE))
    def take(self, num_bytes: int) -> object:
        slot = self.arena.take(num_bytes)
        if slot is None:
            assert self.longest_gap() < whole_pages(num_bytes), "there was room"
            return multiple()
        assert slot.num_bytes == whole_pages(num_bytes)
        self.stamp = (self.stamp + 1) % 256
        np.frombuffer(slot.memory, np.uint8)[:] = self.stamp
        self.held.append((slot, self.stamp))
        return (slot, self.stamp)

    @rule(entry=consumes(slots))
    def put_back(self, entry: tuple[Slot, int]) -> None:
        self.held.remove(entry)
        self.arena.put_back(entry[0])

    def longest_gap(self) -> int:
        """The longest run of bytes that nobody holds."""
        edges = sorted(
            (slot.offset_bytes, slot.offset_bytes + slot.num_bytes) for slot, _ in self.held
        )
        begins, ends = (
            [0, *(end for _, end in edges)],
            [*(begin for begin, _ in edges), self.arena.num_bytes],
        )
        return max(end - begin for begin, end in zip(begins, ends, strict=True))

    @invariant()
    def limits_hold(self) -> None:
        held = sum(slot.num_bytes for slot, _ in self.held)
        assert self.arena.held_bytes == held <= self.arena.num_bytes

    @invariant()
    def taken_slots_do_not_overlap(self) -> None:
        for slot, stamp in self.held:
            assert (np.frombuffer(slot.memory, np.uint8) == stamp).all()

    def teardown(self) -> None:
        if not hasattr(self, "arena"):
            return
        for slot, _ in self.held:
            self.arena.put_back(slot)
        assert self.arena.held_bytes == 0
        whole = self.arena.take(self.arena.num_bytes)
        assert whole, "free ranges are joined again"
        self.arena.close()


TestArena = ArenaModel.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=40)


def test_an_allocated_arena_is_written_to_without_page_faults() -> None:
    arena = Arena(512 * PAGE)
    for begin in (0, 256 * PAGE):
        arena.allocate(begin, begin + 256 * PAGE)
    arena.seal()
    slot = arena.take(512 * PAGE)
    assert slot
    memory = np.frombuffer(slot.memory, np.uint8)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    memory[::PAGE] = 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 64
    del memory, slot
    arena.close()


@given(
    st.integers(1, 1 << 28),
    st.integers(1, 1024),
    st.integers(0, 1 << 30),
    st.integers(0, 1 << 20),
    st.booleans(),
)
def test_a_share_holds_at_least_one_batch_and_stays_within_its_limit(
    batch_bytes: int, window_batches: int, limit: int, metadata_bytes: int, in_groups: bool
) -> None:
    share = share_within(
        batch_bytes, window_batches, limit, metadata_bytes=metadata_bytes, in_groups=in_groups
    )
    one = whole_pages(batch_bytes)
    assert share.num_bytes % one == 0
    assert one <= share.num_bytes
    least = share_within(
        batch_bytes, window_batches, 0, metadata_bytes=metadata_bytes
    ).reserved_bytes
    assert (
        share.num_bytes + share.num_bytes // one * metadata_bytes
        < share.reserved_bytes
        <= max(least, limit)
    )
    assert 1 <= share.window_batches <= window_batches
    assert 1 <= share.max_queued <= window_batches
    num_slots = share.num_bytes // one
    if num_slots > 1:
        assert share.window_batches + share.max_queued + share.num_kept == num_slots
    if (
        limit
        >= share_within(
            batch_bytes, window_batches, 1 << 62, metadata_bytes=metadata_bytes
        ).reserved_bytes
    ):
        assert (share.window_batches, share.max_queued) == (
            window_batches,
            window_batches - window_batches % share.num_together,
        )


@given(st.integers(1, 1 << 24), st.integers(1, 1024), st.integers(0, 1 << 30))
def test_a_share_has_room_for_the_batch_groups_that_its_client_holds(
    batch_bytes: int, window_batches: int, limit: int
) -> None:
    share = share_within(batch_bytes, window_batches, limit, in_groups=True)
    assert 1 <= share.num_together <= max(1, share.window_batches // 3), (
        "at least three batch groups are in flight"
    )
    assert share.num_together == 1 or share.num_together * whole_pages(batch_bytes) <= 26 << 20
    assert share.max_queued % share.num_together == 0, "a client asks for whole batch groups"
    if share.num_together > 1:
        assert share.num_kept >= 2 * share.num_together, "the one in use, and the one before it"
    assert share_within(batch_bytes, window_batches, limit).num_together == 1


@given(st.lists(st.integers(0, 100)), st.integers(0, 300))
def test_a_budget_is_never_exceeded(wishes: list[int], limit: int) -> None:
    budget = Budget(limit)
    granted: list[int] = []
    for wish in wishes:
        if wish > limit - sum(granted):
            with pytest.raises(
                Overloaded,
                match=f"`wiki` needs {wish} bytes, .* only {limit - sum(granted)} are free",
            ):
                budget.reserve(wish, "a session on `wiki`")
        else:
            budget.reserve(wish, "a session on `wiki`")
            granted.append(wish)
        assert budget.reserved_bytes == sum(granted) <= limit
    for share in granted:
        budget.give_back(share)
    assert budget.reserved_bytes == 0
