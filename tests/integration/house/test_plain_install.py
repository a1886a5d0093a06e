"""The wheel without extras, installed in an environment of its own, beside a real daemon."""

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from webdataset import TarWriter

from tests.conftest import Daemon, StartDaemon

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SECONDS = 120


def needed(names: list[str]) -> set[str]:
    """These distributions and their requirements, without extras."""
    found: set[str] = set()
    while names:
        name = names.pop()
        if name not in found:
            found.add(name)
            wanted = map(Requirement, importlib.metadata.requires(name) or [])
            names += [
                each.name
                for each in wanted
                if each.marker is None or each.marker.evaluate({"extra": ""})
            ]
    return found


def link(distribution: importlib.metadata.Distribution, site: Path) -> None:
    """Link the installed files of a distribution into another environment."""
    for file in distribution.files or []:
        if ".." not in file.parts and "__pycache__" not in file.parts:
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(str(distribution.locate_file(file)))


def built(project: Path, folder: Path) -> Path:
    """The wheel of a project, in the folder."""
    (wheel,) = WheelBuilder(str(project)).build(directory=str(folder), versions=["standard"])
    return Path(wheel)


def make_environment(folder: Path) -> Path:
    """Make an empty environment; returns its `site-packages`."""
    venv.create(folder)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return folder / "lib" / version / "site-packages"


def install(wheel: Path, environment: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin/python"), "install"]
    options = ["--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, *options, wheel], check=True, timeout=SECONDS)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """The `bin` of an environment that holds only the wheel and its requirements."""
    folder = tmp_path_factory.mktemp("plain")
    site = make_environment(folder / "env")
    for name in needed([Requirement(each).name for each in PROJECT["dependencies"]]):
        link(importlib.metadata.distribution(name), site)
    install(wheel, folder / "env")
    return folder / "env/bin"


def run(
    command: list[str | Path], environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "GYRE_ADDRESS")
    }
    env = {**kept, **(environment or {})}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, check=False, env=env
    )


def failed_in_one_line(result: "subprocess.CompletedProcess[str]", extra: str) -> bool:
    is_one_line = result.stderr.count("\n") == 1 and not result.stdout
    return (
        result.returncode == 2
        and is_one_line
        and f'pip install "gyre-ml[{extra}]"' in result.stderr
    )


@pytest.mark.parametrize("command", ["gyre", "gyred", "gyre-train"])
def test_every_command_prints_its_version(plain: Path, command: str) -> None:
    result = run([plain / command, "--version"])
    assert (result.returncode, result.stderr, result.stdout) == (
        0,
        "",
        f"{command} {PROJECT['version']}\n",
    )


def test_help_is_printed_or_names_the_extra(plain: Path) -> None:
    assert run([plain / "gyre", "--help"]).returncode == 0
    assert failed_in_one_line(run([plain / "gyred", "--help"]), "daemon")
    assert failed_in_one_line(run([plain / "gyre-train", "run", "x.toml"]), "trainer")
    assert failed_in_one_line(run([plain / "python", "-m", "gyre_daemon", "serve"]), "daemon")


def test_a_command_that_needs_an_extra_names_it(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "a.bin").touch()
    assert failed_in_one_line(
        run([plain / "gyre", "cat", tmp_path, "--format", "tokens"]), "daemon"
    )
    bench = ["bench", "wiki", "--address", "unix:/nowhere/gyre.sock"]
    assert failed_in_one_line(run([plain / "gyre", *bench]), "client")
    loader = run([plain / "python", "-c", "from gyre_client import Loader"])
    assert loader.stderr.splitlines()[-1].endswith('pip install "gyre-ml[client]".')


@pytest.fixture
def daemon(gyred: StartDaemon, tmp_path: Path) -> Daemon:
    np.arange(800, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    with TarWriter(str(tmp_path / "texts-000.tar")) as writer:
        for n in range(20):
            writer.write({"__key__": f"{n:03d}", "txt": f"text number {n}"})
    datasets = {
        "numbers": {
            "uri": str(tmp_path / "tokens.bin"),
            "format": "tokens",
            "sequence_length": 8,
            "dtype": "uint16",
        },
        "texts": {"uri": str(tmp_path / "texts-000.tar"), "format": "webdataset"},
    }
    return gyred({"datasets": datasets})


def test_every_command_for_a_running_daemon_works_but_bench(plain: Path, daemon: Daemon) -> None:
    def gyre(*arguments: str) -> Any:
        result = run([plain / "gyre", *arguments, "--json"], {"GYRE_ADDRESS": daemon.address})
        assert (result.returncode, result.stderr) == (0, "")
        return json.loads(result.stdout)

    assert [each["name"] for each in gyre("datasets")] == ["numbers", "texts"]
    assert gyre("describe", "numbers")["num_samples"] == 100
    assert len(gyre("plan", "numbers", "--step", "0", "--batch-size", "4")["sample_ids"]) == 4
    assert gyre("index", "texts")["num_samples"] == 20
    assert gyre("status")["sessions"] == []
    assert gyre("top", "--once", "--interval", "0.1")["sessions"] == []
    for sample in gyre("cat", "numbers", "--num", "3"):
        first = 8 * sample["sample_id"]
        assert sample["fields"]["tokens"]["value"] == list(range(first, first + 8))
    (sample,) = gyre("cat", "texts", "--num", "1")
    assert sample["fields"]["txt"]["value"] == f"text number {sample['sample_id']}"
    assert gyre("why", "texts", "--step", "0")[0]["first_step"] == 0


@pytest.mark.parametrize("uri", ["s3://b/x.bin", "gs://b/x.bin", "az://b/x.bin"])
def test_object_storage_names_its_extra(gyred: StartDaemon, uri: str) -> None:
    without = "import sys; sys.modules['obstore'] = None; from gyre_daemon.cli import main; main()"
    dataset = {"uri": uri, "format": "tokens", "sequence_length": 8, "dtype": "uint16"}
    daemon = gyred({"datasets": {"far": dataset}}, command=("-c", without, "serve", "--config"))
    result = run(
        [sys.executable, "-m", "gyre_client", "describe", "far", "--address", daemon.address]
    )
    assert failed_in_one_line(result, "objects")


OTHER = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "other-gyre"
version = "1"
[project.scripts]
gyre = "other_gyre:main"
"""
WARNING = "the command `gyre` starts a program of other-gyre"
READ = """
import sys
from gyre_client import Loader
options = {"dtype": "uint16", "sequence_length": 8}
for seed in range(2):
    with Loader(sys.argv[1], batch_size=4, seed=seed, options=options) as loader:
        print(len(next(loader)["sample_id"]))
"""


def test_a_command_of_another_distribution_is_told(tmp_path: Path, wheel: Path) -> None:
    environment, project = tmp_path / "env", tmp_path / "other"
    site = make_environment(environment)
    installed = sysconfig.get_path("purelib")
    (site / "installed.pth").write_text(f"import site; site.addsitedir({installed!r})")
    install(wheel, environment)
    np.arange(800, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    read: list[str | Path] = [environment / "bin/python", "-c", READ, tmp_path / "tokens.bin"]
    result = run(read)
    assert (result.returncode, result.stdout, result.stderr) == (0, "4\n4\n", "")

    (project / "other_gyre").mkdir(parents=True)
    (project / "pyproject.toml").write_text(OTHER)
    (project / "other_gyre/__init__.py").write_text("def main():\n    print('another program')\n")
    install(built(project, tmp_path), environment)
    assert run([environment / "bin/gyre", "--version"]).stdout == "another program\n"
    result = run(read)
    assert (result.returncode, result.stdout, result.stderr.count(WARNING)) == (0, "4\n4\n", 1)
    result = run([environment / "bin/gyred", "--version"])
    assert (result.returncode, result.stderr.count(WARNING)) == (0, 1)
    result = run([environment / "bin/python", "-m", "gyre_client", "--version"])
    assert result.stdout == f"gyre {PROJECT['version']}\n"
