"""Jobs that read one dataset of tokens from one daemon, for tests of what they share."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gyre_client import Loader

from tests.conftest import Daemon

LENGTH, BATCH, WINDOW = 128, 32, 96  # a batch is 16 KiB and more


def token_config(folder: Path) -> dict[str, Any]:
    """The configuration of a daemon with a short lease that serves 20,000 samples."""
    np.random.default_rng(5).integers(0, 60_000, 20_000 * LENGTH).astype("<u4").tofile(
        folder / "tokens.bin"
    )
    tokens = {
        "uri": str(folder / "tokens.bin"),
        "format": "tokens",
        "dtype": "int32",
        "sequence_length": LENGTH,
    }
    return {"lease_s": 3.0, "datasets": {"tokens": tokens}}


def loader(daemon: Daemon, job: str, prefetch_batches: int = WINDOW) -> Loader:
    return Loader(
        "tokens",
        batch_size=BATCH,
        seed=3,
        address=daemon.address,
        job=job,
        prefetch_batches=prefetch_batches,
    )


def ids_of(batches: list[dict[str, torch.Tensor]]) -> list[list[int]]:
    return [batch["sample_id"].tolist() for batch in batches]


def right(daemon: Daemon, batch: dict[str, torch.Tensor]) -> bool:
    """The tokens are those of the samples that the batch names."""
    samples = np.memmap(daemon.config_path.parent.parent / "tokens.bin", "<u4").reshape(-1, LENGTH)
    return bool((batch["tokens"].numpy() == samples[batch["sample_id"].numpy()]).all())
