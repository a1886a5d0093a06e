"""What accelerate's `prepare` makes of a DataLoader over a Loader, in a process of its own.

It changes accelerate for good.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

PROGRAM = """
import sys, torch
from gyre_client import Loader
from gyre_client.errors import InvalidRequest
from torch.utils.data import DataLoader, TensorDataset

def loader(**arguments):
    arguments = {"batch_size": 10, "tail": "drop", "format": "tokens", **arguments}
    return Loader(sys.argv[1], options={"sequence_length": 8, "dtype": "uint16"}, **arguments)

def refused(batches, words):
    try:
        next(iter(batches))
    except InvalidRequest as error:
        assert words in str(error), error
    else:
        raise AssertionError("it was read")

with loader() as early:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    prepared = accelerator.prepare(DataLoader(early, batch_size=None))
    refused(prepared, "Import accelerate before you make the Loader")

with loader() as reading, loader() as plain:
    expected = [batch["sample_id"].tolist() for batch, _ in zip(plain.stream(), range(20))]
    model = torch.nn.Linear(1, 1)
    model, batches = accelerator.prepare(model, DataLoader(reading, batch_size=None))
    assert len(batches) == 10
    synced, seen, ends = [], [], []
    for epoch in range(2):
        batches.set_epoch(epoch)
        for batch in batches:
            seen.append(batch["sample_id"].tolist())
            assert reading.step == len(seen), "nothing is read ahead of the state"
            with accelerator.accumulate(model):
                synced.append(accelerator.sync_gradients)
            ends.append(accelerator.gradient_state.end_of_dataloader)
    assert seen == expected
    assert ends == ([False] * 9 + [True]) * 2
    assert synced == ([False, False, False, True] * 2 + [False, True]) * 2, synced
    try:
        accelerator.skip_first_batches(batches, 3)
    except InvalidRequest as error:
        assert "by its state, not by `skip_first_batches`" in str(error), error
    else:
        raise AssertionError("it would be read ahead")
    reading.reset()
    inside = iter(batches)
    next(inside)
    # the bare loader may be read beside
    assert [batch["sample_id"].tolist() for batch in reading] == expected[1:10]

with loader() as reading:
    batches = accelerator.prepare(DataLoader(reading, batch_size=None))
    batches.set_epoch(1)
    assert [batch["sample_id"].tolist() for batch in batches] == expected[10:]
    batches.set_epoch(1)
    assert reading.epoch == 2, "what was read from goes on by itself"

with loader() as reading, loader(order="sequential") as plain:
    try:
        accelerator.prepare(DataLoader(reading, batch_size=4))
    except InvalidRequest as error:
        assert "of 10 samples on each rank, but a batch size of 4" in str(error), error

    def first_tokens(samples):
        return [sample["tokens"][0].item() for sample in samples]

    samples = DataLoader(plain, batch_size=10, collate_fn=first_tokens)
    assert next(iter(accelerator.prepare(samples))) == [0, 8, 16, 24, 32, 40, 48, 56, 64, 72]

others = accelerator.prepare(DataLoader(TensorDataset(torch.arange(6)), batch_size=2))
assert [batch[0].tolist() for batch in others] == [[0, 1], [2, 3], [4, 5]]
assert type(others).__name__ == "DataLoaderShard"
print("done")
"""


def test_a_prepared_loader_is_read_as_a_bare_one(tmp_path: Path) -> None:
    np.arange(101 * 8, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    environment.pop("GYRE_ADDRESS", None)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "tokens.bin")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=150, env=environment, check=False
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
