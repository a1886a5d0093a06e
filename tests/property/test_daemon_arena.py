"""Budget and arenas against a model: limits hold, no memory is handed out twice, and everything comes back."""

import numpy as np
import pytest
from gyre_daemon.arena import Arena, Budget, Slot, share_bytes
from gyre_daemon.errors import Overloaded
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

PAGE = 4096


class ArenaModel(RuleBasedStateMachine):
    arenas = Bundle("arenas")
    slots = Bundle("slots")

    @initialize(pages=st.integers(0, 40), odd=st.integers(0, PAGE - 1))
    def start(self, pages: int, odd: int) -> None:
        self.budget = Budget(pages * PAGE + odd)
        self.open: dict[Arena, int] = {}
        self.held: list[tuple[Arena, Slot, int]] = []
        self.stamp = 0

    @rule(target=arenas, num_bytes=st.integers(0, 25 * PAGE))
    def open_arena(self, num_bytes: int) -> object:
        free = self.budget.free_bytes
        if num_bytes > free:
            with pytest.raises(Overloaded, match=f"`wiki` needs {num_bytes} bytes, .* only {free} are free"):
                Arena(self.budget, num_bytes, "a session on `wiki`")
            return multiple()
        arena = Arena(self.budget, num_bytes, "a session on `wiki`")
        self.open[arena] = num_bytes
        return arena

    @rule(target=slots, arena=arenas, num_bytes=st.integers(1, 8 * PAGE))
    def take(self, arena: Arena, num_bytes: int) -> object:
        slot = arena.take(num_bytes)
        if slot is None:
            held = sum(its.num_bytes for owner, its, _ in self.held if owner is arena)
            assert held + -(-num_bytes // PAGE) * PAGE > self.open.get(arena, 0), "there was room"
            return multiple()
        assert arena in self.open, "a closed arena gives nothing"
        assert num_bytes <= slot.num_bytes
        self.stamp = (self.stamp + 1) % 256
        np.frombuffer(slot.memory, np.uint8)[:] = self.stamp
        entry = (arena, slot, self.stamp)
        self.held.append(entry)
        return entry

    @rule(entry=consumes(slots))
    def put_back(self, entry: tuple[Arena, Slot, int]) -> None:
        if entry in self.held:
            self.held.remove(entry)
            entry[0].put_back(entry[1])

    @rule(arena=consumes(arenas))
    def close(self, arena: Arena) -> None:
        """Its sessions' slots live on with their holders."""
        arena.close()
        arena.close()
        del self.open[arena]
        self.held = [entry for entry in self.held if entry[0] is not arena]

    @invariant()
    def limits_hold(self) -> None:
        assert self.budget.reserved_bytes == sum(self.open.values()) <= self.budget.limit_bytes
        for arena, limit in self.open.items():
            held = sum(slot.num_bytes for owner, slot, _ in self.held if owner is arena)
            assert arena.held_bytes == held <= arena.memory_bytes <= limit

    @invariant()
    def held_memory_is_nobody_elses(self) -> None:
        for _, slot, stamp in self.held:
            assert (np.frombuffer(slot.memory, np.uint8) == stamp).all()

    def teardown(self) -> None:
        for arena in list(getattr(self, "open", {})):
            for _, slot, _ in [entry for entry in self.held if entry[0] is arena]:
                arena.put_back(slot)
            assert arena.held_bytes == 0
            arena.close()
        if hasattr(self, "budget"):
            assert self.budget.reserved_bytes == 0


TestArena = ArenaModel.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=40)


@given(st.integers(0, 1 << 30), st.integers(0, 1 << 30), st.integers(1, 1 << 28), st.integers(2, 100), st.integers(1, 1 << 30))
def test_a_share_holds_a_batch_and_takes_no_more_than_it_may(
    limit: int, reserved: int, batch_bytes: int, num_batches: int, session_limit: int
) -> None:
    budget = Budget(max(limit, reserved))
    budget.reserve(reserved, "others")
    share = share_bytes(budget, batch_bytes, num_batches, session_limit)
    whole_batch = -(-batch_bytes // PAGE) * PAGE
    assert share >= whole_batch
    assert share <= max(whole_batch, min(session_limit, budget.free_bytes, whole_batch * num_batches))
    if share <= budget.free_bytes:
        assert Arena(budget, share, "a session").limit_bytes == share
    else:
        with pytest.raises(Overloaded, match=f"needs {share} bytes, .* only {budget.free_bytes} are free"):
            Arena(budget, share, "a session")


def test_free_slots_make_room_for_a_larger_one() -> None:
    arena = Arena(Budget(10 * PAGE), 10 * PAGE, "a session")
    for slot in [arena.take(PAGE) for _ in range(10)]:
        assert slot
        arena.put_back(slot)
    assert arena.memory_bytes == 10 * PAGE
    large = arena.take(10 * PAGE)
    assert large
    assert (large.num_bytes, arena.memory_bytes, arena.held_bytes) == (10 * PAGE, 10 * PAGE, 10 * PAGE)
    assert arena.take(1) is None


def test_slots_are_reused() -> None:
    arena = Arena(Budget(4 * PAGE), 4 * PAGE, "a session")
    first = arena.take(2 * PAGE)
    assert first
    arena.put_back(first)
    again = arena.take(PAGE)
    assert again is first, "a page that was touched is cheaper than a fresh one"
