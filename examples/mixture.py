"""Train on a mixture of two sources, whose weights change at a step of its schedule.

Both sources are made here: sequences that count by one, and sequences that count by seven. A small
model learns the next token from the last two. Counting by seven begins as a tenth of the mixture,
and becomes nine tenths at half of the steps.

    python examples/mixture.py [--workdir .demo] [--steps 200]
"""

import argparse
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
from gyre_client import Loader
from torch.nn import functional

NUM_IDS, LENGTH, BATCH_SIZE = 64, 17, 32
STRIDES = {"ones": 1, "sevens": 7}
START_DEADLINE_S = 60.0


def main() -> None:
    """Write the sources, serve them, and train."""
    parser = argparse.ArgumentParser(description="Train on a mixture of two sources.")
    parser.add_argument("--workdir", type=Path, default=Path(".demo"))
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    folder = args.workdir.resolve() / "mixture"
    folder.mkdir(parents=True, exist_ok=True)
    config, socket = folder / "gyre.toml", folder / "gyre.sock"
    config.write_text(configuration(folder, socket, args.steps // 2))
    gyred = sysconfig.get_path("scripts") + "/gyred"
    with subprocess.Popen([gyred, "serve", "--config", str(config)]) as daemon:
        try:
            wait_for(socket, daemon)
            train(f"unix:{socket}", args.steps)
        finally:
            daemon.terminate()


def configuration(folder: Path, socket: Path, step: int) -> str:
    """Write the sources where they are missing; return the daemon's configuration."""
    lines = [f'listen = ["unix:{socket}"]', f'index_dir = "{folder / "indexes"}"']
    for name, stride in STRIDES.items():
        path = folder / f"{name}.bin"
        if not path.exists():
            starts = np.random.default_rng(stride).integers(0, NUM_IDS, 4000)[:, None]
            ids = (starts + stride * np.arange(LENGTH)) % NUM_IDS
            ids.astype(np.uint16).tofile(path)
        lines += [
            f"[datasets.{name}]",
            f'uri = "{path}"',
            'format = "tokens"',
            'dtype = "uint16"',
            f"sequence_length = {LENGTH}",
        ]
    lines += [
        "[mixtures.counting]",
        "weights = { ones = 0.9, sevens = 0.1 }",
        f"schedule = [ {{ step = {step}, weights = {{ ones = 0.1, sevens = 0.9 }} }} ]",
        "block = 320",
    ]
    return "\n".join(lines) + "\n"


def wait_for(socket: Path, daemon: "subprocess.Popen[bytes]") -> None:
    """Wait until the daemon listens."""
    deadline = time.monotonic() + START_DEADLINE_S
    while not socket.exists():
        if daemon.poll() is not None or time.monotonic() > deadline:
            sys.exit("gyred did not start; its messages are above")
        time.sleep(0.05)


class NextToken(torch.nn.Module):
    """The next token from the last two."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(NUM_IDS, 32)
        self.hidden, self.out = torch.nn.Linear(64, 128), torch.nn.Linear(128, NUM_IDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Losses of all predictions, float [B, T - 2], from ids int64 [B, T]."""
        known = self.embedding(tokens[:, :-1])
        pairs = torch.cat([known[:, :-1], known[:, 1:]], dim=-1)
        logits = self.out(torch.relu(self.hidden(pairs)))
        return functional.cross_entropy(logits.mT, tokens[:, 2:], reduction="none")


def train(address: str, num_steps: int) -> None:
    """Train, and print what each source had and how well it is known."""
    torch.manual_seed(0)
    model = NextToken()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    every = max(1, num_steps // 8)
    counts, losses = np.zeros(len(STRIDES), int), np.zeros(len(STRIDES))
    with Loader("counting", batch_size=BATCH_SIZE, seed=1, address=address) as loader:
        for batch in loader.stream():
            loss = model(batch["tokens"]).mean(dim=1)
            optimizer.zero_grad()
            loss.mean().backward()
            optimizer.step()
            for number in range(len(STRIDES)):
                its = loss.detach()[batch["source"] == number]
                counts[number] += len(its)
                losses[number] += float(its.sum())
            if loader.step % every == 0 or loader.step == num_steps:
                shown = [
                    f"{name} {count / counts.sum():4.0%} loss {total / max(count, 1):.3f}"
                    for name, count, total in zip(STRIDES, counts, losses, strict=True)
                ]
                print(f"step {loader.last_step:4}  {'   '.join(shown)}", flush=True)
                counts[:], losses[:] = 0, 0
            if loader.step >= num_steps:
                return


if __name__ == "__main__":
    main()
