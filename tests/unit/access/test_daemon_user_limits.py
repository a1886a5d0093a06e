"""The table `limits`, and how often somebody may call."""

from collections.abc import Mapping

import pytest
from gyre_daemon.access.policy import ANONYMOUS, Limits, Principal, Rates
from gyre_daemon.config import LimitsConfig, UserLimits, parse_limits
from gyre_daemon.errors import ConfigError, Overloaded


def test_an_override_says_only_what_differs() -> None:
    limits = Limits(
        parse_limits(
            {
                "user": {"sessions": 7},
                "users": {"uid:1004": {"memory": 0.25}, "token:*": {"requests_per_s": 5}},
            }
        )
    )
    assert limits.of_user("uid:1") == UserLimits(sessions=7)
    assert limits.of_user("uid:1004") == UserLimits(memory=0.25, sessions=7)
    assert limits.of_user("token:ci") == UserLimits(sessions=7, requests_per_s=5)


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"usr": {}}, "unknown key `usr` in limits; did you mean `user`?"),
        ({"user": {"session": 1}}, "unknown key `session` in limits.user; did you mean `sessions`"),
        ({"job": {"sessions": 1}}, "unknown key `job` in limits"),
        ({"user": {"memory": 1.5}}, "limits.user.memory is 1.5"),
        ({"user": {"memory": 0}}, "limits.user.memory is 0"),
        ({"user": {"requests_per_s": float("nan")}}, "limits.user.requests_per_s is nan"),
        ({"users": {"uid:1": {"sessions": 0}}}, "limits.users.uid:1.sessions is 0"),
        ({"users": {"uid:1": 3}}, "limits.users.uid:1 is 3: expected a table"),
        ({"user": 3}, "limits.user is 3: expected a table"),
    ],
)
def test_what_cannot_be_is_refused_by_name(table: Mapping[str, object], reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_limits(table)
    assert reason in str(refused.value)


def test_a_burst_is_allowed_and_then_the_rate_holds() -> None:
    now = 0.0
    rates = Rates(lambda: now)
    assert [rates.take("a", 10.0) for _ in range(50)] == [0.0] * 50
    assert rates.take("a", 10.0) == pytest.approx(0.1)
    assert rates.take("b", 10.0) == 0.0, "each has its own"
    taken = 0
    for step in range(1000):
        now = 0.01 * step
        taken += rates.take("a", 10.0) == 0.0
    assert taken == pytest.approx(100, abs=1)


def test_callers_that_are_not_heard_of_again_are_forgotten() -> None:
    now = 0.0
    rates = Rates(lambda: now)
    for number in range(5000):
        now += 1.0
        rates.take(str(number), 10.0)
    assert len(rates) == 4096


def test_large_messages_slow_a_control_stream_down_and_small_ones_do_not() -> None:
    now = 0.0
    limits = Limits(LimitsConfig(UserLimits(requests_per_s=500.0)), clock=lambda: now)
    pause_s = limits.pace("uid:7")
    for _ in range(20_000):
        now += 1 / 2000
        assert pause_s(100) == 0.0
    num_read = 0
    for _ in range(1000):
        now += 1 / 200
        num_read += pause_s(64 << 10) == 0.0
    assert num_read < 150, "of 1,000 in five seconds"


def test_a_private_daemon_has_no_limits() -> None:
    limits = Limits(None)
    for _ in range(10_000):
        limits.count_request(ANONYMOUS)
    limits.check_sessions("uid:1", 10**6)
    assert limits.why_no_connection(ANONYMOUS, 10**6) == ""


def test_a_caller_who_calls_too_often_is_named_with_the_limit() -> None:
    limits = Limits(LimitsConfig(UserLimits(requests_per_s=1.0)), clock=lambda: 0.0)
    caller = Principal("uid:7", 7)
    for _ in range(5):
        limits.count_request(caller)
    with pytest.raises(Overloaded, match=r"uid:7 makes more than 1 requests per second") as refused:
        limits.count_request(caller)
    assert refused.value.facts == {"limit_per_s": "1.0", "who": "uid:7", "retry_after_s": "1.0"}


def test_a_user_declares_some_lists_of_transforms_at_once_and_then_few() -> None:
    now = 0.0
    limits = Limits(LimitsConfig(), clock=lambda: now)
    for number in range(64):
        limits.count_chain("uid:7", b"%d" % number)
    for _ in range(1000):
        limits.count_chain("uid:7", b"3")  # all ranks of a job declare the same
    with pytest.raises(Overloaded, match=r"uid:7 .* more than 64 .* try again in 5\.0 s"):
        limits.count_chain("uid:7", b"new")
    limits.count_chain("uid:8", b"new")
    now = 5.0
    limits.count_chain("uid:7", b"new")
    with pytest.raises(Overloaded):
        limits.count_chain("uid:7", b"newer")
    for number in range(1000):
        Limits().count_chain("uid:7", b"%d" % number)  # a private daemon has no limits
