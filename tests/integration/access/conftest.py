"""A daemon that the tests of a file share, and two of its users."""

from collections.abc import Iterator

import pytest

from tests.integration.access.shared_node import Node
from tests.preloaded.interpreter import Interpreter
from tests.users import User, open_folder


@pytest.fixture(scope="module")
def node(interpreter: Interpreter) -> Iterator[Node]:
    with open_folder() as folder:
        node = Node(folder, interpreter)
        yield node
        for user in node.users:
            user.close()
        node.daemon.stop()


@pytest.fixture
def alice(node: Node) -> User:
    return node.users[0]


@pytest.fixture
def bob(node: Node) -> User:
    return node.users[1]
