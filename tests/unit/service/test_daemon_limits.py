"""Limits of the machine, read from files such as the kernel shows."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from gyre_daemon.config.schema import check_memory_budget, memory_limit_bytes
from gyre_daemon.errors import ConfigError


def group(root: Path, path: str, name: str, text: str) -> None:
    (root / path).mkdir(parents=True, exist_ok=True)
    (root / path / name).write_text(text)


def limit(root: Path, membership: str) -> int | None:
    (root / "membership").write_text(membership)
    return memory_limit_bytes(root, root / "membership")


def test_the_lowest_limit_of_a_group_and_its_parents_counts(tmp_path: Path) -> None:
    group(tmp_path, "system.slice/gyred.service", "memory.max", "max\n")
    group(tmp_path, "system.slice", "memory.max", "4096000\n")
    group(tmp_path, "user.slice", "memory.max", "4096\n")
    assert limit(tmp_path, "0::/system.slice/gyred.service\n") == 4096000
    group(tmp_path, "system.slice/gyred.service", "memory.max", "1024000\n")
    assert limit(tmp_path, "0::/system.slice/gyred.service\n") == 1024000


def test_in_a_container_the_limit_is_found_at_the_root(tmp_path: Path) -> None:
    group(tmp_path, "", "memory.max", "2048000\n")
    assert limit(tmp_path, "0::/\n") == 2048000
    assert limit(tmp_path, "0::/../../docker/0123\n") == 2048000


def test_limits_of_control_groups_version_1(tmp_path: Path) -> None:
    group(tmp_path, "memory/docker/0123", "memory.limit_in_bytes", "3072000\n")
    group(tmp_path, "memory", "memory.limit_in_bytes", "9223372036854771712\n")
    assert (
        limit(tmp_path, "12:cpu,cpuacct:/docker/0123\n5:memory:/docker/0123\n0::/docker/0123\n")
        == 3072000
    )
    assert limit(tmp_path, "5:memory:/\n") is None


@pytest.mark.parametrize("membership", ["", "0::/gone\n", "5:cpu:/\n"])
def test_no_limit(tmp_path: Path, membership: str) -> None:
    assert limit(tmp_path, membership) is None


def test_the_limit_of_this_machine_can_be_read() -> None:
    found = memory_limit_bytes()
    assert found is None or found > 1 << 20


def test_a_budget_above_the_limit_is_refused_by_name() -> None:
    check_memory_budget(100, 100)
    check_memory_budget(100, None)
    with pytest.raises(
        ConfigError,
        match="memory_budget is 101 bytes, but this process's control group may use 100",
    ):
        check_memory_budget(101, 100)


def test_descriptors_are_raised_to_what_is_allowed() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    program = (
        "import resource; from gyre_daemon.runtime.limits import raise_descriptor_limit\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard}))\n"
        "print(raise_descriptor_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.split() == [str(hard)] * 3
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
