"""S3, HTTP and fsspec's own memory driver."""

import os
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from gyre_daemon.errors import InvalidRequest, ShardMissing

from tests.conftest import S3Server
from tests.contract.places import HttpPlace, MemoryPlace, Place, S3Place, Targets, run, unique
from tests.contract.storage.objects import ObjectServer
from tests.contract.storage.remote_contract import RemoteContract
from tests.contract.storage.storage_contract import StorageContract
from tests.object_server.process import ObjectServerProcess, object_server


class TestMemory(StorageContract):
    @pytest.fixture
    def place(self) -> Iterator[Place]:
        place = MemoryPlace()
        yield place
        fsspec.filesystem("memory").store.clear()


class TestS3(RemoteContract):
    @pytest.fixture
    def place(self, s3_server: S3Server) -> Place:
        return S3Place(s3_server)

    @pytest.fixture(autouse=True)
    def _server(self, s3_server: S3Server) -> None:
        self.server = s3_server

    def num_gets(self, place: Place) -> int:
        return self.server.num_requests("GET", f"{place.root.removeprefix('s3:/')}/")

    def test_keys_that_a_url_would_cut(self, place: Place, opener: Any) -> None:
        place.put("a#1.bin", b"1")
        place.put("b?2.bin", b"22")
        assert self.names(opener, place, "/a#1.bin") == ["a#1.bin"]
        assert self.names(opener, place, "") == ["a#1.bin", "b?2.bin"]

    def test_the_root_of_a_bucket(self, s3_server: S3Server, opener: Any) -> None:
        bucket = f"root-{os.getpid()}-{next(unique)}"
        s3_server.make_bucket(bucket)
        s3_server.put(bucket, "b.bin", b"1")
        s3_server.put(bucket, "a.bin", b"1")
        s3_server.put(bucket, "x/c.bin", b"1")
        for uri in (f"s3://{bucket}", f"s3://{bucket}/", f"s3://{bucket}/*.bin", f"S3://{bucket}"):
            storage = run(opener(uri, s3_server.storage_settings))
            assert [shard.name for shard in storage.shards] == ["a.bin", "b.bin"]

    @pytest.mark.parametrize("rest", ["", "/x.bin", "/*.bin"])
    def test_no_such_bucket(self, s3_server: S3Server, opener: Any, rest: str) -> None:
        with pytest.raises(ShardMissing, match="no-such-bucket"):
            run(opener(f"s3://no-such-bucket{rest}", s3_server.storage_settings))

    def test_paths_that_no_key_can_have(self, place: Place, opener: Any) -> None:
        with pytest.raises(InvalidRequest, match="cannot list"):
            run(opener(f"{place.root}//x.bin", place.settings))

    def test_a_folder_beyond_one_page_of_the_listing(self, place: Place, opener: Any) -> None:
        names = [f"{index:03}.bin" for index in range(120)]
        for name in names:
            place.put(name, b"1")
        assert self.names(opener, place, "") == names
        assert self.server.num_requests("GET", "continuation-token") >= 2


class TestObstore(RemoteContract):
    """What a signed URL cannot say is left to the general client.

    Here, a payload that is not signed.
    """

    @pytest.fixture
    def place(self, s3_server: S3Server) -> Place:
        place = S3Place(s3_server)
        place.settings = {**place.settings, "unsigned_payload": "true"}
        return place

    @pytest.fixture(autouse=True)
    def _server(self, s3_server: S3Server) -> None:
        self.server = s3_server

    def num_gets(self, place: Place) -> int:
        return self.server.num_requests("GET", f"{place.root.removeprefix('s3:/')}/")

    def test_it_is_the_general_client_that_reads(self, place: Place, opener: Any) -> None:
        place.put("0.bin", b"12345")

        async def read() -> None:
            await (await opener(f"{place.root}/0.bin", place.settings)).read(
                Targets().add(0, 1, 3).reads()
            )

        run(read())
        path = f"{place.root.removeprefix('s3:/')}/0.bin"
        assert self.server.num_requests("GET", path) == 1
        assert self.server.num_requests("GET", f"{path}?X-Amz-") == 0


@pytest.fixture(scope="module")
def scripted() -> Iterator[ObjectServerProcess]:
    with object_server() as process:
        yield process


class GooglePlace(Place):
    def __init__(self, server: ObjectServerProcess) -> None:
        self.server, self.path = server, f"/storage-{next(unique)}/data"
        self.root, self.settings = (
            f"gs:/{self.path}",
            {"base_url": server.url, "skip_signature": "true"},
        )

    def put(self, name: str, data: bytes) -> None:
        self.server.put(f"{self.path}/{name}", data)

    def delete(self, name: str) -> None:
        self.server.delete(f"{self.path}/{name}")


class TestGoogle(RemoteContract):
    """Over its XML interface, which is that of S3 here.

    Servers of Google's that pip and npm know have only the other one.
    """

    @pytest.fixture
    def place(self, scripted: ObjectServerProcess) -> Place:
        return GooglePlace(scripted)

    def num_gets(self, place: Place) -> int:
        assert isinstance(place, GooglePlace)
        return sum(
            count
            for path, count in place.server.counts()["by_path"].items()
            if path.startswith(place.path)
        )


class TestHttp(RemoteContract):
    lists = False

    @pytest.fixture
    def place(self, object_server: ObjectServer) -> Place:
        return HttpPlace(object_server)

    @pytest.fixture(autouse=True)
    def _server(self, object_server: ObjectServer) -> None:
        self.server = object_server

    def num_gets(self, place: Place) -> int:
        return sum(method == "GET" for method, _ in self.server.requests)

    @pytest.mark.parametrize("rest", ["", "/", "/*.bin"])
    def test_a_web_server_lists_nothing(self, place: Place, opener: Any, rest: str) -> None:
        place.put("0.bin", b"1")
        with pytest.raises(ShardMissing, match=r"shows no index page .*404\)\. Name every shard"):
            run(opener((place.root if rest == "/*.bin" else self.server.url) + rest, {}))
