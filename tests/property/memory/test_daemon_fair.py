"""Fair queues and executors: who gets the next turn, and for how long."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from gyre_daemon.runtime.threads import Claims, FairExecutor, FairQueue, Flow
from gyre_daemon.sessions.table import weights_of
from hypothesis import given
from hypothesis import strategies as st


async def _serve(
    queue: FairQueue, wanted: list[tuple[Flow, float, int]]
) -> list[tuple[Flow, float, int]]:
    """The order in which turns are granted, one at a time, when all are waited for already."""
    blocker = Flow("blocker")
    await queue.acquire(Claims(blocker, 0), 1)
    granted: list[tuple[Flow, float, int]] = []

    async def one(flow: Flow, cost: float, urgency: int) -> None:
        async with queue.turn_of(Claims(flow, urgency), cost):
            granted.append((flow, cost, urgency))

    async with asyncio.TaskGroup() as group:
        for each in wanted:
            group.create_task(one(*each))
        await asyncio.sleep(0)
        queue.release()
    return granted


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([1.0, 3.0, 8.0]), st.integers(0, 3)),
        min_size=1,
        max_size=60,
    ),
    st.sampled_from([(1.0, 1.0, 1.0), (1.0, 2.0, 4.0)]),
)
def test_waiting_flows_never_differ_by_more_than_their_largest_turns(
    wanted: list[tuple[int, float, int]], weights: tuple[float, float, float]
) -> None:
    flows = [Flow(str(index), weight=weight) for index, weight in enumerate(weights)]
    turns = [(flows[which], cost, urgency) for which, cost, urgency in wanted]
    granted = asyncio.run(_serve(FairQueue(1), turns))
    assert sorted(granted, key=str) == sorted(turns, key=str)
    served = dict.fromkeys(flows, 0.0)
    left = {flow: sum(1 for other, _, _ in turns if other is flow) for flow in flows}
    for flow, cost, _ in granted:
        served[flow] += cost / flow.weight
        left[flow] -= 1
        waiting = [one for one in flows if left[one]]
        for one in waiting:
            for other in waiting:
                assert abs(served[one] - served[other]) <= 8.0 / one.weight + 8.0 / other.weight


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_within_a_flow_the_most_urgent_goes_first_and_then_the_oldest(urgencies: list[int]) -> None:
    flow = Flow("job")
    granted = asyncio.run(
        _serve(
            FairQueue(1), [(flow, float(index), urgency) for index, urgency in enumerate(urgencies)]
        )
    )
    assert [(urgency, cost) for _, cost, urgency in granted] == sorted(
        (urgency, float(index)) for index, urgency in enumerate(urgencies)
    )


def test_an_idle_flow_earns_no_credit() -> None:
    async def run() -> list[str]:
        queue, early, late = FairQueue(1), Flow("early"), Flow("late")
        for _ in range(50):
            async with queue.turn_of(Claims(early, 0), 1):
                pass
        return [
            flow.name
            for flow, _, _ in await _serve(queue, [(early, 1.0, 0)] * 4 + [(late, 1.0, 0)] * 4)
        ]

    order = asyncio.run(run())
    assert (
        order[:4].count("early") >= 1
    )  # with credit for its idle time, "late" would get the first four


def test_turns_are_bounded_and_the_bound_can_change() -> None:
    async def run() -> None:
        queue, flow = FairQueue(2), Flow("job")
        waiting = [asyncio.create_task(queue.acquire(Claims(flow, 0), 1)) for _ in range(6)]
        await asyncio.sleep(0)
        assert (queue.num_taken, queue.num_waiting) == (2, 4)
        queue.resize(5)
        assert (queue.num_taken, queue.num_waiting) == (5, 1)
        queue.resize(1)
        for taken in (4, 3, 2, 1):
            queue.release()
            assert (queue.num_taken, queue.num_waiting) == (taken, 1)
        queue.release()
        assert (queue.num_taken, queue.num_waiting) == (1, 0)
        queue.release()
        await asyncio.gather(*waiting)

    asyncio.run(run())


def test_a_cancelled_waiter_does_not_block_the_queue() -> None:
    async def run() -> None:
        queue, flow = FairQueue(1), Flow("job")
        await queue.acquire(Claims(flow, 0), 1)
        leaving = asyncio.create_task(queue.acquire(Claims(flow, 0), 1))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        queue.release()
        async with asyncio.timeout(10):
            await queue.acquire(Claims(flow, 0), 1)
        granted_and_cancelled = asyncio.create_task(queue.acquire(Claims(flow, 0), 1))
        await asyncio.sleep(0)
        queue.release()  # grants it, before it runs
        granted_and_cancelled.cancel()
        await asyncio.gather(granted_and_cancelled, return_exceptions=True)
        assert (queue.num_taken, queue.num_waiting) == (0, 0)

    asyncio.run(run())


def test_a_thread_keeps_its_turn_until_its_work_is_done() -> None:
    async def run() -> None:
        done = threading.Event()
        with ThreadPoolExecutor(1) as threads:
            executor = FairExecutor(threads, 1)
            first = asyncio.create_task(executor.run(Flow("job"), 1, 0, done.wait))
            second = asyncio.create_task(executor.run(Flow("job"), 1, 0, lambda: 1 / 0))
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            assert not second.done()
            done.set()
            with pytest.raises(ZeroDivisionError):
                await second

    asyncio.run(run())


@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from([1.0, 4.0]))
def test_a_user_with_many_jobs_gets_as_much_as_one_with_few(
    num_one: int, num_other: int, weight: float
) -> None:
    patterns = {"one-*": 9.0, "uid:1/*": weight}
    ones = [
        Flow(job, "uid:1", *weights_of("uid:1", job, patterns))
        for job in (f"one-{index}" for index in range(num_one))
    ]
    others = [Flow(f"other-{index}", "other") for index in range(num_other)]
    turns = [(flow, 1.0, 0) for flow in (*ones, *others) for _ in range(60)]
    granted = asyncio.run(_serve(FairQueue(1), turns))[:40]
    of_one = [flow for flow, _, _ in granted if flow.user == "uid:1"]
    assert abs(len(of_one) - 40 * weight / (1 + weight)) <= 2, "no job's name adds to that"
    of_each = [of_one.count(flow) for flow in ones]
    assert max(of_each) - min(of_each) <= 1, "its jobs share alike"


@given(
    st.lists(st.sampled_from(["prod-a", "probe", "prod-b"]), min_size=1, max_size=3, unique=True),
    st.dictionaries(
        st.sampled_from(["prod-*", "*", "probe", "prod-a"]), st.floats(0.01, 100), max_size=4
    ),
)
def test_names_of_jobs_alone_never_give_a_user_more(
    jobs: list[str], patterns: dict[str, float]
) -> None:
    ones = [Flow(job, "uid:1", *weights_of("uid:1", job, patterns)) for job in jobs]
    other = Flow("other", "uid:2")
    turns = [(flow, 1.0, 0) for flow in (*ones, other) for _ in range(60)]
    granted = asyncio.run(_serve(FairQueue(1), turns))[:40]
    assert abs(sum(flow is other for flow, _, _ in granted) - 20) <= 2


def test_what_several_jobs_need_is_done_once_at_the_first_of_their_turns() -> None:
    queue, slow, fast = FairQueue(1), Flow("slow"), Flow("fast", weight=8.0)
    done: list[str] = []

    async def one(name: str, claims: Claims) -> None:
        async with queue.turn_of(claims, 1.0):
            done.append(name)

    async def scene() -> None:
        await queue.acquire(Claims(slow, 0), 1.0)
        claims = {name: Claims(slow, urgency) for urgency, name in enumerate("abcde")}
        tasks = {name: asyncio.create_task(one(name, its)) for name, its in claims.items()}
        await asyncio.sleep(0)
        claims["d"].join(slow, -1)
        claims["d"].join(slow, 0)  # it is that urgent already
        claims["e"].join(fast, 9)
        claims["c"].join(fast, 10)
        assert queue.num_waiting == 8
        tasks["c"].cancel()
        queue.release()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert sorted(done) == ["a", "b", "d", "e"]
        assert done[:2] in (["d", "e"], ["e", "d"])
        assert queue.num_taken == 0
        assert claims["d"].first == (slow, -1)
        async with queue.turn_of(claims["a"], 1.0):  # free: granted at once, and once
            assert queue.num_taken == 1
        assert queue.num_taken == queue.num_waiting == 0

    asyncio.run(scene())


@given(st.sampled_from([1.0, 2.0, 4.0]))
def test_a_job_has_its_weight_among_those_of_its_user(weight: float) -> None:
    patterns = {"prod-*": weight, "uid:1/*": 3.0}
    heavy = Flow("prod-a", "uid:1", *weights_of("uid:1", "prod-a", patterns))
    light = Flow("probe", "uid:1")
    other = Flow("other", "uid:2")
    turns = [(flow, 1.0, 0) for flow in (heavy, light, other) for _ in range(80)]
    granted = [flow for flow, _, _ in asyncio.run(_serve(FairQueue(1), turns))[:80]]
    own = granted.count(heavy) + granted.count(light)
    assert abs(granted.count(heavy) - own * weight / (1 + weight)) <= 2


def test_the_first_pattern_that_matches_decides() -> None:
    patterns = {"prod-*": 4.0, "uid:1004/*": 2.0, "token:*/prod-*": 3.0, "*/*": 5.0}
    assert weights_of("uid:1004", "prod-x", patterns) == (4.0, 2.0)
    assert weights_of("uid:1004", "probe", patterns) == (2.0, 2.0)
    assert weights_of("token:ci", "prod-x", patterns) == (4.0, 3.0)
    assert weights_of("uid:7", "probe", patterns) == (5.0, 5.0)
    assert weights_of("uid:7", "a/b", {"uid:7/a/*": 2.0}) == (2.0, 2.0)
    assert weights_of("uid:7", "uid:1004/x", {"uid:1004/*": 2.0}) == (1.0, 1.0)


def test_work_that_raises_stop_iteration_ends() -> None:
    """`asyncio` keeps this class to itself: the one who waits gets another error."""

    async def run() -> None:
        with ThreadPoolExecutor(1) as executor:
            workers = FairExecutor(executor, 1)
            with pytest.raises(RuntimeError, match="StopIteration"):
                async with asyncio.timeout(10):
                    await workers.run(Flow("job"), 0, 0, lambda: next(iter(())))
            assert workers.is_idle

    asyncio.run(run())
