"""Sessions of several users at one daemon: who sees and ends them, what is said of them."""

import os
import subprocess
import sys

import pytest
from gyre_client import Loader
from gyre_client.errors import NotAllowed
from gyre_protos.v1 import loader_pb2 as pb

from tests.conftest import to_toml
from tests.integration.access.shared_node import (
    ALICE,
    BOB,
    DEADLINE_S,
    Node,
    attach,
    close,
    open_request,
    ref,
)
from tests.users import Refused, User
from tests.waiting import until

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become other users")


def test_a_session_belongs_to_who_opened_it(node: Node, alice: User, bob: User) -> None:
    opened = alice.call("OpenSession", open_request(job="mine"))
    never = pb.SessionOpened(session_id="0" * 32)
    answers = []
    for target in (opened, never):
        for method, requests in (
            ("Stream", attach(target)),
            ("ReadPayload", [pb.ReadPayloadRequest(session_id=target.session_id)]),
        ):
            with pytest.raises(Refused) as refused:
                bob.stream(method, requests, 1)
            answers.append((refused.value.code, refused.value.details))
        close(bob, target)
    assert len(set(answers)) == 1, "somebody else's session is as good as none"
    assert answers[0][0] == "ABORTED"
    (batches,) = alice.stream("Stream", attach(opened), 1)
    assert batches.batches.groups[0].first_step == 0, "nobody had attached to it or ended it"
    close(alice, opened)


def test_only_operators_see_the_sessions_of_others(node: Node, alice: User, bob: User) -> None:
    theirs = [user.call("OpenSession", open_request(job="seen")) for user in (alice, bob)]
    status = alice.call("GetStatus", pb.GetStatusRequest())
    (state,) = status.sessions
    assert (state.user, state.reader.job) == (f"uid:{ALICE}", "seen")
    assert status.num_hidden_sessions == 1
    assert not status.storage
    assert not status.endpoints
    assert not status.HasField("cache")
    assert status.num_batches_sent == state.num_batches_sent
    everything = node.status()
    assert {each.user for each in everything.sessions} == {f"uid:{ALICE}", f"uid:{BOB}"}
    assert everything.num_hidden_sessions == 0
    for opened in theirs:
        for shown in (status, everything):
            assert opened.session_id not in str(shown), "an id is a secret"
        assert opened.session_id not in node.daemon.log_path.read_text()
    for user, opened in zip((alice, bob), theirs, strict=True):
        close(user, opened)


def test_jobs_of_one_name_and_two_users_do_not_meet(node: Node, alice: User, bob: User) -> None:
    newest = bob.call("OpenSession", open_request(generation=1 << 53))
    opened = alice.call("OpenSession", open_request(generation=1))
    assert len(node.status().sessions) == 2, "neither fenced the other"
    with pytest.raises(Refused) as refused:
        bob.call("OpenSession", open_request(generation=5))
    assert refused.value.code == "FAILED_PRECONDITION"
    for generation in ((1 << 53) + 1, (1 << 64) - 1):
        with pytest.raises(Refused) as refused:
            alice.call("OpenSession", open_request(generation=generation))
        assert refused.value.code == "INVALID_ARGUMENT"
        assert f"generation {generation} is too large" in refused.value.details
    close(bob, newest)
    close(bob, bob.call("OpenSession", open_request(generation=5)))
    close(alice, opened)


def test_two_users_share_a_stream_and_see_their_own_of_it(
    node: Node, alice: User, bob: User
) -> None:
    first = alice.call("OpenSession", open_request(job="hers"))
    second = bob.call("OpenSession", open_request(job="his"))
    assert {state.num_sharing for state in node.status().sessions} == {2}
    for user, opened in ((alice, first), (bob, second)):
        user.stream("Stream", attach(opened), 1)
    explain = pb.ExplainStepRequest(dataset=ref("open"))
    jobs = [
        {each.job for each in user.call("ExplainStep", explain).timings} for user in (alice, bob)
    ]
    assert "hers" in jobs[0]
    assert "his" not in jobs[0]
    assert "hers" not in jobs[1]
    close(alice, first)
    close(bob, second)


def test_a_session_names_its_dataset_to_its_user_alone(node: Node, alice: User, bob: User) -> None:
    opened = alice.call("OpenSession", open_request("alice", "train"))
    (state,) = alice.call("GetStatus", pb.GetStatusRequest()).sessions
    located = pb.LocateStepRequest(dataset=pb.DatasetRef(session=state.handle), cursor=state.cursor)
    assert len(alice.call("LocateStep", located).rows) == 20
    answers = []
    for handle in (state.handle, "0" * 8):
        located.dataset.session = handle
        with pytest.raises(Refused) as refused:
            bob.call("LocateStep", located)
        answers.append((refused.value.code, refused.value.details.replace(handle, "")))
    assert len(set(answers)) == 1, "somebody else's session is as good as none"
    assert answers[0][0] == "NOT_FOUND"
    close(alice, opened)
    located.dataset.session = state.handle
    with pytest.raises(Refused, match="ended"):
        alice.call("LocateStep", located)


def test_metrics_name_no_jobs_where_users_or_datasets_are_apart(node: Node, alice: User) -> None:
    opened = alice.call("OpenSession", open_request(job="confidential"))
    text = node.metrics()
    assert "confidential" not in text
    assert 'gyre_job_sessions{job_name="_others",user=""} 1.0' in text
    close(alice, opened)


def test_the_audit_log_says_who_read_what(node: Node, alice: User, bob: User) -> None:
    opened = alice.call("OpenSession", open_request(job="audited"))
    alice.stream("Stream", attach(opened), 1)
    until(lambda: node.audit("session closed")[-1]["job"] == "audited")
    begun, ended = node.audit("session open")[-1], node.audit("session closed")[-1]
    assert begun["session"] == ended["session"] != opened.session_id
    for line in (begun, ended):
        assert (line["user"], line["pid"]) == (f"uid:{ALICE}", alice.pid)
        assert (line["dataset"], line["rank"]) == ("open", 0)
    assert ended["batches"] in (1, 2), "the second may be sent after the stream has ended"
    assert ended["bytes"] == ended["batches"] * 640, "40 ids and token rows, aligned"
    assert ended["seconds"] >= 0
    with pytest.raises(Refused):
        bob.call("OpenSession", open_request("secret\n\x1b[2J\x9b"))
    raw = node.daemon.log_path.read_text()
    assert raw.isascii()
    assert "\x1b" not in raw


def test_who_loses_access_is_told_so(node: Node, alice: User, bob: User) -> None:
    reading = alice.call("OpenSession", open_request("alice", "train"))
    other = bob.call("OpenSession", open_request(job="stays"))
    datasets = node.config["datasets"] | {"alice": node.dataset("alice", [f"uid:{BOB}"])}
    event = node.daemon.reconfigure(to_toml(node.config | {"datasets": datasets}))
    try:
        assert (event["event"], event["changed"]) == ("reloaded", ["alice"])
        with pytest.raises(Refused) as refused:
            alice.stream("Stream", attach(reading), 1)
        assert refused.value.code == "ABORTED"
        closed = node.audit("session closed")[-1]
        assert f"uid:{ALICE} may no longer read `alice`" in closed["reason"]
        with pytest.raises(Refused, match="NOT_FOUND"):
            alice.call("OpenSession", open_request("alice", "train"))
        close(bob, bob.call("OpenSession", open_request("alice", "any")))
        assert bob.stream("Stream", attach(other), 1)
        close(bob, other)
        mistaken = node.config | {"admin": ["usr:root"]}
        refusal = node.daemon.reconfigure(to_toml(mistaken))
        assert refusal["event"] == "reload refused"
        assert "did you mean `user:root`?" in refusal["reason"]
    finally:
        node.daemon.reconfigure(to_toml(node.config))


def test_a_trainer_that_loses_access_ends_with_the_reason(node: Node) -> None:
    """It is no outage, so it is not retried."""
    with Loader("secret", batch_size=20, address=node.daemon.address) as loader:
        next(loader)
        datasets = node.config["datasets"] | {"secret": node.dataset("secret", ["uid:7"])}
        node.daemon.reconfigure(to_toml(node.config | {"datasets": datasets, "admin": ["uid:7"]}))
        try:
            with pytest.raises(NotAllowed, match="uid:0 may no longer read `secret`"):
                for _ in loader.stream():
                    pass
        finally:
            node.daemon.reconfigure(to_toml(node.config))


def test_only_operators_drain_a_daemon(node: Node, alice: User) -> None:
    """The last test here: the daemon ends."""
    opened = alice.call("OpenSession", open_request(job="drained"))
    with pytest.raises(Refused) as refused:
        alice.call("Drain", pb.DrainRequest())
    assert refused.value.code == "PERMISSION_DENIED"
    assert f"uid:{ALICE} is no operator of this daemon" in refused.value.details
    assert [line["user"] for line in node.audit("drain refused")] == [f"uid:{ALICE}"]
    assert not node.status().draining
    command = [sys.executable, "-m", "gyre_client", "drain", "--address", node.daemon.address]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "drains 1 open sessions and ends" in text
    assert node.daemon.process
    assert node.daemon.process.wait(DEADLINE_S) == 0
    (line,) = node.audit("drain asked")
    assert line["user"] == "uid:0"
    assert node.audit("session closed")[-1]["session"] not in opened.session_id
