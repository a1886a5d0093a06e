"""What a refusal for memory tells: a user its own numbers, and an operator those of all."""

import pytest
from gyre_daemon.errors import Overloaded
from gyre_daemon.memory.arenas import Budget


def refusal(budget: Budget, only_user: str | None) -> str:
    with pytest.raises(Overloaded) as refused:
        budget.reserve(budget.limit_bytes + 1, "a session on `wiki`", only_user=only_user)
    return str(refused.value)


def test_a_refusal_names_no_other_user_except_to_operators() -> None:
    budget = Budget(1000)
    budget.abandon(100, ["uid:1"])
    budget.abandon(70, ["uid:1", "uid:2"])
    budget.abandon(9, ["uid:3"])
    text = "179 are kept by clients whose sessions are over"
    assert f"{text} (uid:2: 35, other users: 144)." in refusal(budget, "uid:2")
    assert f"{text} (other users: 179)." in refusal(budget, "uid:4")
    assert f"{text} (uid:1: 135, uid:2: 35, uid:3: 9)." in refusal(budget, None)


def test_a_user_who_alone_keeps_memory_is_told_of_no_others() -> None:
    budget = Budget(1000)
    budget.abandon(100, ["uid:1"])
    assert "are over (uid:1: 100)." in refusal(budget, "uid:1")
    assert "kept" not in refusal(Budget(1000), "uid:1")
