"""The interpreter's exit with loaders open: quiet, whatever the daemon is sending just then."""

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

def read_on():  # between what is newer, the streams, and what is older, the loaders: memory comes by the side channel
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
def test_open_loaders_say_nothing_at_the_interpreter_s_exit(gyred: Any, tmp_path: Path, program: str) -> None:
    np.zeros(500 * 8192, np.uint16).tofile(tmp_path / "tokens.bin")
    numbers = {"uri": str(tmp_path / "tokens.bin"), "format": "tokens", "sequence_length": 8192, "dtype": "uint16"}
    address = gyred({"datasets": {"numbers": numbers}}).address
    command = [sys.executable, "-X", "dev", "-c", program, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "read\n", "")
