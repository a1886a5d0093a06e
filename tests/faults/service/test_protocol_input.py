"""Bytes and values that no client of ours sends: each is refused by name, at once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from gyre_client import Loader
from gyre_client.errors import InvalidRequest
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1.loader_pb2_grpc import LoaderStub

from tests.channels import identified_channel
from tests.conftest import Daemon, to_toml
from tests.preloaded.interpreter import Interpreter

DEADLINE_S = 120.0
LEASE_S = 3600.0  # what waits for the end of a lease fails in these tests
SERVICE = "/gyre_protos.v1.Loader"
INVALID = grpc.StatusCode.INVALID_ARGUMENT
MALFORMED = {
    "cut": b"\x0a\xff",
    "no_wire_type": b"\xff\xff\xff",
    "unended_group": b"\x0b" * 40,
    "no_utf8": b"\x0a\x04\x0a\x02\xff\xfe",
    "deep": b"\x0a\x02" * 5000,
}


@pytest.fixture(scope="module")
def daemon(interpreter: Interpreter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all tests of this file: none of them may harm it."""
    folder = tmp_path_factory.mktemp("daemon")
    np.arange(800, dtype=np.int16).tofile(folder / "numbers.bin")
    config: dict[str, Any] = {
        "listen": [f"unix:{folder}/run/gyre.sock"],
        "index_dir": str(folder / "index"),
        "lease_s": LEASE_S,
        "datasets": {
            "numbers": {
                "uri": str(folder / "numbers.bin"),
                "format": "tokens",
                "dtype": "int16",
                "sequence_length": 8,
            }
        },
    }
    path = folder / "gyre.toml"
    path.write_text(to_toml(config))
    daemon = Daemon(path, config["listen"][0], folder / "log", {}, interpreter=interpreter).start()
    yield daemon
    assert daemon.stop() == 0


@pytest.fixture
def channel(daemon: Daemon) -> Iterator[grpc.Channel]:
    with identified_channel(daemon.address) as channel:
        yield channel


def refusal(method: Any, request: Any, **options: Any) -> tuple[grpc.StatusCode, str]:
    """How a call ends."""
    with pytest.raises(grpc.RpcError) as refused:
        answers = method(request, timeout=DEADLINE_S, **options)
        list(answers)  # where it has several
    return refused.value.code(), refused.value.details() or ""


def good_request() -> pb.OpenSessionRequest:
    return pb.OpenSessionRequest(
        dataset=pb.DatasetRef(name="numbers"),
        order=pb.OrderSpec(global_batch_size=4),
        reader=pb.Reader(job="job", world_size=1, generation=1),
    )


@pytest.mark.parametrize("kind", MALFORMED)
def test_what_is_no_message_is_refused_in_one_sentence(channel: grpc.Channel, kind: str) -> None:
    """In calls of every form: one message or many, one answer or many."""
    data = MALFORMED[kind]
    raw: dict[str, Any] = {"request_serializer": None, "response_deserializer": None}
    for name in ("DescribeDataset", "OpenSession"):
        code, text = refusal(channel.unary_unary(f"{SERVICE}/{name}", **raw), data)
        assert code is INVALID
        assert text.startswith("the request is no message of the protocol: ")
    assert refusal(channel.unary_stream(f"{SERVICE}/IndexDataset", **raw), data)[0] is INVALID
    stream = channel.stream_stream(f"{SERVICE}/Stream", **raw)
    assert refusal(stream, iter([data]))[0] is INVALID
    assert LoaderStub(channel).GetStatus(pb.GetStatusRequest(), timeout=DEADLINE_S).pid


@pytest.mark.parametrize("kind", ["malformed", "second_attach", "empty"])
def test_a_bad_message_ends_an_open_stream_at_once(channel: grpc.Channel, kind: str) -> None:
    """The lease of an hour has nothing to do with it; the memory is free again."""
    stub = LoaderStub(channel)
    opened = stub.OpenSession(good_request(), timeout=DEADLINE_S)
    attach = pb.StreamRequest(attach=pb.Attach(session_id=opened.session_id)).SerializeToString()
    bad = {"malformed": b"\xff\xff\xff", "second_attach": attach, "empty": b""}[kind]
    method = channel.stream_stream(
        f"{SERVICE}/Stream", request_serializer=None, response_deserializer=None
    )
    code, text = refusal(method, iter([attach, bad]))
    assert code is INVALID
    assert "message" in text
    status = stub.GetStatus(pb.GetStatusRequest(), timeout=DEADLINE_S)
    assert not status.sessions


def changed(**fields: Any) -> pb.OpenSessionRequest:
    request = good_request()
    for key, value in fields.items():
        target: Any = request
        *path, last = key.split("__")
        for part in path:
            target = getattr(target, part)
        setattr(target, last, value)
    return request


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (changed(order__mode=77), "order mode 77"),
        (changed(order__tail=-1), "tail -1"),
        (changed(reader__job="a\x1b[31mb"), "characters that cannot be printed"),
        (changed(reader__job="a\nb"), "characters that cannot be printed"),
        (changed(reader__job="\u202egnp.exe"), "characters that cannot be printed"),
        (changed(reader__job="j" * 201), "1 to 200 characters"),
        (changed(num_epochs=2**64 - 1), "num_epochs is 18446744073709551615"),
        (changed(prefetch_batches=2**32 - 1), "prefetch_batches is 4294967295"),
        (changed(step=2**64 - 1), "step 18446744073709551615 is beyond any training"),
        (changed(order__global_batch_size=2**64 - 1), "global batch size"),
        (changed(reader__rank=2**32 - 1), "rank 4294967295 of world size 1"),
    ],
    ids=lambda value: value.replace(" ", "_")[:30] if isinstance(value, str) else "",
)
def test_a_value_out_of_its_range_is_refused_by_name(
    channel: grpc.Channel, request_: pb.OpenSessionRequest, words: str
) -> None:
    code, text = refusal(LoaderStub(channel).OpenSession, request_)
    assert (code, words in text) == (INVALID, True), text
    assert text.isprintable()


def test_a_plan_for_more_epochs_than_any_training_has_is_refused(channel: grpc.Channel) -> None:
    request = pb.PlanCostRequest(
        dataset=pb.DatasetRef(name="numbers"),
        order=pb.OrderSpec(global_batch_size=4),
        num_epochs=2**64 - 1,
    )
    code, text = refusal(LoaderStub(channel).PlanCost, request)
    assert code is INVALID
    assert "num_epochs is 18446744073709551615" in text


def test_a_request_that_is_too_long_is_refused_compressed_or_not(channel: grpc.Channel) -> None:
    """64 MiB of zeros are 64 KiB when they are compressed."""
    big = pb.DescribeDatasetRequest(dataset=pb.DatasetRef(name="\0" * (64 << 20)))
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
        code, text = refusal(LoaderStub(channel).DescribeDataset, big, compression=compression)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_size": True}, "batch_size is True; it must be a whole number"),
        ({"seed": False}, "seed is False; it must be a whole number"),
        ({"epochs": True}, "epochs is True; it must be a whole number"),
        ({"reattach_timeout_s": float("nan")}, "reattach_timeout_s is nan"),
        ({"reattach_timeout_s": -1}, "reattach_timeout_s is -1"),
        ({"reattach_timeout_s": float("inf")}, "reattach_timeout_s is inf"),
        ({"reattach_timeout_s": "1"}, "reattach_timeout_s is '1'"),
        ({"job": "a\x1b[31mb"}, "without control characters"),
        ({"job": "\udc80"}, "which is not UTF-8"),
        ({"job": 3}, "job is 3; it must be a string"),
    ],
)
def test_the_client_refuses_a_value_before_any_call(
    arguments: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Nobody listens at this address."""
    address = f"unix:{tmp_path}/nobody.sock"
    with pytest.raises(InvalidRequest) as refused:
        Loader("numbers", **{"batch_size": 4, "address": address, **arguments})
    assert words in str(refused.value)
