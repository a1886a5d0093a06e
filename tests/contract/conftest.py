from collections.abc import Iterator

import pytest

from tests.contract.objects import ObjectServer

modules = ("storage_contract", "remote_contract", "format_contract", "places")
pytest.register_assert_rewrite(*(f"tests.contract.{module}" for module in modules))


@pytest.fixture
def object_server() -> Iterator[ObjectServer]:
    server = ObjectServer()
    yield server
    server.close()
