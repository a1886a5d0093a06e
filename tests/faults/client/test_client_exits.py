"""The interpreter exits quietly with open loaders, whatever the daemon is sending."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

READS_AT_EXIT = """
import sys, weakref
from gyre_client import Loader

loaders = [Loader("numbers", batch_size=64, seed=seed, address=sys.argv[1]) for seed in range(3)]

class Mark:
    pass

# Finalizers run from the youngest to the oldest: this one runs after those of the streams, which
# are younger, and before those of the loaders.
def read_on():
    for loader in loaders:
        for _ in range(200):
            next(loader)
    print("read", flush=True)

mark = Mark()
weakref.finalize(mark, read_on)
for loader in loaders:
    next(loader)
"""
KEEPS_BATCHES = """
import sys
from gyre_client import Loader

loaders = [Loader("numbers", batch_size=64, seed=seed, address=sys.argv[1]) for seed in range(3)]
kept = [next(loader) for loader in loaders]
print("read", flush=True)
"""


@pytest.mark.parametrize("program", [READS_AT_EXIT, KEEPS_BATCHES], ids=["reading", "keeping"])
def test_open_loaders_print_nothing_when_the_interpreter_exits(
    gyred: Any, tmp_path: Path, program: str
) -> None:
    np.zeros(500 * 8192, np.uint16).tofile(tmp_path / "tokens.bin")
    numbers = {
        "uri": str(tmp_path / "tokens.bin"),
        "format": "tokens",
        "sequence_length": 8192,
        "dtype": "uint16",
    }
    address = gyred({"datasets": {"numbers": numbers}}).address
    command = [sys.executable, "-X", "dev", "-c", program, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "read\n", "")
