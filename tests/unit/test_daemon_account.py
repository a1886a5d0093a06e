"""The record of what batches took."""

from gyre_daemon.fetching.account import Accounts, BatchAccount
from gyre_daemon.storage.delays import Delays


def account(step: int, job: str = "a", dataset: str = "x", num_steps: int = 1) -> BatchAccount:
    return BatchAccount(dataset, job, 0, 1, step, step + num_steps, 10.0, 0.5, False, Delays(), "")


def test_it_is_bounded_and_forgets_the_oldest() -> None:
    accounts = Accounts(max_kept=3)
    for step in range(5):
        accounts.add(account(step))
    assert len(accounts) == 3
    assert [bool(accounts.find("x", step)) for step in range(6)] == [False, False, True, True, True, False]


def test_the_newest_comes_first_and_a_job_can_be_named() -> None:
    accounts = Accounts()
    first, second, other = account(7, "a"), account(7, "b"), account(7, "a", "y")
    for each in (first, second, other):
        accounts.add(each)
    assert accounts.find("x", 7) == [second, first]
    assert accounts.find("x", 7, "a") == [first]
    assert accounts.find("y", 7) == [other]
    assert accounts.find("z", 7) == []


def test_a_batch_that_was_read_with_others_is_found() -> None:
    accounts = Accounts()
    accounts.add(account(8, num_steps=4))
    assert [bool(accounts.find("x", step)) for step in (7, 8, 11, 12)] == [False, True, True, False]
