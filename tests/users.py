"""Users of a daemon: processes of other uids that call it by the bare protocol."""

import contextlib
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from gyre_protos.v1.loader_pb2_grpc import LoaderStub

from tests.channels import identified_channel

_REPOSITORY = Path(__file__).parents[1]
_DEADLINE_S = 120


class Refused(Exception):
    """A call that the daemon answered with an error.

    Attributes:
        code: of gRPC.
        details: the message.
        reason: the class of the error; empty where the daemon sent none.
    """

    def __init__(self, code: str, details: str, reason: str = "") -> None:
        super().__init__(code, details, reason)
        self.code = code
        self.details = details
        self.reason = reason


class User:
    """A process of one user that makes one call at a time, over a channel to one daemon."""

    def __init__(self, uid: int, address: str, groups: Sequence[int] = ()) -> None:
        """Connect.

        Args:
            uid: its user and group.
            address: of the daemon.
            groups: the other groups that it is in.
        """
        command = [sys.executable, "-m", "tests.users", str(uid), address, *map(str, groups)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_REPOSITORY
        )
        self.pid = self._process.pid

    def call(self, method: str, request: Message) -> Any:
        """The answer of a method.

        Raises:
            Refused: the daemon answered with an error.
        """
        (answer,) = self.stream(method, [request], 1)
        return answer

    def stream(self, method: str, requests: Sequence[Message], num_answers: int) -> Any:
        """The first answers of a method, which is cancelled then.

        Args:
            method: its name.
            requests: one, or those of a stream, which stays open behind the last.
            num_answers: how many to wait for, at most.

        Raises:
            Refused: the daemon answered with an error.
        """
        pipe, answers = self._process.stdin, self._process.stdout
        assert pipe
        assert answers
        pickle.dump((method, requests, num_answers), pipe)
        pipe.flush()
        answer = pickle.load(answers)
        if isinstance(answer, Refused):
            raise answer
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(_DEADLINE_S)
        self._process.stdout.close()


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A folder in which every user may reach what its own mode allows."""
    folder = Path(tempfile.mkdtemp(prefix="gyre-users-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def open_to_everybody(address: str) -> None:
    """Let every user connect to a daemon's sockets."""
    path = Path(address.removeprefix("unix:"))
    path.parent.chmod(0o755)
    for socket in (path, path.with_name(f"{path.name}.side")):
        socket.chmod(0o666)


def serve(uid: int, address: str, groups: Sequence[int]) -> None:
    """Make the calls that come on standard input, as this user."""
    os.setgroups(groups)
    os.setgid(uid)
    os.setuid(uid)
    with identified_channel(address) as channel:
        stub = LoaderStub(channel)
        with contextlib.suppress(EOFError):
            while True:
                pickle.dump(_answers(stub, *pickle.load(sys.stdin.buffer)), sys.stdout.buffer)
                sys.stdout.flush()


def _answers(
    stub: LoaderStub, method: str, requests: Sequence[Message], num_answers: int
) -> list[Message] | Refused:
    over = threading.Event()

    def held_open() -> Iterator[Message]:
        yield from requests
        over.wait(_DEADLINE_S)

    try:
        request = held_open() if method == "Stream" else requests[0]
        answer = getattr(stub, method)(request, timeout=_DEADLINE_S)
        if isinstance(answer, Message):
            return [answer]
        answers = [each for _, each in zip(range(num_answers), answer, strict=False)]
        answer.cancel()
    except grpc.RpcError as error:
        return Refused(error.code().name, str(error.details()), reason_of(error))
    finally:
        over.set()
    return answers


def reason_of(error: grpc.RpcError) -> str:
    """The class of an error, as the daemon sent it; empty where it sent none."""
    info = error_details_pb2.ErrorInfo()
    status = rpc_status.from_call(cast("grpc.Call", error))
    if status is None or not status.details or not status.details[0].Unpack(info):
        return ""
    return str(info.reason)


if __name__ == "__main__":
    # not `serve` of __main__: the process that reads finds the classes of answers by their module
    from tests import users

    users.serve(int(sys.argv[1]), sys.argv[2], [int(group) for group in sys.argv[3:]])
