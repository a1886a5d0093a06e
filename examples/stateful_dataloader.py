"""Read through torchdata's StatefulDataLoader, stop inside an epoch, and resume.

Its state contains the Loader's own, so nothing is read again to get there.

    python examples/stateful_dataloader.py
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from gyre_client import Loader
from torchdata.stateful_dataloader import StatefulDataLoader

BATCH_SIZE, LENGTH = 16, 9
NUM_EPOCHS, STOP_AT = 3, 8


def main() -> None:
    """Read until the stop, then from the state to the end."""
    parser = argparse.ArgumentParser(
        description="Read with a StatefulDataLoader, stop, and resume."
    )
    parser.add_argument("--workdir", type=Path, default=Path(".demo/stateful"))
    workdir = parser.parse_args().workdir
    workdir.mkdir(parents=True, exist_ok=True)
    np.arange(100 * LENGTH, dtype=np.uint16).tofile(workdir / "tokens.bin")
    before = read(workdir, STOP_AT)
    after = read(workdir, resumed=True)
    (workdir / "rank-0.json").write_text(json.dumps(before + after))
    print(f"stopped after {len(before)} steps, then took {len(after)} more")


def read(workdir: Path, stop_at: int = 0, *, resumed: bool = False) -> list[list[int]]:
    """Returns the sample ids of each step."""
    options = {"sequence_length": LENGTH, "dtype": "uint16"}
    with Loader(
        workdir / "tokens.bin", batch_size=BATCH_SIZE, tail="drop", format="tokens", options=options
    ) as loader:
        batches = StatefulDataLoader(loader, batch_size=None)
        if resumed:
            state = torch.load(workdir / "state.pt", weights_only=True)  # runs no code of the file
            batches.load_state_dict(state)
        seen = []
        while loader.epoch < NUM_EPOCHS:  # the first iteration loads the state
            for batch in batches:
                seen.append(batch["sample_id"].tolist())
                if loader.step == stop_at:
                    torch.save(batches.state_dict(), workdir / "state.pt")
                    return seen
        return seen


if __name__ == "__main__":
    main()
