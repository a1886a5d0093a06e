"""Fixtures that several files of integration tests share."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gyre_client.transport.target import find_target

from tests.batches import NUM_SAMPLES, SAMPLE_LENGTH
from tests.conftest import StartDaemon


@pytest.fixture(scope="module")
def private_daemon() -> Iterator[None]:
    """One private daemon for all loaders and commands of a file: without it each starts its own."""
    target = find_target(None)
    yield
    target.release()


@pytest.fixture(scope="module")
def numbers_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of int16 tokens in which sample i is [8i, 8i + 8)."""
    path = tmp_path_factory.mktemp("numbers") / "tokens.bin"
    np.arange(NUM_SAMPLES * SAMPLE_LENGTH, dtype=np.int16).tofile(path)
    return path


@pytest.fixture(scope="module")
def numbers(shared_gyred: StartDaemon, numbers_file: Path) -> str:
    """The address of a daemon that serves the file as `numbers`, and half of it as `half`."""
    half = numbers_file.with_name("half.bin")
    half.write_bytes(numbers_file.read_bytes()[: NUM_SAMPLES * SAMPLE_LENGTH])
    common = {"format": "tokens", "dtype": "int16", "sequence_length": SAMPLE_LENGTH}
    datasets = {"numbers": numbers_file, "half": half}
    return shared_gyred(
        {"datasets": {name: {"uri": str(path), **common} for name, path in datasets.items()}}
    ).address
