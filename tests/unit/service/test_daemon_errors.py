"""Every error of the daemon has a status; a client gets its class, message and facts."""

import ast
import base64
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import gyre_client.errors as client_errors
import gyre_protos
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Outage, error_from
from gyre_daemon import errors
from gyre_daemon.service.guard import DOMAIN, STATUS_CODES, to_status

PROTOS = Path(gyre_protos.__file__).parent


def subclasses(root: type[errors.GyreError] = errors.GyreError) -> Iterator[type[errors.GyreError]]:
    yield root
    for child in root.__subclasses__():
        yield from subclasses(child)


EVERY_ERROR = sorted(set(subclasses()), key=lambda cls: cls.__name__)


def test_every_error_has_a_status_and_is_in_the_docstring() -> None:
    declared = {
        cls
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, errors.GyreError)
    }
    assert declared == set(EVERY_ERROR) == set(STATUS_CODES)
    drawn = str(errors.__doc__)
    assert all(cls.__name__ in drawn for cls in EVERY_ERROR), "the docstring draws the whole tree"


@pytest.mark.parametrize("cls", EVERY_ERROR)
def test_a_status_carries_class_message_and_facts(cls: type[errors.GyreError]) -> None:
    error = cls("shard a.tar is gone; restore it", {"shard": "a.tar", "offset": 512, "path": None})
    status = to_status(error)
    assert status.code == STATUS_CODES[cls].value[0]
    assert status.code != grpc.StatusCode.UNKNOWN.value[0]
    assert status.message == "shard a.tar is gone; restore it"
    info = error_details_pb2.ErrorInfo()
    assert [detail.Unpack(info) for detail in status.details] == [True]
    assert (info.reason, info.domain) == (cls.__name__, DOMAIN)
    assert dict(info.metadata) == {"shard": "a.tar", "offset": "512", "path": "None"}


@dataclass
class Row:
    """What `loader.proto` says of a reason."""

    status: str
    retry: str
    facts: set[str]


def rows() -> dict[str, Row]:
    """The table of reasons in `loader.proto`."""
    found: dict[str, Row] = {}
    for line in (PROTOS / "v1/loader.proto").read_text().splitlines():
        words = line.removeprefix("//").replace(",", " ").split()
        if not line.startswith("//   "):
            continue
        if len(words) > 3 and words[2] in ("yes", "no"):
            reason, status, retry, *facts = words
            found[reason] = Row(status, retry, set(facts) - {"-"})
        elif line.startswith("//" + " " * 40) and found:
            found[reason].facts.update(words)
    return found


def raised_facts() -> dict[str, set[str]]:
    """The names of facts that stand in the daemon's code where an error is made."""
    found: dict[str, set[str]] = {}
    names = {cls.__name__ for cls in EVERY_ERROR}
    for path in Path(errors.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            if node.func.id in names and len(node.args) > 1 and isinstance(node.args[1], ast.Dict):
                keys = [key.value for key in node.args[1].keys if isinstance(key, ast.Constant)]
                found.setdefault(node.func.id, set()).update(map(str, keys))
    return found


def test_the_protocol_lists_each_reason_with_status_facts_and_whether_to_retry() -> None:
    told = rows()
    assert set(told) == {cls.__name__ for cls in EVERY_ERROR}
    assert {name: row.status for name, row in told.items()} == {
        cls.__name__: code.name for cls, code in STATUS_CODES.items()
    }
    facts = raised_facts()
    untold = {name: keys - told[name].facts for name, keys in facts.items()}
    assert not any(untold.values()), untold
    assert len(facts) > 6, "the code was found"
    retried = {cls.__name__: is_retried(to_rpc_error(cls("no"))) for cls in EVERY_ERROR}
    assert {name: row.retry == "yes" for name, row in told.items()} == retried


class Failed(grpc.RpcError):
    """A call that failed, as the client sees it."""

    def __init__(self, status: grpc.Status) -> None:
        self._status = status

    def code(self) -> grpc.StatusCode:
        code: grpc.StatusCode = self._status.code
        return code

    def details(self) -> str:
        return str(self._status.details)

    def trailing_metadata(self) -> Any:
        return self._status.trailing_metadata


def to_rpc_error(error: errors.GyreError) -> grpc.RpcError:
    return Failed(rpc_status.to_status(to_status(error)))


def is_retried(failure: grpc.RpcError) -> bool:
    """Whether the client makes another attempt."""
    error = error_from(failure, parse_address("unix:/x"))
    try:
        Outage(60.0, clock=lambda: 0.0).next_pause_s(error)
    except type(error):
        return False
    return True


@pytest.mark.parametrize("cls", EVERY_ERROR)
def test_the_client_has_a_class_for_every_error(cls: type[errors.GyreError]) -> None:
    """Two classes are only bases, or stand for faults of the daemon itself."""
    if cls in (errors.GyreError, errors.InvalidInput):
        return
    assert cls.__name__ in {
        name for name, _ in inspect.getmembers(client_errors, inspect.isclass)
    } | {"ConfigError", "Draining"}


@pytest.mark.parametrize(
    ("cls", "code"),
    [
        (errors.ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
        (errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
        (errors.UnknownDataset, grpc.StatusCode.NOT_FOUND),
        (errors.ShardMissing, grpc.StatusCode.NOT_FOUND),
        (errors.NotAllowed, grpc.StatusCode.PERMISSION_DENIED),
        (errors.StorageUnavailable, grpc.StatusCode.UNAVAILABLE),
        (errors.CorruptSample, grpc.StatusCode.DATA_LOSS),
        (errors.CursorRejected, grpc.StatusCode.FAILED_PRECONDITION),
        (errors.Fenced, grpc.StatusCode.FAILED_PRECONDITION),
        (errors.LeaseExpired, grpc.StatusCode.ABORTED),
        (errors.Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.Draining, grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_each_error_has_its_status_code(cls: type[errors.GyreError], code: grpc.StatusCode) -> None:
    assert STATUS_CODES[cls] is code


def test_long_facts_are_cut() -> None:
    """gRPC carries status details in metadata, of which a client accepts 8 KiB by default."""
    status = to_status(
        errors.InvalidRequest("x" * 100_000, {"dataset": "y" * 100_000, "other": "z" * 100_000})
    )
    assert status.ByteSize() < 8000


@pytest.mark.parametrize(
    "letter",
    ["x", "\N{LATIN SMALL LETTER O WITH DIAERESIS}", "\n", "%", "\N{SLIGHTLY SMILING FACE}"],
)
def test_a_long_message_is_cut_to_fit_into_metadata(letter: str) -> None:
    """The percent-encoded message and the details, which repeat it in base64, stay below 8 KiB.

    gRPC drops answers above that at random.
    """
    facts = {str(key): letter * 1000 for key in range(5)}
    status = to_status(errors.UnknownDataset("no dataset: " + letter * 5000, facts))
    message = quote(status.message, safe=" !\"#$&'()*+,/:;<=>?@[\\]^`{|}")
    assert status.message.startswith("no dataset: " + letter * 100)
    assert 1900 < len(message) <= 2000
    assert len(message) + len(base64.b64encode(status.SerializeToString())) < 8000


def test_invalid_input_is_a_value_error() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.InvalidRequest, ValueError)
    assert not any(
        issubclass(cls, ValueError)
        for cls in EVERY_ERROR
        if not issubclass(cls, errors.InvalidInput)
    )


def test_the_first_error_of_nested_groups() -> None:
    first, second = errors.ShardMissing("a"), errors.NotAllowed("b")
    assert (
        errors.first_error(ExceptionGroup("", [ExceptionGroup("", [first, second]), second]))
        is first
    )
    assert errors.first_error(ExceptionGroup("", [second, first])) is second
