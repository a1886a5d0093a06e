"""On one GPU: the cost of slicing, whether hops hide, and the allocator's peak.

    python -m benchmarks.rtp.gpu [--device cuda]

On a CPU it runs at toy size. A rank of N is simulated: the ring's neighbours are this process, and
a hop copies a buffer on a stream of its own. Such a copy is faster than any link between GPUs, but
it takes memory bandwidth, and kernels wait for it as they would for NCCL's.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring import Direction, Hop, Ring
from gyre_trainer.comm.transport import Stream
from gyre_trainer.layers.attention import rope_table
from gyre_trainer.layers.head import linear_cross_entropy
from gyre_trainer.rotate import rotate, rotate_all
from gyre_trainer.training.models.gpt import Block, GPTConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

_NUM_ROUNDS = 10
# Sixteen key/value heads, not eight: as many as the largest number of ranks, so that every slice is
# of heads.
_LLAMA_BLOCK = GPTConfig(128_256, 1, 4096, 32, 16, 14_336, 4096, norm="layer")
_TOY_BLOCK = GPTConfig(64, 1, 64, 4, 4, 128, 32, norm="layer")


class CopyHop(Hop):
    """A hop that is a copy on another stream.

    Waiting holds up the current stream, as NCCL's does.
    """

    def __init__(
        self,
        outgoing: Tensor,
        incoming: Tensor,
        stream: torch.cuda.Stream | None,
        ring: Ring,
    ) -> None:
        super().__init__((), ring, 0, {})
        self._arrived: torch.cuda.Event | None = None
        size = min(outgoing.numel(), incoming.numel())
        if stream is None:
            incoming[:size].copy_(outgoing[:size])
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            incoming[:size].copy_(outgoing[:size])
            self._arrived = stream.record_event()

    def wait(self) -> None:
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)


@contextmanager
def simulated_ring(num_ranks: int, device: torch.device, *, hops: bool) -> Iterator[None]:
    """A context in which this process is rank 0 of a ring.

    Without ``hops`` nothing is moved, so that the difference is the cost of hops.
    """
    stream = torch.cuda.Stream() if device.type == "cuda" and hops else None  # type: ignore[no-untyped-call]

    def shift(
        ring: Ring,
        outgoing: Tensor,
        incoming: Tensor,
        direction: Direction,
        kind: Stream,
        identity: int = 0,
    ) -> Hop:
        return CopyHop(outgoing, incoming, stream, ring) if hops else Hop((), ring, 0, {})

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        with patch.object(Ring, "shift", shift):
            yield
    finally:
        dist.destroy_process_group()


def milliseconds(step: Callable[[], object], device: torch.device) -> float:
    """The median time of some rounds."""
    found = []
    for _ in range(_NUM_ROUNDS + 2):
        _synchronize(device)
        before = time.perf_counter()
        step()
        _synchronize(device)
        found.append(1e3 * (time.perf_counter() - before))
    return statistics.median(found[2:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Cost:
    """The time of one step, and the peak of CUDA's allocator; None on a CPU."""

    ms: float
    peak_bytes: int | None

    @property
    def peak(self) -> str:
        return "-" if self.peak_bytes is None else f"{self.peak_bytes / 2**20:,.0f}"


def cost(step: Callable[[], object], device: torch.device) -> Cost:
    """The cost of a step that was taken before, so that nothing is allocated for the first time."""
    ms = milliseconds(step, device)
    if device.type != "cuda":
        return Cost(ms, None)
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return Cost(ms, torch.cuda.max_memory_allocated())


def block_cost(
    config: GPTConfig, num_tokens: int, num_ranks: int, device: torch.device, *, hops: bool
) -> Cost:
    """Forward and backward of one block in as many slices as there are ranks.

    The norms stay whole. With one rank the block is unsliced.
    """
    num_positions = min(num_tokens, config.max_seq_len)
    rope = rope_table(num_positions, config.dim // config.num_heads, config.rope_theta, device)
    x, grad = torch.randn(
        2,
        num_tokens // num_positions,
        num_positions,
        config.dim,
        dtype=torch.bfloat16,
        device=device,
    )
    x.requires_grad_()
    block: nn.Module = Block(config).to(device, torch.bfloat16)

    def step() -> None:
        block(x, rope).backward(grad)
        block.zero_grad()
        x.grad = None

    if num_ranks == 1:
        return cost(step, device)
    with simulated_ring(num_ranks, device, hops=hops):
        rotate_all(block, mesh=make_mesh(device.type), min_numel=0)
        return cost(step, device)


def slices_table(
    config: GPTConfig, tokens: Sequence[int], ranks: Sequence[int], device: torch.device
) -> list[str]:
    """Each number of slices beside the unsliced block.

    The time that hops add is relative to the same slices without hops.
    """
    times, peaks = "unsliced, ms | sliced | hops exposed", "peak unsliced, MiB | peak sliced, MiB"
    lines = [f"| tokens | ranks | {times} | {peaks} |", "|---:|---:|---:|---:|---:|---:|---:|"]
    for num_tokens in tokens:
        whole = block_cost(config, num_tokens, 1, device, hops=False)
        for num_ranks in ranks:
            still, moving = (
                block_cost(config, num_tokens, num_ranks, device, hops=hops)
                for hops in (False, True)
            )
            times = f"{whole.ms:.2f} | {still.ms / whole.ms:.3f} | {moving.ms / still.ms - 1:+.1%}"
            lines.append(f"| {num_tokens} | {num_ranks} | {times} | {whole.peak} | {moving.peak} |")
    return lines


def cross_entropy_table(
    dim: int, vocab_size: int, num_tokens: int, num_ranks: int, device: torch.device
) -> list[str]:
    """The rotated head and loss beside a whole head in chunks and beside all logits at once."""
    targets = torch.randint(0, vocab_size, (num_tokens,), device=device)
    x = torch.randn(num_tokens, dim, dtype=torch.bfloat16, device=device, requires_grad=True)
    head = nn.Linear(dim, vocab_size, bias=False, dtype=torch.bfloat16, device=device)

    def chunked() -> None:
        linear_cross_entropy(head, x, targets).backward()  # type: ignore[no-untyped-call]
        head.zero_grad()
        x.grad = None

    def eager() -> None:
        F.cross_entropy(head(x).float(), targets).backward()  # type: ignore[no-untyped-call]
        head.zero_grad()
        x.grad = None

    costs = {"all logits": cost(eager, device), "chunked": cost(chunked, device)}
    with simulated_ring(num_ranks, device, hops=True):
        rotate(head, mesh=make_mesh(device.type))
        costs[f"rotated, {num_ranks} ranks"] = cost(chunked, device)
    lines = ["| head and loss | ms | to chunked | allocator's peak, MiB |", "|---|---:|---:|---:|"]
    base = costs["chunked"].ms
    return lines + [
        f"| {name} | {each.ms:.1f} | {each.ms / base:.3g} | {each.peak} |"
        for name, each in costs.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    device = torch.device(parser.parse_args(arguments).device)
    if device.type == "cuda":
        print(torch.cuda.get_device_name(), "\n")
        tokens = [2**power for power in range(10, 16)]
        print("\n".join(slices_table(_LLAMA_BLOCK, tokens, (2, 4, 8, 16), device)), "\n")
        print("\n".join(cross_entropy_table(4096, 128_256, 8192, 8, device)))
        return
    torch.set_num_threads(1)
    print("a CPU: toy sizes, to show that it runs\n")
    print("\n".join(slices_table(_TOY_BLOCK, [32, 64], (2, 4), device)), "\n")
    print("\n".join(cross_entropy_table(32, 512, 64, 4, device)))


if __name__ == "__main__":
    main()
