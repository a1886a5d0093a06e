"""Over TLS: a stream that goes on is ended when the credential of its caller ends."""

import contextlib
import itertools
import queue
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from gyre_client import Loader
from gyre_client.errors import NotAuthenticated
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1.loader_pb2_grpc import LoaderStub

from tests.certificates import Certified
from tests.conftest import StartDaemon
from tests.secure_daemons import SecureDaemon, environment, start_secure, write_secret
from tests.waiting import until

DEADLINE_S = 120.0
SECOND_TOKEN = "s" * 32
# How long a credential is valid. A machine so busy that nothing can be opened in this time
# gets the next one.
VALID_S = (6.0, 30.0, 90.0)
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED

Streams = dict[str, "grpc.Call"]


@pytest.fixture
def secure(gyred: StartDaemon, tmp_path: Path) -> SecureDaemon:
    """A daemon that knows callers by certificates and tokens; silence is allowed for an hour."""
    settings = {"lease_s": 3600.0}
    return start_secure(gyred, tmp_path / "secure", with_client_ca=True, settings=settings)


def channel_of(secure: SecureDaemon, pair: Certified) -> grpc.Channel:
    credentials = grpc.ssl_channel_credentials(
        secure.authority.path.read_bytes(), pair.key.read_bytes(), pair.certificate.read_bytes()
    )
    return grpc.secure_channel(secure.address.removeprefix("tls:"), credentials)


def opened(channel: grpc.Channel, token: str, silence: "queue.SimpleQueue[None]") -> Streams:
    """Both streams of a session whose client says nothing more; empty where it was too late."""
    header = (("authorization", f"Bearer {token}"),) if token else ()
    stub = LoaderStub(channel)
    request = pb.OpenSessionRequest(
        dataset=pb.DatasetRef(name="numbers"),
        order=pb.OrderSpec(global_batch_size=4),
        reader=pb.Reader(job="silent", world_size=1),
        transport=pb.TRANSPORT_INLINE,
    )

    def requests(session_id: str) -> Iterator[pb.StreamRequest]:
        yield pb.StreamRequest(attach=pb.Attach(session_id=session_id))
        silence.get()

    read_payload = channel.unary_stream(
        "/gyre_protos.v1.Loader/ReadPayload",
        request_serializer=pb.ReadPayloadRequest.SerializeToString,
        response_deserializer=bytes,
    )
    with contextlib.suppress(grpc.RpcError):  # the credential has ended already
        session_id = stub.OpenSession(request, timeout=DEADLINE_S, metadata=header).session_id
        payload = read_payload(pb.ReadPayloadRequest(session_id=session_id), metadata=header)
        stream = stub.Stream(requests(session_id), metadata=header)
        stream.initial_metadata()
        return {"Stream": stream, "ReadPayload": payload}
    return {}


def ended(call: Any) -> tuple[grpc.StatusCode, str]:
    """How a stream ends."""
    with pytest.raises(grpc.RpcError) as refused:
        for _ in call:
            pass
    return refused.value.code(), str(refused.value.details())


def test_streams_end_with_the_certificate_of_their_caller(secure: SecureDaemon) -> None:
    silence: queue.SimpleQueue[None] = queue.SimpleQueue()
    for valid_s in VALID_S:
        pair = secure.authority.sign("brief", days=valid_s / 86400)
        with channel_of(secure, pair) as channel:
            if streams := opened(channel, "", silence):
                code, told = ended(streams["Stream"])
                assert (code, "certificate has expired" in told) == (UNAUTHENTICATED, True), told
                silence.put(None)
                return
    pytest.fail("the machine is too slow to open a stream")


def test_streams_end_with_the_token_of_their_caller(secure: SecureDaemon) -> None:
    silence: queue.SimpleQueue[None] = queue.SimpleQueue()
    pair = secure.authority.sign("lasting")
    with channel_of(secure, pair) as channel:
        for number, valid_s in enumerate(VALID_S):
            end = datetime.now(UTC) + timedelta(seconds=valid_s)
            write_secret(secure.token_file, f"{number:032} {end.isoformat()}\n{SECOND_TOKEN}\n")
            reloads = number + 1
            until(lambda reloads=reloads: num_reloads(secure) == reloads)  # type: ignore[misc]
            if streams := opened(channel, f"{number:032}", silence):
                code, told = ended(streams["Stream"])
                assert code is UNAUTHENTICATED, told
                assert "the token 'ci' has expired" in told
                # The session has ended meanwhile, which may end this stream first.
                with contextlib.suppress(grpc.RpcError):
                    for _ in streams["ReadPayload"]:  # type: ignore[attr-defined]
                        pass
                assert streams["ReadPayload"].code() in (
                    UNAUTHENTICATED,
                    grpc.StatusCode.ABORTED,
                    grpc.StatusCode.OK,
                )
                silence.put(None)
                return
    pytest.fail("the machine is too slow to open a stream")


def num_reloads(secure: SecureDaemon) -> int:
    return sum(event["event"] == "tokens reloaded" for event in secure.daemon.events())


def test_a_job_goes_on_with_the_certificate_that_its_files_hold_then(
    secure: SecureDaemon, tmp_path: Path
) -> None:
    with Loader("numbers", batch_size=8, address=secure.daemon.address) as loader:
        expected = [batch["sample_id"].tolist() for batch in itertools.islice(loader.stream(), 50)]
    for valid_s in VALID_S:
        mine = secure.authority.sign("job", days=valid_s / 86400)
        with environment(ca=secure.authority.path, pair=mine):
            try:
                loader = Loader("numbers", batch_size=8, address=secure.address, prefetch_batches=2)
            except NotAuthenticated:
                continue
            with loader:
                batches = loader.stream()
                seen = [next(batches)["sample_id"].tolist()]
                mine.replace(secure.authority.sign("renewed"))
                until(lambda: "certificate has expired" in secure.daemon.log_path.read_text())
                seen += [next(batches)["sample_id"].tolist() for _ in range(49)]
        assert seen == expected
        return
    pytest.fail("the machine is too slow to open a loader")
