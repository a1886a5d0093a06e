from collections.abc import Iterator

import pytest

from tests.contract.objects import ObjectServer

pytest.register_assert_rewrite("tests.contract.storage_contract", "tests.contract.format_contract", "tests.contract.places")


@pytest.fixture
def object_server() -> Iterator[ObjectServer]:
    server = ObjectServer()
    yield server
    server.close()
