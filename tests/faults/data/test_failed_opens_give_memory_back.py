"""An opening that fails leaves no memory behind, however often it is tried."""

import io
import tarfile
from pathlib import Path

import grpc
import psutil
import pytest
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1 import loader_pb2_grpc as pb_grpc

from tests.channels import identified_channel
from tests.conftest import StartDaemon

NUM_WARM_UP, NUM_TRIES = 3, 15
# 15 tries left 11 MiB of the first kind, and gigabytes of the second
MAX_GROWTH_BYTES = 8 << 20


def truncated(path: Path) -> None:
    """8,000 empty members and no end."""
    first = tarfile.TarInfo("000000.txt").tobuf()
    blocks = []
    for number in range(8_000):
        info = bytearray(first)
        info[:6] = b"%06d" % number
        info[148:156] = b" " * 8
        info[148:156] = b"%06o\0 " % sum(info)
        blocks.append(info)
    path.write_bytes(b"".join(blocks)[:-100])


def sparse(path: Path) -> None:
    """A member whose sparse map takes 19 MiB."""
    content = b"1000000\n" + b"1\n1\n" * 4_900_000
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("a.txt")
        info.size = len(content)
        info.pax_headers = {
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
            "GNU.sparse.name": "a.txt",
            "GNU.sparse.realsize": "2000000",
        }
        archive.addfile(info, io.BytesIO(content))


def global_headers(path: Path) -> None:
    """Global headers of ever more keys."""
    with path.open("wb") as file:
        for number in range(40):
            keys = {f"key-{number}-{each}": "x" * 10 for each in range(1000)}
            file.write(tarfile.TarInfo.create_pax_global_header(keys))
        file.write(tarfile.TarInfo("a.txt").tobuf() + bytes(1024))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(truncated, "sound tar"), (sparse, "is a sparse file"), (global_headers, "global headers")],
)
def test_failed_opens_leave_nothing(
    damage: object, reason: str, gyred: StartDaemon, tmp_path: Path
) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    damage(folder / "a.tar")  # type: ignore[operator]
    daemon = gyred({"datasets": {"set": {"uri": str(folder), "format": "webdataset"}}})
    assert daemon.process
    process = psutil.Process(daemon.process.pid)
    request = pb.DescribeDatasetRequest(dataset=pb.DatasetRef(name="set"))
    before = 0
    with identified_channel(daemon.address) as channel:
        stub = pb_grpc.LoaderStub(channel)
        for number in range(NUM_WARM_UP + NUM_TRIES):
            if number == NUM_WARM_UP:
                before = process.memory_info().rss
            with pytest.raises(grpc.RpcError) as caught:
                stub.DescribeDataset(request, timeout=120)
            assert caught.value.code() == grpc.StatusCode.DATA_LOSS
            assert reason in str(caught.value.details())
    assert process.memory_info().rss - before < MAX_GROWTH_BYTES
