"""Cursors and a client of an earlier version, which are kept as data: they still read the same."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartDaemon

KEPT = Path(__file__).parents[2] / "kept"
(WHEEL,) = KEPT.glob("gyre_client-*.whl")


@pytest.mark.parametrize("client", ["today's", "kept"])
def test_kept_cursors_go_on_with_the_same_batches(gyred: StartDaemon, client: str) -> None:
    kept: dict[str, Any] = json.loads((KEPT / "cursors.json").read_text())
    del kept["cases"]["joined"]["arguments"]["join"]  # today's Loader has no such argument
    for table in kept["datasets"].values():
        table["uri"] = str(KEPT / "data" / table["uri"])
    daemon = gyred({"datasets": kept["datasets"], "mixtures": kept["mixtures"]})
    path = [str(WHEEL)] if client == "kept" else []
    done = subprocess.run(
        [sys.executable, "-m", "tests.kept.read_kept", daemon.address],
        input=json.dumps(kept["cases"]),
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*path, *sys.path])},
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
        check=True,
    )
    found = json.loads(done.stdout)
    assert (str(WHEEL) in found["client"]) == (client == "kept")
    wanted = {name: case["batches"] for name, case in kept["cases"].items()}
    del wanted["joined"]
    assert 'join="rotate"' in found["batches"].pop("joined")  # refused; no job joins any more
    assert found["batches"] == wanted


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
