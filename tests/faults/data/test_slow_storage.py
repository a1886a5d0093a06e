"""A storage that does not answer is not a daemon that does not answer."""

import socket
from pathlib import Path

import pytest
from gyre_client.errors import DaemonUnavailable, StorageUnavailable
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection
from gyre_protos.v1 import loader_pb2 as pb

from tests.conftest import StartDaemon


def test_a_storage_slower_than_the_clients_patience_is_named(
    gyred: StartDaemon, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}/numbers.bin"
        dataset = {"uri": uri, "format": "tokens", "dtype": "int16", "sequence_length": 8}
        daemon = gyred({"datasets": {"slow": dataset}})
        with Connection(parse_address(daemon.address)) as connection:
            with pytest.raises(StorageUnavailable) as refused:
                connection.describe(pb.DatasetRef(name="slow"), timeout_s=2.0)
            assert "is up, and did not finish the call within 2 s" in str(refused.value)
            assert "waits for its storage" in str(refused.value)


def test_where_nobody_answers_the_daemon_is_named(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        Connection(parse_address(f"tcp:127.0.0.1:{silent.getsockname()[1]}")) as connection,
        pytest.raises(DaemonUnavailable, match="no daemon answers at tcp:127"),
    ):
        connection.describe(pb.DatasetRef(name="slow"), timeout_s=2.0)
