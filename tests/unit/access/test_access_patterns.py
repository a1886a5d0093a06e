"""Patterns of users and jobs: what can match nobody is refused, or a warning."""

import pytest
from gyre_daemon.access.policy import check_patterns, unmatched
from gyre_daemon.config import DaemonConfig, DatasetConfig, LimitsConfig, UserLimits
from gyre_daemon.errors import ConfigError
from gyre_daemon.sessions.table import weights_of

USERS = [
    "uid:1004", "uid:0", "uid:*", "uid:[1-9]???", "u*", "*", "?id:3", "[ut]*", "*:ci",
    "token:ci", "token:c[iI]", "token:*", "certificate:train-*", "anonymous", "a*",
]  # fmt: skip
NOT_USERS = {
    "": "an empty pattern",
    "alice": "a user is named `uid:1004`",
    "user:alice": "a user is named `uid:1004`",
    "group:vision": "a user is named `uid:1004`",
    "UID:1004": "a user is named `uid:1004`",
    "uid:": "a user is named `uid:1004`",
    "uid": "a user is named `uid:1004`",
    "anyon": "a user is named `uid:1004`",
    "anyone": "a user is named `uid:1004`",
    "b*": "a user is named `uid:1004`",
    "uid:alice": "`uid:` takes a user's number",
    "uid:01004": "`uid:` takes a user's number",
    "uid:-1": "`uid:` takes a user's number",
    "token:[ci": "its `[` has no `]`",
    "token:[]": "its `[` has no `]`",
    "token:\x1b": "it has control characters",
}
JOBS = ["prod-*", "*", "[[]x]", "[]]", "[!]]", "x[0-9]", "]", "ü-*"]
NOT_JOBS = {
    "": "an empty pattern",
    "prod-[0-9": "its `[` has no `]`",
    "[x": "its `[` has no `]`",
    "[!]": "its `[` has no `]`",
    "x[9-0]": "a set such as [z-a] matches no character",
    "prod\n": "it has control characters",
}


def test_patterns_that_can_match_are_accepted() -> None:
    users = dict.fromkeys(USERS, UserLimits())
    weights = {f"{user}/{job}": 2.0 for user in USERS for job in JOBS}
    weights |= dict.fromkeys(JOBS, 2.0)
    check_patterns(DaemonConfig(job_weights=weights, limits=LimitsConfig(users=users)))
    assert weights_of("uid:1004", "a/b", {"uid:1004/a/b": 3.0})[1] == 3.0


def test_a_pattern_of_users_that_matches_nobody_is_refused() -> None:
    for pattern, words in NOT_USERS.items():
        limits = LimitsConfig(users={pattern: UserLimits()})
        with pytest.raises(ConfigError, match=r"limits\.users has the pattern") as refused:
            check_patterns(DaemonConfig(limits=limits))
        assert words in str(refused.value), pattern
        with pytest.raises(ConfigError, match="job_weights has the pattern") as refused:
            check_patterns(DaemonConfig(job_weights={f"{pattern}/x": 2.0}))
        assert words in str(refused.value), pattern


@pytest.mark.parametrize("before", ["", "*/", "uid:1004/"])
def test_a_pattern_of_jobs_that_matches_nobody_is_refused(before: str) -> None:
    for pattern, words in NOT_JOBS.items():
        with pytest.raises(ConfigError, match="job_weights has the pattern") as refused:
            check_patterns(DaemonConfig(job_weights={before + pattern: 2.0}))
        assert words in str(refused.value), pattern
        assert str(refused.value).isprintable()


def test_a_credential_that_nobody_can_have_is_a_warning() -> None:
    allow = ("uid:1004", "token:ci", "token:gone", "certificate:train-*")
    config = DaemonConfig(
        admin=("token:next",),
        tokens={"ci": "/run/ci"},
        datasets={"x": DatasetConfig("/x", "tokens", allow=allow)},
        job_weights={"token:c*/prod": 2.0, "token:z*/*": 2.0, "*/x": 2.0},
        limits=LimitsConfig(users={"certificate:a": UserLimits()}),
    )
    assert list(unmatched(config)) == [
        "admin names 'token:next', and `tokens` has no file of that name",
        "datasets.x.allow names 'token:gone', and `tokens` has no file of that name",
        "datasets.x.allow names 'certificate:train-*', and there is no `tls_client_ca`",
        "limits.users names 'certificate:a', and there is no `tls_client_ca`",
        "job_weights names 'token:z*', and `tokens` has no file of that name",
    ]
