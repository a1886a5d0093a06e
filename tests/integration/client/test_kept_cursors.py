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
    assert found["batches"] == wanted
