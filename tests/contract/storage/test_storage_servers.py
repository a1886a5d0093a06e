"""The contract against servers that others wrote.

Azurite for az://, nginx for http://. moto's is in `test_storage_remote`.
"""

import os
from collections.abc import Iterator

import pytest

from tests.contract.places import Place, unique
from tests.contract.storage import azurite, nginx
from tests.contract.storage.azurite import AzuriteServer, azurite_server
from tests.contract.storage.nginx import NginxServer, nginx_server
from tests.contract.storage.remote_contract import RemoteContract


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzuriteServer]:
    with azurite_server(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NginxServer]:
    with nginx_server(tmp_path_factory.mktemp("nginx")) as server:
        yield server


class AzurePlace(Place):
    def __init__(self, server: AzuriteServer) -> None:
        self.server, self.container = server, f"storage-{os.getpid()}-{next(unique)}"
        self.root, self.settings = f"az://{self.container}/data", server.storage_settings
        server.make_container(self.container)

    def put(self, name: str, data: bytes) -> None:
        self.server.put(self.container, f"data/{name}", data)

    def delete(self, name: str) -> None:
        self.server.delete(self.container, f"data/{name}")


class NginxPlace(Place):
    def __init__(self, server: NginxServer) -> None:
        self.server, self.folder = server, f"storage-{next(unique)}"
        self.root = f"{server.url}/{self.folder}"

    def put(self, name: str, data: bytes) -> None:
        self.server.put(f"{self.folder}/{name}", data)

    def delete(self, name: str) -> None:
        self.server.delete(f"{self.folder}/{name}")


@pytest.mark.skipif(bool(azurite.why_absent()), reason=azurite.why_absent() or "it is there")
class TestAzure(RemoteContract):
    @pytest.fixture
    def place(self, azure: AzuriteServer) -> Place:
        return AzurePlace(azure)

    def num_gets(self, place: Place) -> int:
        assert isinstance(place, AzurePlace)
        return place.server.num_gets(place.container)


@pytest.mark.skipif(bool(nginx.why_absent()), reason=nginx.why_absent() or "it is there")
class TestNginx(RemoteContract):
    @pytest.fixture
    def place(self, web: NginxServer) -> Place:
        return NginxPlace(web)

    def num_gets(self, place: Place) -> int:
        assert isinstance(place, NginxPlace)
        return place.server.num_gets(place.folder)
