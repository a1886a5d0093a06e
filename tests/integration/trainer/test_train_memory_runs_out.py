"""A rank that asks for more memory than there is ends with one sentence, and says what to do."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gyre_trainer.training.launcher import explained

from tests.train_jobs import TINY_GPT, tiny_run

DEADLINE_S = 240.0
LIMIT_BYTES = 32 << 30  # of addresses; the model asks for 384 GiB at once
CUDA = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 1.00 GiB"


@pytest.mark.parametrize(
    ("error", "asked_for"),
    [
        (MemoryError(), "memory ran out: MemoryError; use more ranks"),
        (torch.OutOfMemoryError(CUDA), "memory ran out: CUDA out of memory. Tried to allocate 20"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "memory ran out: [Errno 12] Cannot"),
        (RuntimeError("CUDA error: out of memory"), "memory ran out: CUDA error: out of memory;"),
        (RuntimeError("shapes differ"), ""),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), ""),
        (ValueError("can't allocate memory"), ""),
    ],
)
def test_what_is_about_memory(error: BaseException, asked_for: str) -> None:
    told = explained(error)
    assert told.startswith(asked_for)
    assert bool(told) == bool(asked_for)


def test_the_allocators_own_error() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert "you tried to allocate 1152921504606846976 bytes" in explained(caught.value)


def test_a_rank_without_memory_says_so_in_one_line(tmp_path: Path) -> None:
    config = tmp_path / "train.toml"
    (np.arange(90) % 64).astype(np.uint16).tofile(tmp_path / "tokens.bin")
    config.write_text(tiny_run(tmp_path, model=TINY_GPT | {"hidden_dim": 2**30, "dim": 64}))
    command = [sys.executable, "-m", "gyre_trainer", "run", str(config), "--nproc=2"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "RANK"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES)),
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("gyre-train: rank ")
    assert "; use more ranks, make `data.batch_size`" in done.stderr
