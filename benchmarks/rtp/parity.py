"""How far rotated training drifts from one process: losses of AdamW steps in float64.

python -m benchmarks.rtp.parity [--ranks 1 2 3 4] [--steps 50]
"""

import argparse

import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.rotate import rotate_all
from gyre_trainer.shards.initialisation import materialize
from gyre_trainer.training.gpt import GPT, GPTConfig
from torch import Tensor

from benchmarks.rtp.ranks import run_on_ranks

_CONFIG = GPTConfig(96, 2, 48, 12, 12, 96, 16)
_NUM_SEQUENCES = 24  # a multiple of 1, 2, 3, 4, 6, 8 ranks


def losses(num_steps: int, *, rotated: bool) -> list[float]:
    """The global batch's mean loss before each step; each rank computes its part if rotated."""
    torch.set_default_dtype(torch.float64)
    with torch.device("meta"):
        model = GPT(_CONFIG)
    if rotated:
        rotate_all(model, mesh=make_mesh("cpu"), min_numel=0)
    materialize(model, seed=7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for step in range(num_steps):
        tokens, targets = _batch(step)
        if rotated:
            tokens, targets = (
                part.chunk(dist.get_world_size())[dist.get_rank()] for part in (tokens, targets)
            )
        loss = model.loss(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        found.append(_mean(loss.detach()) if rotated else loss.item())
    return found


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(
        0, _CONFIG.vocab_size, (_NUM_SEQUENCES, _CONFIG.max_seq_len + 1), generator=generator
    )
    return tokens[:, :-1], tokens[:, 1:]


def _mean(loss: Tensor) -> float:
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(1)
    alone = losses(options.steps, rotated=False)
    print(f"{options.steps} AdamW steps in float64, loss from {alone[0]:.4f} to {alone[-1]:.4f}\n")
    print("| ranks | largest relative distance of a step's loss to one process |\n|---:|---:|")
    for num_ranks in options.ranks:
        found = run_on_ranks(num_ranks, _rotated_losses, options.steps)[0]
        worst = max(abs(a / b - 1) for a, b in zip(found, alone, strict=True))
        print(f"| {num_ranks} | {worst:.1e} |")


def _rotated_losses(num_steps: int) -> list[float]:
    return losses(num_steps, rotated=True)


if __name__ == "__main__":
    main()
