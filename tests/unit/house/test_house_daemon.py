"""The daemon's packages: what is pure is so with all that it imports."""

import subprocess
import sys

import pytest

# An interpreter without event loop, storage and network: an import of these fails.
REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ImportError(name + " is refused here")

for name in {refused!r}:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Refuse())
import importlib, pkgutil
package = importlib.import_module({package!r})
for module in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
    importlib.import_module(module.name)
"""
REFUSED = (
    "asyncio",
    "fsspec",
    "obstore",
    "grpc",
    "google",
    "uvloop",
    "aiofiles",
    "prometheus_client",
    "torch",
)


PURE = ["gyre_daemon.order", "gyre_daemon.datasets.formats", "gyre_daemon.sessions.stream_state"]


@pytest.mark.parametrize("package", PURE)
def test_a_pure_package_imports_without_event_loop_storage_and_grpc(package: str) -> None:
    program = REFUSE.format(refused=REFUSED, package=package)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr


def test_what_is_refused_fails_where_it_is_imported() -> None:
    program = REFUSE.format(refused=REFUSED, package="gyre_daemon.storage")
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode != 0
    assert "is refused here" in result.stderr
