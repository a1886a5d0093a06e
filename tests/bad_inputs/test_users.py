"""One user at another's data, sessions and jobs: refused, or answered with nothing of theirs."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from google.protobuf.message import Message
from gyre_protos.v1 import loader_pb2 as pb

from tests.bad_inputs.node import TOKENS, Node, running
from tests.bad_inputs.row import Row, cases
from tests.bad_inputs.table import users
from tests.preloaded.interpreter import Interpreter
from tests.users import Refused, User, open_folder, open_to_everybody

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become other users")

ALICE, BOB = 65533, 65534


@dataclass(frozen=True)
class Two:
    """Two users of a daemon.

    Attributes:
        node: the daemon, root's.
        alice: has a dataset and a session.
        bob: sends the rows.
        session_id: of Alice's session; the daemon tells it nobody else.
    """

    node: Node
    alice: User
    bob: User
    session_id: str


@pytest.fixture(scope="module")
def two(interpreter: Interpreter) -> Iterator[Two]:
    with open_folder() as folder:
        np.zeros(4096, np.int32).tofile(folder / "alice.bin")
        datasets = {
            "alice": {
                "uri": str(folder / "alice.bin"),
                "allow": [f"uid:{ALICE}", "job:train-*"],
                **TOKENS,
            },
            "tokens": {"uri": str(folder / "node" / "tokens"), "allow": ["anyone"], **TOKENS},
        }
        with running(folder / "node", interpreter, {"datasets": datasets}) as node:
            (folder / "node").chmod(0o755)
            open_to_everybody(node.address)
            alice, bob = (User(uid, node.address) for uid in (ALICE, BOB))
            opened = alice.call("OpenSession", users.opening(users.OPEN, generation=1))
            yield Two(node, alice, bob, opened.session_id)
            session = pb.CloseSessionRequest(session_id=opened.session_id)
            alice.call("CloseSession", session)
            for user in (alice, bob):
                user.close()


def sent(row: Row, two: Two) -> tuple[str, Message]:
    """A row's request, with the id of Alice's session."""
    method, request = row.sent
    request = type(request).FromString(request.SerializeToString())
    target = request.attach if method == "Stream" else request
    if getattr(target, "session_id", "") == users.SESSION:
        target.session_id = two.session_id
    return method, request


def check_alice_reads(two: Two) -> None:
    """Her session is there, and nobody has attached to it."""
    status = two.alice.call("GetStatus", pb.GetStatusRequest())
    (state,) = status.sessions
    assert (state.reader.job, state.user) == ("hers", f"uid:{ALICE}")


@pytest.mark.parametrize("row", cases(users.ROWS))
def test_what_is_another_users_is_refused(row: Row, two: Two) -> None:
    method, request = sent(row, two)
    with pytest.raises(Refused) as refused:
        two.bob.stream(method, [request], 1)
    error = refused.value
    assert (error.code, error.reason) == (row.status, row.reason), error.details
    assert re.search(row.text, error.details)
    assert two.session_id not in error.details
    check_alice_reads(two)


@pytest.mark.parametrize("row", cases(users.HARMLESS_ROWS))
def test_what_is_answered_has_nothing_of_another_users(row: Row, two: Two) -> None:
    answer = two.bob.call(*sent(row, two))
    said = str(answer)
    assert "alice" not in said
    assert two.session_id not in said
    assert f"uid:{ALICE}" not in said
    if row.sent[0] == "OpenSession":
        two.bob.call("CloseSession", pb.CloseSessionRequest(session_id=answer.session_id))
    check_alice_reads(two)


def test_she_reads_after_all_that(two: Two) -> None:
    attach = pb.StreamRequest(attach=pb.Attach(session_id=two.session_id))
    credit = pb.StreamRequest(credit=pb.Credit(num_batches=1))
    (answer,) = two.alice.stream("Stream", [attach, credit], 1)
    assert answer.batches.groups[0].first_step == 0
