"""The daemons that the rows are sent to, one for each module of tests."""

from collections.abc import Iterator

import pytest

from tests.bad_inputs.node import Node, running
from tests.preloaded.interpreter import Interpreter


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, interpreter: Interpreter) -> Iterator[Node]:
    """A daemon with good datasets; at the end of the module it must be as it was."""
    with running(tmp_path_factory.mktemp("node"), interpreter) as node:
        yield node
