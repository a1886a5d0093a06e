"""Cursors and a client of an earlier version, which are kept as data: they still read the same."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Daemon, StartDaemon
from tests.kept.read_kept import read_all

KEPT = Path(__file__).parents[2] / "kept"
(WHEEL,) = KEPT.glob("gyre_client-*.whl")


CLIENTS = ("today's", "kept")


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((KEPT / "cursors.json").read_text())
    del found["cases"]["joined"]["arguments"]["join"]  # today's Loader has no such argument
    for table in found["datasets"].values():
        table["uri"] = str(KEPT / "data" / table["uri"])
    return found


@pytest.fixture(scope="module")
def daemon(shared_gyred: StartDaemon, kept: dict[str, Any]) -> Daemon:
    return shared_gyred({"datasets": kept["datasets"], "mixtures": kept["mixtures"]})


def read(daemon: Daemon, client: str, cases: dict[str, Any]) -> dict[str, Any]:
    """Read with today's client in this process, or with the kept one in its own."""
    if client == "today's":
        return json.loads(json.dumps(read_all(daemon.address, cases)))  # type: ignore[no-any-return]
    done = subprocess.run(
        [sys.executable, "-m", "tests.kept.read_kept", daemon.address],
        input=json.dumps(cases),
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(WHEEL), *sys.path])},
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    assert str(WHEEL) in found["client"]
    return found


@pytest.mark.parametrize("client", CLIENTS)
def test_kept_cursors_go_on_with_the_same_batches(
    daemon: Daemon, kept: dict[str, Any], client: str
) -> None:
    found = read(daemon, client, kept["cases"])
    wanted = {name: case["batches"] for name, case in kept["cases"].items()}
    del wanted["joined"]
    assert 'join="rotate"' in found["batches"].pop("joined")  # refused; no job joins any more
    assert found["batches"] == wanted


@pytest.mark.parametrize(("saver", "client"), [CLIENTS, CLIENTS[::-1]])
def test_each_client_goes_on_from_the_other_s_state(
    daemon: Daemon, kept: dict[str, Any], saver: str, client: str
) -> None:
    cases = {name: case for name, case in kept["cases"].items() if name != "joined"}
    first = {name: {**case, "num_steps": 2} for name, case in cases.items()}
    states = read(daemon, saver, first)["states"]
    assert states.keys() == cases.keys()
    rest = {
        name: {**case, "state": states[name], "batches": case["batches"][2:]}
        for name, case in cases.items()
    }
    found = read(daemon, client, rest)["batches"]
    assert found == {name: case["batches"] for name, case in rest.items()}


def test_a_kept_client_is_told_that_weights_no_longer_change_in_a_running_job(
    gyred: StartDaemon,
) -> None:
    daemon = gyred({})
    command = ["-m", "gyre_client", "mix", "all", "--weights=a=1", "--from-step=9"]
    done = subprocess.run(
        [sys.executable, *command, "--address", daemon.address],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(WHEEL), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "weights=" in done.stderr
    assert len(done.stderr.splitlines()) == 1
