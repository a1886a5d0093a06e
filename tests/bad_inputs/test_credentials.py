"""A call over TLS without a good token is refused, and no log repeats what was sent."""

from collections.abc import Iterator

import grpc
import pytest
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1.loader_pb2_grpc import LoaderStub

from tests.bad_inputs.node import CALL_DEADLINE_S, check_refusal, running
from tests.bad_inputs.row import Row, cases
from tests.bad_inputs.table import credentials
from tests.certificates import Authority
from tests.preloaded.interpreter import Interpreter
from tests.secure_daemons import free_port, write_secret


@pytest.fixture(scope="module")
def stub(
    tmp_path_factory: pytest.TempPathFactory, interpreter: Interpreter
) -> Iterator[LoaderStub]:
    """Calls a daemon over TLS that knows one good token and one that has expired."""
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder / "authority")
    pair = authority.sign("daemon")
    known = f"{credentials.GOOD}\n{credentials.EXPIRED} 2020-01-01T00:00:00Z\n"
    tokens = write_secret(folder / "ci.token", known)
    address = f"127.0.0.1:{free_port()}"
    more = {
        "listen": [f"unix:{folder}/node/run/gyre.sock", f"tls:{address}"],
        "tls_certificate": str(pair.certificate),
        "tls_key": str(pair.key),
        "tokens": {"ci": str(tokens)},
    }
    trusted = grpc.ssl_channel_credentials(authority.path.read_bytes())
    with (
        running(folder / "node", interpreter, more),
        grpc.secure_channel(address, trusted) as channel,
    ):
        yield LoaderStub(channel)


@pytest.mark.parametrize("row", cases(credentials.ROWS))
def test_a_bad_credential_is_refused(row: Row, stub: LoaderStub) -> None:
    metadata = () if row.sent is None else (("authorization", row.sent),)
    with pytest.raises(grpc.RpcError) as caught:
        stub.GetStatus(pb.GetStatusRequest(), metadata=metadata, timeout=CALL_DEADLINE_S)
    check_refusal(caught.value, row)
    good = (("authorization", f"Bearer {credentials.GOOD}"),)
    stub.GetStatus(pb.GetStatusRequest(), metadata=good, timeout=CALL_DEADLINE_S)
