"""Several users at one daemon: who sees and reads which dataset."""

import os
from collections.abc import Callable
from typing import Any

import pytest
from gyre_client import Loader
from gyre_client.transport.arguments import transform_list
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1.loader_pb2_grpc import LoaderStub

from tests.channels import identified_channel
from tests.conftest import to_toml
from tests.integration.access.shared_node import (
    ALICE,
    BOB,
    CAROL,
    DEADLINE_S,
    ORDER,
    Node,
    attach,
    close,
    open_request,
    ref,
)
from tests.users import Refused, User

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become other users")


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
        ("ExplainStep", lambda name: pb.ExplainStepRequest(dataset=ref(name))),
        ("OpenSession", open_request),
        ("OpenSession", lambda name: open_request(name, weights={"open": 1})),
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
    }
    node.daemon.reconfigure(to_toml(mixed))
    try:
        for method, request_of in requests.items():
            for name in ("both", "outer"):
                with pytest.raises(Refused) as refused:
                    bob.call(method, request_of(name))
                assert refused.value.code == "PERMISSION_DENIED", method
                details = refused.value.details
                assert f"the mixture `{name}`, but not every source of it" in details
                assert "alice" not in details, "a source that one may not read has no name"
        (line,) = node.audit("session refused")[-1:]
        assert line["rule"] == "datasets.alice.allow", "the operator is told"
        with pytest.raises(Refused, match=r"only jobs named train\* may read `alice`"):
            alice.call("OpenSession", open_request("outer", "nightly"))
        opened = alice.call("OpenSession", open_request("outer", "train-1"))
        fewer = {**node.config["datasets"], "alice": node.dataset("alice", [f"uid:{BOB}"])}
        node.daemon.reconfigure(to_toml({**mixed, "datasets": fewer}))
        with pytest.raises(Refused) as refused:
            alice.stream("Stream", attach(opened), 1)
        assert refused.value.code == "ABORTED"
        assert node.audit("session closed")[-1]["reason"].startswith(
            f"uid:{ALICE} may no longer read `outer`"
        )
    finally:
        node.daemon.reconfigure(to_toml(node.config))


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


def test_lists_of_transforms_are_bounded_for_each_user(node: Node, alice: User, bob: User) -> None:
    """Each new one may be measured, which leaves files."""

    def described(user: User, length: int) -> int:
        options = {"name": "crop_or_pad", "field": "tokens", "length": length}
        chain = transform_list([options])
        request = pb.DescribeDatasetRequest(dataset=ref("open"), transforms=chain)
        (field,) = (each for each in user.call("DescribeDataset", request).fields if each.shape)
        return int(field.shape[0])

    num = 0
    with pytest.raises(Refused, match="more than 64 different lists of transforms") as refused:
        for num in range(1, 200):
            assert described(alice, num) == num
    assert (refused.value.code, refused.value.reason) == ("RESOURCE_EXHAUSTED", "Overloaded")
    assert num > 64
    assert described(alice, 1) == 1, "one that she has declared is no new one"
    assert described(bob, num) == num


def test_ways_to_pack_are_bounded_for_each_user(node: Node, bob: User) -> None:
    """To pack a large dataset takes minutes, and others wait for it."""
    reasons = []
    for length in range(1, 200):
        dataset = ref("open")
        dataset.pack.values["length"].integer = length
        dataset.pack.values["field"].text = "tokens"
        with pytest.raises(Refused) as refused:  # these samples cannot be packed
            bob.call("DescribeDataset", pb.DescribeDatasetRequest(dataset=dataset))
        reasons.append(refused.value.reason)
        if reasons[-1] == "Overloaded":
            break
    assert 32 < len(reasons) < 199
    assert set(reasons[:-1]) == {"InvalidRequest"}
    assert "ways to pack" in refused.value.details
