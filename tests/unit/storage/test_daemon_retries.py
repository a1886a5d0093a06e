"""The retry budget, and the pauses before retries."""

from gyre_daemon.storage.engine.policies import RetryBudget, pause_s


def known(reserve: int) -> RetryBudget:
    """A full budget of an endpoint that has served many requests."""
    budget = RetryBudget(reserve, 0.0)
    for _ in range(16 * reserve):
        budget.earn()
    return budget


def test_everything_in_flight_can_be_retried_once() -> None:
    budget = known(64)
    assert sum(budget.take(0.0) for _ in range(1000)) == 64
    assert budget.num_left(0.0) == 0


def test_retries_are_a_small_part_of_all_requests() -> None:
    budget = known(10)
    num_taken = 0
    for _ in range(10_000):  # every request fails
        budget.earn()
        num_taken += budget.take(0.0)
    assert 1500 <= num_taken <= 1511


def test_unused_tokens_do_not_exceed_the_reserve() -> None:
    budget = RetryBudget(10, 0.0)
    for _ in range(10_000):
        budget.earn()
    assert sum(budget.take(0.0) for _ in range(1000)) == 10


def test_retries_that_succeed_are_free() -> None:
    budget = RetryBudget(3, 0.0)
    for _ in range(100):
        assert budget.take(0.0)
        budget.give_back()
    budget.give_back()
    assert sum(budget.take(0.0) for _ in range(100)) == 3


def test_time_refills_the_budget() -> None:
    budget = known(60)
    while budget.take(0.0):
        pass
    assert not budget.take(0.25)
    assert budget.take(0.501)
    assert not budget.take(0.502)
    assert sum(budget.take(1000.0) for _ in range(100)) == 60


def test_pauses_are_random_and_their_bound_doubles_up_to_a_limit() -> None:
    assert [pause_s(num_tries, 0.0) for num_tries in (1, 2, 30)] == [0, 0, 0]
    longest = [pause_s(num_tries, 1.0) for num_tries in range(1, 40)]
    assert longest[:3] == [0.1, 0.2, 0.4]
    assert longest == sorted(longest)
    assert longest[-1] == 5.0


def test_a_short_run_on_a_new_endpoint_retries_little() -> None:
    budget = RetryBudget(1024, 0.0)
    num_taken = 0
    for number in range(2000):  # 200 requests each second, and every one fails
        budget.earn()
        num_taken += budget.take(number / 200)
        num_taken += budget.take(number / 200)
    assert 64 <= num_taken - 0.15 * 2000 <= 64 + 1024 * 10 / 30 + 2


def test_a_short_run_on_a_new_endpoint_retries_less_than_a_fifth_of_its_requests() -> None:
    budget, num_taken = RetryBudget(1024, 0.0), 0
    for number in range(2000):
        budget.earn()
        num_taken += sum(budget.take(number / 200) for _ in range(4))
    assert num_taken <= 0.2 * 2000


def test_a_known_endpoint_refills_in_half_a_minute() -> None:
    budget = known(64)
    while budget.take(0.0):
        pass
    assert budget.num_left(30.1) == 64


def test_a_storage_that_recovers_restores_the_budget_once_in_half_a_minute() -> None:
    budget = RetryBudget(1024, 0.0)
    assert sum(budget.take(0.0) for _ in range(1000)) == 64
    budget.restore(1.0)
    assert sum(budget.take(1.0) for _ in range(1000)) == 64
    budget.restore(2.0)
    assert not budget.take(2.0)
    budget.restore(32.0)
    assert sum(budget.take(32.0) for _ in range(1000)) == 64
