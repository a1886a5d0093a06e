"""Eviction: never more than the limit, never what is pinned, never a job's own future.

As good as anything can be.
"""

from collections.abc import Sequence

import numpy as np
from gyre_daemon.storage.cache.placement import NEVER, NextUseEviction
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule


def nobody(_: int) -> bool:
    return False


class Machine(RuleBasedStateMachine):
    """Any sequence of events, beside a model that examines everything each time."""

    LIMIT = 100

    def __init__(self) -> None:
        super().__init__()
        self.pinned: set[int] = set()
        self.eviction: NextUseEviction[int] = NextUseEviction(self.LIMIT, self.pinned.__contains__)
        self.held: dict[int, tuple[int, int]] = {}  # bytes, next use
        self.next_key = 0

    @rule(
        num_bytes=st.integers(0, 60),
        next_use=st.integers(0, 20) | st.just(NEVER),
        again=st.booleans(),
    )
    def admit(self, num_bytes: int, next_use: int, *, again: bool) -> None:
        key = self.next_key
        self.next_key += 1
        excess = sum(its for its, _ in self.held.values()) + num_bytes - self.LIMIT
        later = {
            one: its
            for one, (its, use) in self.held.items()
            if use > next_use and one not in self.pinned
        }
        victims = self.eviction.admit(key, num_bytes, next_use)
        if victims is None:
            assert excess > sum(later.values())
            return
        assert set(victims) <= set(later)
        assert excess <= sum(later[victim] for victim in victims)
        kept = [use for one, (_, use) in self.held.items() if one in later and one not in victims]
        assert all(self.held[victim][1] >= max(kept, default=0) for victim in victims)
        for victim in victims:
            del self.held[victim]
        self.held[key] = (num_bytes, next_use)
        if again:
            self.pinned.add(key)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), next_use=st.integers(0, 20) | st.just(NEVER))
    def expect(self, data: st.DataObject, next_use: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.held)))
        self.eviction.expect(key, next_use)
        self.held[key] = (self.held[key][0], next_use)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.held)))
        self.eviction.drop(key)
        self.pinned.discard(key)
        del self.held[key]

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.pinned.discard(data.draw(st.sampled_from(sorted(self.pinned))))

    @invariant()
    def bounded(self) -> None:
        assert self.eviction.used_bytes == sum(its for its, _ in self.held.values()) <= self.LIMIT
        assert set(self.eviction) == set(self.held)

    @rule(now=st.integers(0, 21), count=st.integers(0, 5))
    def passed(self, now: int, count: int) -> None:
        late = sorted(use for _, use in self.held.values() if use < now)
        assert [self.held[key][1] for key in self.eviction.passed(now, count)] == late[:count]


TestMachine = Machine.TestCase


def next_uses(trace: Sequence[int]) -> list[int]:
    """For each point of a trace, when the same block is used next."""
    seen: dict[int, int] = {}
    uses = [NEVER] * len(trace)
    for point in range(len(trace) - 1, -1, -1):
        uses[point] = seen.get(trace[point], NEVER)
        seen[trace[point]] = point
    return uses


def hits(trace: Sequence[int], limit: int) -> int:
    eviction: NextUseEviction[int] = NextUseEviction(limit, nobody)
    num_hits = 0
    for key, use in zip(trace, next_uses(trace), strict=True):
        if key in eviction:
            num_hits += 1
            eviction.expect(key, use)
        else:
            eviction.admit(key, 1, use)
    return num_hits


def best_hits(trace: Sequence[int], limit: int) -> int:
    """The hits of Belady's rule, by examining the whole future each time."""
    uses, held, num_hits = next_uses(trace), {}, 0
    for key, use in zip(trace, uses, strict=True):
        num_hits += key in held
        held[key] = use
        if len(held) > limit:
            del held[max(held, key=lambda one: held[one])]
    return num_hits


@given(st.lists(st.integers(0, 12), max_size=120), st.integers(1, 8))
def test_it_has_as_many_hits_as_belady(trace: list[int], limit: int) -> None:
    assert hits(trace, limit) == best_hits(trace, limit)


@given(st.integers(2, 40), st.integers(1, 40), st.integers(0, 100))
def test_one_job_never_loses_its_own_future(num_blocks: int, limit: int, seed: int) -> None:
    """Where next uses are not known, whatever was taken in first stays: each epoch hits all of it.

    LRU would hit nothing.
    """
    eviction: NextUseEviction[int] = NextUseEviction(limit, nobody)
    for epoch in range(3):
        num_hits = 0
        for key in np.random.default_rng((seed, epoch)).permutation(num_blocks).tolist():
            if key in eviction:
                num_hits += 1
            else:
                assert not eviction.admit(key, 1, 10 * num_blocks), "nothing ever goes"
        assert num_hits == (min(limit, num_blocks) if epoch else 0)
