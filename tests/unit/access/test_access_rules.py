"""The lists `allow` and `admin`: whom they admit, and which entries are refused."""

import grp
import os
import pwd
from pathlib import Path

import pytest
from gyre_daemon.access.policy import ANONYMOUS, Policy, Principal, parse_admin, parse_allow
from gyre_daemon.cli import main
from gyre_daemon.config import DaemonConfig, DatasetConfig, parse_dataset
from gyre_daemon.errors import ConfigError, NotAllowed

ALICE = Principal("uid:1004", 1004, frozenset((100, 2000)), 17)
BOB = Principal("uid:1005", 1005, frozenset((100,)), 18)
ROOT = Principal("uid:0", 0, frozenset((0,)), 1)
OWN = Principal(f"uid:{os.geteuid()}", os.geteuid(), frozenset(), 19)
MEMBER = Principal("uid:1006", 1006, frozenset((os.getegid(),)), 20)
CI = Principal("token:ci")
NODE = Principal("certificate:train-3")
EVERYBODY = (ALICE, BOB, ROOT, OWN, MEMBER, CI, NODE, ANONYMOUS)


@pytest.mark.parametrize(
    ("entries", "admitted"),
    [
        (["uid:1004"], {ALICE}),
        (["group:2000"], {ALICE}),
        (["group:2000", "uid:1005"], {ALICE, BOB}),
        (["token:ci"], {CI}),
        (["token:*"], set()),
        (["token:c"], set()),
        (["certificate:train-*"], {NODE}),
        (["certificate:*"], {NODE}),
        (["anyone"], set(EVERYBODY)),
        (["user:root"], {ROOT, OWN} if os.geteuid() == 0 else {ROOT}),
    ],
)
def test_an_entry_admits_those_whom_it_names(entries: list[str], admitted: set[Principal]) -> None:
    rules = parse_allow(entries, "datasets.x.allow")
    assert {each for each in EVERYBODY if rules.admits(each)} == admitted


def test_groups_and_users_can_be_named() -> None:
    user, group = pwd.getpwuid(65534), grp.getgrgid(65534)
    rules = parse_allow([f"user:{user.pw_name}", f"group:{group.gr_name}"], "allow")
    assert rules.admits(Principal("uid:65534", 65534))
    assert rules.admits(Principal("uid:7", 7, frozenset((65534,))))
    assert not rules.admits(BOB)


def test_without_a_list_the_daemons_user_and_group_and_root_may_read() -> None:
    policy = Policy(DaemonConfig(datasets={"x": DatasetConfig("/x", "tokens")}))
    assert {each for each in EVERYBODY if policy.may_read(each, "x")} == {ROOT, OWN, MEMBER}
    assert {each for each in EVERYBODY if policy.is_admin(each)} == {ROOT, OWN}


def test_the_name_of_a_job_restricts_and_admits_nobody() -> None:
    """A client chooses it, so it proves nothing."""
    only_jobs = parse_allow(["job:prod-*"], "allow")
    assert {each for each in EVERYBODY if only_jobs.admits(each)} == {ROOT, OWN, MEMBER}
    dataset = DatasetConfig("/x", "tokens", allow=("uid:1004", "job:prod-*", "job:nightly"))
    policy = Policy(DaemonConfig(datasets={"x": dataset}))
    for job in ("prod-1", "nightly"):
        policy.check_job(ALICE, "x", job)
    with pytest.raises(NotAllowed, match=r"only jobs named prod-\* or nightly may read `x`"):
        policy.check_job(ALICE, "x", "PROD-1")
    policy.check_job(ROOT, "x", "anything")
    assert not policy.may_read(BOB, "x"), "whatever its job is called"


def test_operators_may_read_everything() -> None:
    datasets = {"x": DatasetConfig("/x", "tokens", allow=("uid:1004",))}
    policy = Policy(DaemonConfig(datasets=datasets, admin=("token:ci", "uid:1005")))
    assert {each for each in EVERYBODY if policy.is_admin(each)} == {BOB, CI}
    assert {each for each in EVERYBODY if policy.may_read(each, "x")} == {ALICE, BOB, CI}
    assert {each for each in EVERYBODY if policy.may_read(each, "not configured")} == {BOB, CI}
    assert (policy.readable(ALICE), policy.readable(ROOT)) == (["x"], [])


@pytest.mark.parametrize(
    ("entry", "advice"),
    [
        ("groups:vision", "did you mean `group:vision`?"),
        ("uuid:3", "did you mean `uid:3`?"),
        ("anyon", "did you mean `anyone`?"),
        ("anyone:1", "an entry is `anyone`, or one of uid:, user:"),
        ("1004", "an entry is `anyone`, or one of uid:, user:"),
        ("uid:", "an entry is `anyone`, or one of uid:, user:"),
        ("", "an entry is `anyone`, or one of uid:, user:"),
        ("uid:alice", "an id is a whole number"),
        ("uid:-1", "an id is a whole number"),
        ("uid:4294967295", "an id is a whole number of at most 4294967294"),
        ("group:99999999999999", "an id is a whole number of at most 4294967294"),
        ("user:roto", "no user of that name; did you mean 'root'?"),
        ("group:roott", "no group of that name; did you mean 'root'?"),
        ("user:a\0b", "no user of that name"),
        ("job:prod-[12", "its `[` has no `]`: write `[[]`"),
        ("job:prod-[9-0]", "a set such as [z-a] matches no character"),
        ("certificate:[", "its `[` has no `]`"),
        ("certificate:train\n", "it has control characters"),
    ],
)
def test_an_entry_that_means_nothing_is_refused(entry: str, advice: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_allow([entry], "datasets.x.allow")
    assert str(refused.value).startswith(f"datasets.x.allow has the entry {entry!r}")
    assert advice in str(refused.value)


@pytest.mark.parametrize("entry", ["anyone", "job:x"])
def test_not_everybody_can_be_an_operator(entry: str) -> None:
    with pytest.raises(ConfigError, match="an operator may read and see everything"):
        parse_admin([entry])


def test_an_empty_list_is_refused() -> None:
    """It could mean nobody or everybody."""
    with pytest.raises(ConfigError, match=r"datasets\.x\.allow is empty; name who may read"):
        parse_dataset("x", {"uri": "/x", "format": "tokens", "allow": []})


def test_a_policy_takes_over_the_rules_of_another() -> None:
    policy = Policy(
        DaemonConfig(datasets={"x": DatasetConfig("/x", "tokens", allow=("uid:1004",))})
    )
    mistaken = {"x": DatasetConfig("/x", "tokens", allow=("uuid:1005",))}
    with pytest.raises(ConfigError):
        policy.take_over(Policy(DaemonConfig(datasets=mistaken, admin=("uid:1005",))))
    assert policy.may_read(ALICE, "x")
    assert not policy.is_admin(BOB)
    policy.take_over(Policy(DaemonConfig(admin=("uid:1005",))))
    assert policy.is_admin(BOB)
    assert not policy.may_read(ALICE, "x")
    assert not policy.has_rules


def test_a_mistake_in_a_list_is_found_before_the_daemon_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gyre.toml"
    table = '[datasets.x]\nuri = "/x"\nformat = "tokens"\ndtype = "uint8"\nsequence_length = 4\n'
    for text, sentence in (
        (f'admin = ["usr:root"]\n{table}', "did you mean `user:root`?"),
        (f'{table}allow = ["uid:1", "team:a"]\n', "datasets.x.allow has the entry 'team:a'"),
    ):
        path.write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(["check-config", "--config", str(path)])
        assert ended.value.code == 2
        assert sentence in capsys.readouterr().err
    path.write_text(f'{table}allow = ["uid:1", "job:a*"]\n')
    with pytest.raises(SystemExit) as ended:
        main(["check-config", "--config", str(path)])
    assert ended.value.code == 0
    assert 'allow = ["uid:1", "job:a*"]' in capsys.readouterr().out
