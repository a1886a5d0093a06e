"""Several users at one daemon: who sees, reads and ends what."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_client import Loader
from gyre_client.errors import NotAllowed
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1.loader_pb2_grpc import LoaderStub

from tests.channels import identified_channel
from tests.conftest import Daemon, to_toml
from tests.preloaded.interpreter import Interpreter
from tests.users import Refused, User, open_folder, open_to_everybody

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become other users")

CAROL, ALICE, BOB = 65532, 65533, 65534
DEADLINE_S = 120
ORDER = pb.OrderSpec(global_batch_size=20)


class Node:
    """A daemon as root's, with users."""

    def __init__(self, folder: Path, interpreter: Interpreter) -> None:
        self.folder = folder
        (folder / "data").mkdir()
        for name in ("open", "alice", "secret"):
            np.arange(4000, dtype=np.uint16).tofile(folder / "data" / f"{name}.bin")
        config = folder / "gyre.toml"
        self.config: dict[str, Any] = {
            "listen": [f"unix:{folder}/run/gyre.sock", "tcp:127.0.0.1:0"],
            "metrics_listen": "tcp:127.0.0.1:0",
            "index_dir": str(folder / "index"),
            "audit_log": str(folder / "audit.log"),
            "drain_timeout_s": 1.0,
            "datasets": {
                "open": self.dataset("open", ["anyone"]),
                "alice": self.dataset("alice", [f"uid:{ALICE}", "job:train*"]),
                "secret": self.dataset("secret", None),
            },
        }
        config.write_text(to_toml(self.config))
        address = self.config["listen"][0]
        self.daemon = Daemon(config, address, folder / "log", {}, interpreter=interpreter)
        self.daemon.start()
        open_to_everybody(address)
        self.users = [User(uid, address) for uid in (ALICE, BOB)]

    def dataset(self, name: str, allow: list[str] | None) -> Mapping[str, Any]:
        """The table of a dataset."""
        uri = str(self.folder / "data" / f"{name}.bin")
        table = {"uri": uri, "format": "tokens", "dtype": "uint16", "sequence_length": 10}
        return table | ({"allow": allow} if allow else {})

    def audit(self, event: str) -> list[dict[str, Any]]:
        """The lines of the audit log's file about an event."""
        lines = map(json.loads, (self.folder / "audit.log").read_text().splitlines())
        return [line for line in lines if line["event"] == event]

    def status(self) -> pb.DaemonStatus:
        """What an operator sees."""
        with identified_channel(self.daemon.address) as channel:
            return LoaderStub(channel).GetStatus(pb.GetStatusRequest(), timeout=DEADLINE_S)

    def metrics(self) -> str:
        """The metrics, as every user of the machine can read them."""
        (ready,) = [each for each in self.daemon.events() if each["event"] == "ready"]
        url = f"http://{ready['metrics'].removeprefix('tcp:')}/metrics"
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
            text: str = answer.read().decode()
        return text


@pytest.fixture(scope="module")
def node(interpreter: Interpreter) -> Iterator[Node]:
    with open_folder() as folder:
        node = Node(folder, interpreter)
        yield node
        for user in node.users:
            user.close()
        node.daemon.stop()


@pytest.fixture
def alice(node: Node) -> User:
    return node.users[0]


@pytest.fixture
def bob(node: Node) -> User:
    return node.users[1]


def ref(name: str) -> pb.DatasetRef:
    return pb.DatasetRef(name=name)


def open_request(
    dataset: str = "open", job: str = "train", generation: int = 1, **more: Any
) -> pb.OpenSessionRequest:
    return pb.OpenSessionRequest(
        dataset=ref(dataset),
        order=pb.OrderSpec(global_batch_size=20),
        reader=pb.Reader(job=job, world_size=1, generation=generation),
        **more,
    )


def close(user: User, opened: pb.SessionOpened) -> None:
    user.call("CloseSession", pb.CloseSessionRequest(session_id=opened.session_id))


def attach(opened: pb.SessionOpened) -> list[pb.StreamRequest]:
    return [
        pb.StreamRequest(attach=pb.Attach(session_id=opened.session_id)),
        pb.StreamRequest(credit=pb.Credit(num_batches=2)),
    ]


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return True


def test_one_sees_what_one_may_read(node: Node, alice: User, bob: User) -> None:
    names = [
        [each.name for each in user.call("ListDatasets", pb.ListDatasetsRequest()).datasets]
        for user in (alice, bob)
    ]
    assert names == [["alice", "open"], ["open"]]
    with identified_channel(node.daemon.address) as channel:
        listed = LoaderStub(channel).ListDatasets(pb.ListDatasetsRequest(), timeout=DEADLINE_S)
    assert [each.name for each in listed.datasets] == ["alice", "open", "secret"]


@pytest.mark.parametrize(
    ("method", "request_of"),
    [
        ("DescribeDataset", lambda name: pb.DescribeDatasetRequest(dataset=ref(name))),
        ("IndexDataset", lambda name: pb.IndexDatasetRequest(dataset=ref(name), checksums=True)),
        ("LintDataset", lambda name: pb.LintDatasetRequest(dataset=ref(name))),
        ("PlanStep", lambda name: pb.PlanStepRequest(dataset=ref(name), order=ORDER)),
        ("PlanCost", lambda name: pb.PlanCostRequest(dataset=ref(name), order=ORDER)),
        ("PlanMixture", lambda name: pb.PlanMixtureRequest(dataset=ref(name), order=ORDER)),
        ("LocateStep", lambda name: pb.LocateStepRequest(dataset=ref(name))),
        ("ChangeWeights", lambda name: pb.ChangeWeightsRequest(dataset=ref(name), from_step=9)),
        ("ExplainStep", lambda name: pb.ExplainStepRequest(dataset=ref(name))),
        ("OpenSession", open_request),
        ("OpenSession", lambda name: open_request(name, join=pb.JOIN_ROTATE)),
    ],
)
def test_a_dataset_that_one_may_not_read_is_one_that_does_not_exist(
    method: str, request_of: Callable[[str], Any], node: Node, bob: User
) -> None:
    answers = []
    for name in ("secret", "alice", "absent"):
        with pytest.raises(Refused) as refused:
            bob.call(method, request_of(name))
        answers.append((refused.value.code, refused.value.details.replace(name, "X")))
    assert answers == [("NOT_FOUND", "no dataset is named 'X'; this daemon serves: open")] * 3
    event = "session refused" if method == "OpenSession" else "dataset refused"
    lines = node.audit(event)[-3 if method == "OpenSession" else -2 :][:2]
    assert [(line["user"], line["dataset"], line["rule"]) for line in lines] == [
        (f"uid:{BOB}", name, f"datasets.{name}.allow") for name in ("secret", "alice")
    ]


def test_a_mixture_needs_the_rights_of_its_sources(node: Node, alice: User, bob: User) -> None:
    mixture = {"weights": {"open": 1, "alice": 1}, "block": 16, "allow": ["anyone"]}
    outer = {"weights": {"both": 1, "open": 1}, "block": 16, "allow": ["anyone"]}
    mixed = {**node.config, "mixtures": {"both": mixture, "outer": outer}}
    requests: dict[str, Callable[[str], Any]] = {
        "OpenSession": open_request,
        "DescribeDataset": lambda name: pb.DescribeDatasetRequest(dataset=ref(name)),
        "PlanStep": lambda name: pb.PlanStepRequest(dataset=ref(name), order=ORDER),
        "PlanMixture": lambda name: pb.PlanMixtureRequest(dataset=ref(name), order=ORDER),
        "LocateStep": lambda name: pb.LocateStepRequest(dataset=ref(name)),
        "ChangeWeights": lambda name: pb.ChangeWeightsRequest(dataset=ref(name), from_step=9),
    }
    node.daemon.reconfigure(to_toml(mixed))
    try:
        for method, request_of in requests.items():
            for name in ("both", "outer"):
                with pytest.raises(Refused) as refused:
                    bob.call(method, request_of(name))
                assert refused.value.code == "PERMISSION_DENIED", method
                assert f"the mixture `{name}`, but not its source" in refused.value.details
        with pytest.raises(Refused, match=r"only jobs named train\* may read `alice`"):
            alice.call("OpenSession", open_request("outer", "nightly"))
        opened = alice.call("OpenSession", open_request("outer", "train-1"))
        fewer = {**node.config["datasets"], "alice": node.dataset("alice", [f"uid:{BOB}"])}
        node.daemon.reconfigure(to_toml({**mixed, "datasets": fewer}))
        with pytest.raises(Refused) as refused:
            alice.stream("Stream", attach(opened), 1)
        assert refused.value.code == "ABORTED"
        assert node.audit("session closed")[-1]["reason"].startswith(
            f"uid:{ALICE} may no longer read `alice`"
        )
    finally:
        node.daemon.reconfigure(to_toml(node.config))


def test_only_operators_have_shards_scanned_by_ray(bob: User) -> None:
    with pytest.raises(Refused) as refused:
        bob.call("IndexDataset", pb.IndexDatasetRequest(dataset=ref("open"), engine="ray"))
    assert refused.value.code == "PERMISSION_DENIED"
    assert "no operator" in refused.value.details


def test_a_job_needs_a_name_that_the_dataset_admits(node: Node, alice: User) -> None:
    with pytest.raises(Refused) as refused:
        alice.call("OpenSession", open_request("alice", "nightly"))
    assert refused.value.code == "PERMISSION_DENIED"
    assert "only jobs named train* may read `alice`" in refused.value.details
    close(alice, alice.call("OpenSession", open_request("alice", "train-1")))
    line = node.audit("session refused")[-1]
    assert (line["user"], line["pid"], line["job"]) == (f"uid:{ALICE}", alice.pid, "nightly")
    assert (line["rule"], line["reason"]) == ("datasets.alice.allow", "NotAllowed")


def test_without_a_list_the_members_of_the_daemons_group_may_read(node: Node) -> None:
    """They are no operators."""
    member = User(CAROL, node.daemon.address, groups=[ALICE, os.getegid()])
    try:
        listed = member.call("ListDatasets", pb.ListDatasetsRequest()).datasets
        assert [each.name for each in listed] == ["open", "secret"]
        close(member, member.call("OpenSession", open_request("secret")))
        with pytest.raises(Refused, match="no operator"):
            member.call("Drain", pb.DrainRequest())
    finally:
        member.close()


def test_over_tcp_without_credentials_one_reads_what_anyone_may(node: Node) -> None:
    (ready,) = [each for each in node.daemon.events() if each["event"] == "ready"]
    address = ready["listen"][1]
    with Loader("open", batch_size=20, address=address) as loader:
        assert len(next(loader)["sample_id"]) == 20
    with pytest.raises(Exception, match="no dataset is named 'secret'; this daemon serves: open"):
        Loader("secret", batch_size=20, address=address)


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


def test_metrics_name_no_jobs_where_users_or_datasets_are_apart(node: Node, alice: User) -> None:
    opened = alice.call("OpenSession", open_request(job="confidential"))
    text = node.metrics()
    assert "confidential" not in text
    assert 'gyre_job_sessions{job_name="_others",user=""} 1.0' in text
    close(alice, opened)


def test_the_audit_log_says_who_read_what(node: Node, alice: User, bob: User) -> None:
    opened = alice.call("OpenSession", open_request(job="audited"))
    alice.stream("Stream", attach(opened), 1)
    eventually(lambda: node.audit("session closed")[-1]["job"] == "audited")
    begun, ended = node.audit("session open")[-1], node.audit("session closed")[-1]
    assert begun["session"] == ended["session"] != opened.session_id
    for line in (begun, ended):
        assert (line["user"], line["pid"]) == (f"uid:{ALICE}", alice.pid)
        assert (line["dataset"], line["rank"]) == ("open", 0)
    assert (ended["batches"], ended["bytes"]) == (2, 2 * 640), "40 ids and token rows, aligned"
    assert ended["seconds"] >= 0
    with pytest.raises(Refused):
        bob.call("OpenSession", open_request("secret\n\x1b[2J\x9b"))
    raw = (node.folder / "audit.log").read_text()
    assert raw.isascii()
    assert "\x1b" not in raw
    assert (node.folder / "audit.log").stat().st_mode & 0o777 == 0o600
    assert {line["event"] for line in node.daemon.events()} >= {"session open", "session closed"}


def test_who_loses_access_is_told_so(node: Node, alice: User, bob: User) -> None:
    reading = alice.call("OpenSession", open_request("alice", "train"))
    other = bob.call("OpenSession", open_request(job="stays"))
    (node.folder / "audit.log").rename(node.folder / "audit.log.1")
    datasets = node.config["datasets"] | {"alice": node.dataset("alice", [f"uid:{BOB}"])}
    event = node.daemon.reconfigure(to_toml(node.config | {"datasets": datasets}))
    try:
        assert (event["event"], event["changed"]) == ("reloaded", ["alice"])
        with pytest.raises(Refused) as refused:
            alice.stream("Stream", attach(reading), 1)
        assert refused.value.code == "ABORTED"
        (closed,) = node.audit("session closed")
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
