"""Every error of the daemon has a status, and travels to a client with its reason, its sentence and its facts."""

import base64
import inspect
from collections.abc import Iterator
from urllib.parse import quote

import grpc
import gyre_client.errors as client_errors
import pytest
from google.rpc import error_details_pb2
from gyre_daemon import errors
from gyre_daemon.service.status import DOMAIN, STATUS_CODES, to_status


def subclasses(root: type[errors.GyreError] = errors.GyreError) -> Iterator[type[errors.GyreError]]:
    yield root
    for child in root.__subclasses__():
        yield from subclasses(child)


EVERY_ERROR = sorted(set(subclasses()), key=lambda cls: cls.__name__)


def test_the_tree_is_whole() -> None:
    declared = {cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.GyreError)}
    assert declared == set(EVERY_ERROR) == set(STATUS_CODES)
    drawn = str(errors.__doc__)
    assert all(cls.__name__ in drawn for cls in EVERY_ERROR), "the docstring draws the whole tree"


@pytest.mark.parametrize("cls", EVERY_ERROR)
def test_every_error_travels(cls: type[errors.GyreError]) -> None:
    error = cls("shard a.tar is gone; restore it", {"shard": "a.tar", "offset": 512, "path": None})
    status = to_status(error)
    assert status.code == STATUS_CODES[cls].value[0]
    assert status.code != grpc.StatusCode.UNKNOWN.value[0]
    assert status.message == "shard a.tar is gone; restore it"
    info = error_details_pb2.ErrorInfo()
    assert [detail.Unpack(info) for detail in status.details] == [True]
    assert (info.reason, info.domain) == (cls.__name__, DOMAIN)
    assert dict(info.metadata) == {"shard": "a.tar", "offset": "512", "path": "None"}


@pytest.mark.parametrize("cls", EVERY_ERROR)
def test_clients_know_every_reason(cls: type[errors.GyreError]) -> None:
    """A client raises an error of the same name, or one for the daemon's own faults."""
    if cls in (errors.GyreError, errors.InvalidInput):  # never raised by themselves for a client's doing
        return
    assert cls.__name__ in {name for name, _ in inspect.getmembers(client_errors, inspect.isclass)} | {
        "ConfigError",
        "Draining",
    }


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
def test_the_table(cls: type[errors.GyreError], code: grpc.StatusCode) -> None:
    assert STATUS_CODES[cls] is code


def test_what_a_client_sent_cannot_swell_the_answer() -> None:
    """Status details travel as metadata, of which gRPC takes 8 KiB by default."""
    status = to_status(errors.InvalidRequest("x" * 100_000, {"dataset": "y" * 100_000, "other": "z" * 100_000}))
    assert status.ByteSize() < 8000


@pytest.mark.parametrize("letter", ["x", "\N{LATIN SMALL LETTER O WITH DIAERESIS}", "\n", "%", "\N{SLIGHTLY SMILING FACE}"])
def test_a_sentence_has_room_in_metadata_as_it_travels(letter: str) -> None:
    """Percent-encoded beside the details that repeat it in base64: gRPC drops some answers above 8 KiB, at random."""
    facts = {str(key): letter * 1000 for key in range(5)}
    status = to_status(errors.UnknownDataset("no dataset: " + letter * 5000, facts))
    message = quote(status.message, safe=" !\"#$&'()*+,/:;<=>?@[\\]^`{|}")
    assert status.message.startswith("no dataset: " + letter * 100)
    assert 1900 < len(message) <= 2000
    assert len(message) + len(base64.b64encode(status.SerializeToString())) < 8000


def test_mistakes_of_the_caller_are_value_errors() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.InvalidRequest, ValueError)
    assert not any(issubclass(cls, ValueError) for cls in EVERY_ERROR if not issubclass(cls, errors.InvalidInput))


def test_the_first_error_of_nested_groups() -> None:
    first, second = errors.ShardMissing("a"), errors.NotAllowed("b")
    assert errors.first_error(ExceptionGroup("", [ExceptionGroup("", [first, second]), second])) is first
    assert errors.first_error(ExceptionGroup("", [second, first])) is second
