"""The budget of repetitions, and the pauses before them."""

from gyre_daemon.storage.engine.retries import RetryBudget, pause_s


def test_all_that_is_in_flight_can_be_tried_again_once() -> None:
    budget = RetryBudget(64, 0.0)
    assert sum(budget.take(0.0) for _ in range(1000)) == 64
    assert budget.num_left(0.0) == 0


def test_repetitions_are_a_small_part_of_all_requests() -> None:
    budget = RetryBudget(10, 0.0)
    num_taken = 0
    for _ in range(10_000):  # every request fails
        budget.earn()
        num_taken += budget.take(0.0)
    assert 1500 <= num_taken <= 1511


def test_what_is_not_used_is_not_saved_up() -> None:
    budget = RetryBudget(10, 0.0)
    for _ in range(10_000):
        budget.earn()
    assert sum(budget.take(0.0) for _ in range(1000)) == 10


def test_repetitions_that_succeed_are_not_counted() -> None:
    budget = RetryBudget(3, 0.0)
    for _ in range(100):
        assert budget.take(0.0)
        budget.give_back()
    budget.give_back()
    assert sum(budget.take(0.0) for _ in range(100)) == 3


def test_time_fills_it_again_so_that_nothing_waits_for_ever() -> None:
    budget = RetryBudget(60, 0.0)
    while budget.take(0.0):
        pass
    assert not budget.take(0.25)
    assert budget.take(0.501)
    assert not budget.take(0.502)
    assert sum(budget.take(1000.0) for _ in range(100)) == 60


def test_pauses_are_drawn_from_nothing_to_twice_as_long_each_time_up_to_a_bound() -> None:
    assert [pause_s(num_tries, 0.0) for num_tries in (1, 2, 30)] == [0, 0, 0]
    longest = [pause_s(num_tries, 1.0) for num_tries in range(1, 40)]
    assert longest[:3] == [0.1, 0.2, 0.4]
    assert longest == sorted(longest)
    assert longest[-1] == 5.0


def test_a_new_budget_lets_a_short_run_repeat_only_a_small_part_of_what_it_asks_for() -> None:
    budget = RetryBudget(1024, 0.0, is_new=True)
    num_taken = 0
    for number in range(2000):  # 200 requests each second, and every one fails
        budget.earn()
        num_taken += budget.take(number / 200)
        num_taken += budget.take(number / 200)
    assert 64 <= num_taken - 0.15 * 2000 <= 64 + 1024 * 10 / 30 + 2


def test_a_short_run_of_a_new_endpoint_repeats_less_than_a_fifth_of_what_it_asks_for() -> None:
    budget, num_taken = RetryBudget(1024, 0.0, is_new=True), 0
    for number in range(2000):
        budget.earn()
        num_taken += sum(budget.take(number / 200) for _ in range(4))
    assert num_taken <= 0.2 * 2000


def test_a_known_endpoint_gets_all_back_in_half_a_minute() -> None:
    budget = RetryBudget(64, 0.0, is_new=True)
    for _ in range(16 * 64):
        budget.earn()
    while budget.take(0.0):
        pass
    assert budget.num_left(30.1) == 64


def test_a_storage_that_answers_again_is_asked_as_at_first_but_not_again_and_again() -> None:
    budget = RetryBudget(1024, 0.0, is_new=True)
    assert sum(budget.take(0.0) for _ in range(1000)) == 64
    budget.restore(1.0)
    assert sum(budget.take(1.0) for _ in range(1000)) == 64
    budget.restore(2.0)
    assert not budget.take(2.0)
    budget.restore(32.0)
    assert sum(budget.take(32.0) for _ in range(1000)) == 64
