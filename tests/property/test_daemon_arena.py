"""Budget, shares and arenas against models: limits hold, no memory is handed out twice, and everything comes back."""

import resource

import numpy as np
import pytest
from gyre_daemon.errors import Overloaded
from gyre_daemon.memory.arena import Arena, Slot
from gyre_daemon.memory.budget import Budget
from gyre_daemon.memory.share import divide
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

PAGE = 4096


def whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


class ArenaModel(RuleBasedStateMachine):
    """An arena beside a list of what is held, each slot filled with a stamp of its own."""

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
        """Of the memory that nobody holds."""
        edges = sorted((slot.offset_bytes, slot.offset_bytes + slot.num_bytes) for slot, _ in self.held)
        begins, ends = [0, *(end for _, end in edges)], [*(begin for begin, _ in edges), self.arena.num_bytes]
        return max(end - begin for begin, end in zip(begins, ends, strict=True))

    @invariant()
    def limits_hold(self) -> None:
        held = sum(slot.num_bytes for slot, _ in self.held)
        assert self.arena.held_bytes == held <= self.arena.num_bytes

    @invariant()
    def held_memory_is_nobody_elses(self) -> None:
        for slot, stamp in self.held:
            assert (np.frombuffer(slot.memory, np.uint8) == stamp).all()

    def teardown(self) -> None:
        if not hasattr(self, "arena"):
            return
        for slot, _ in self.held:
            self.arena.put_back(slot)
        assert self.arena.held_bytes == 0
        whole = self.arena.take(self.arena.num_bytes)
        assert whole, "what was given back is one piece again"
        self.arena.close()


TestArena = ArenaModel.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=40)


def test_the_memory_of_an_arena_is_there_before_it_is_filled() -> None:
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


@given(st.integers(1, 1 << 28), st.integers(1, 1024), st.integers(0, 1 << 30), st.integers(0, 1 << 20), st.booleans())
def test_a_share_holds_a_batch_and_takes_no_more_than_it_may(
    batch_bytes: int, num_ahead: int, limit: int, note_bytes: int, in_strips: bool
) -> None:
    share = divide(batch_bytes, num_ahead, limit, note_bytes=note_bytes, in_strips=in_strips)
    one = whole_pages(batch_bytes)
    assert share.num_bytes % one == 0
    assert one <= share.num_bytes
    least = divide(batch_bytes, num_ahead, 0, note_bytes=note_bytes).reserved_bytes
    assert share.num_bytes + share.num_bytes // one * note_bytes < share.reserved_bytes <= max(least, limit)
    assert 1 <= share.num_ahead <= num_ahead
    assert 1 <= share.num_queued <= num_ahead
    num_slots = share.num_bytes // one
    if num_slots > 1:
        assert share.num_ahead + share.num_queued + share.num_kept == num_slots
    if limit >= divide(batch_bytes, num_ahead, 1 << 62, note_bytes=note_bytes).reserved_bytes:
        assert (share.num_ahead, share.num_queued) == (num_ahead, num_ahead - num_ahead % share.num_together)


@given(st.integers(1, 1 << 24), st.integers(1, 1024), st.integers(0, 1 << 30))
def test_a_share_has_room_for_the_strips_that_its_client_uses(batch_bytes: int, num_ahead: int, limit: int) -> None:
    share = divide(batch_bytes, num_ahead, limit, in_strips=True)
    assert 1 <= share.num_together <= max(1, share.num_ahead // 3), "three strips at least are under way"
    assert share.num_together == 1 or share.num_together * whole_pages(batch_bytes) <= 26 << 20
    assert share.num_queued % share.num_together == 0, "a client asks for whole strips"
    if share.num_together > 1:
        assert share.num_kept >= 2 * share.num_together, "the one in use, and the one before it"
    assert divide(batch_bytes, num_ahead, limit).num_together == 1


@given(st.integers(1, 1 << 24), st.integers(1, 1024), st.integers(0, 1 << 30))
def test_a_share_that_grows_has_room_for_longer_strips(batch_bytes: int, num_ahead: int, limit: int) -> None:
    share = divide(batch_bytes, num_ahead, limit, in_strips=True)
    for num_windows in range(1, share.max_windows + 1):
        grown = share.times(num_windows)
        assert grown.num_bytes == num_windows * share.num_bytes
        assert grown.strip_bytes <= 26 << 20 or grown.num_together == 1
        assert grown.num_together <= min(256, max(1, grown.num_ahead // 3))
        assert grown.num_queued % grown.num_together == 0, "a client asks for whole strips"
        if share.num_together > 1:
            assert grown.num_kept >= 2 * grown.num_together, "the one in use, and the one before it"
        num_slots = grown.num_bytes // grown.batch_bytes
        assert num_slots == num_windows or grown.num_ahead + grown.num_queued + grown.num_kept == num_slots
    assert share.times(1) == share
    assert divide(batch_bytes, num_ahead, limit).max_windows == 1


@given(st.lists(st.integers(0, 100)), st.integers(0, 300))
def test_a_budget_is_never_exceeded(wishes: list[int], limit: int) -> None:
    budget = Budget(limit)
    granted: list[int] = []
    for wish in wishes:
        if wish > limit - sum(granted):
            with pytest.raises(Overloaded, match=f"`wiki` needs {wish} bytes, .* only {limit - sum(granted)} are free"):
                budget.reserve(wish, "a session on `wiki`")
        else:
            budget.reserve(wish, "a session on `wiki`")
            granted.append(wish)
        assert budget.reserved_bytes == sum(granted) <= limit
    for share in granted:
        budget.give_back(share)
    assert budget.reserved_bytes == 0
