import gc
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.storage.objects import ObjectServer

modules = ("storage_contract", "remote_contract", "format_contract", "places")
pytest.register_assert_rewrite(*(f"tests.contract.{module}" for module in modules))

# Rewritten.
from tests.contract.places import FailingDisk, num_descriptors  # noqa: E402


@pytest.fixture
def object_server() -> Iterator[ObjectServer]:
    server = ObjectServer()
    yield server
    server.close()


@pytest.fixture
def failing_disk(tmp_path: Path) -> Iterator[FailingDisk]:
    disk = FailingDisk(tmp_path / "disk", tmp_path / "image")
    disk.folder.mkdir()
    with disk.image.open("wb") as file:
        file.truncate(32 << 20)
    try:
        subprocess.run(
            ["mkfs.ext4", "-q", "-O", "^has_journal", disk.image], check=True, capture_output=True
        )
        subprocess.run(
            ["mount", "-o", "loop", disk.image, disk.folder], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("only root, on a machine with loop devices, can have a disk that fails")
    yield disk
    gc.collect()  # what still maps the shard
    subprocess.run(["umount", "-l", disk.folder], check=True)


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """How many descriptors the process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 2 * num_descriptors() + 200  # what is open already has its part in each share
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
