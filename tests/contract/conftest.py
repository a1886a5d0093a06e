from collections.abc import Iterator

import pytest

from tests.contract.objects import ObjectServer


@pytest.fixture
def object_server() -> Iterator[ObjectServer]:
    server = ObjectServer()
    yield server
    server.close()
