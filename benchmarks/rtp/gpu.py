"""On one GPU: the cost of slicing, whether hops hide, and the allocator's peak.

    python -m benchmarks.rtp.gpu [--device cuda]

On a CPU it runs at toy size. A rank of N is simulated: the ring's neighbours are this process, and
a hop copies a buffer on a stream of its own. Such a copy is faster than any link between GPUs, but
it takes memory bandwidth, and kernels wait for it as they would for NCCL's. Buffers are filled
with values as weights have them, so kernels take the time that they take in training. The last
table is of whole steps: embedding, blocks, head with its loss, and AdamW.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from gyre_trainer.comm.identity import BufferPool
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring import Leg, ProcessGroupTransport, Ring, Stream, Wait, ring_of
from gyre_trainer.layers.attention import rope_table
from gyre_trainer.layers.head import linear_cross_entropy
from gyre_trainer.rotate import RotationPolicy, rotate, rotate_all
from gyre_trainer.training.gpt import Block, GPTConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.rtp.workloads import Model, Workload, make_batch

_NUM_ROUNDS = 10
_WEIGHT_STD = 0.02
# Sixteen key/value heads, not eight: as many as the largest number of ranks, so that every slice is
# of heads.
_LLAMA_BLOCK = GPTConfig(128_256, 1, 4096, 32, 16, 14_336, 4096, norm="layer")
_TOY_BLOCK = GPTConfig(64, 1, 64, 4, 4, 128, 32, norm="layer")
_LLAMA_STEP = Workload(replace(_LLAMA_BLOCK, num_layers=4))
_TOY_STEP = Workload(replace(_TOY_BLOCK, num_layers=2))


class CopyTransport(ProcessGroupTransport):
    """Hops by copies on another stream; without ``hops`` nothing moves.

    Waiting holds up the current stream, as NCCL's does.
    """

    def __init__(self, ring: Ring, device: torch.device, *, hops: bool) -> None:
        super().__init__(ring.group)
        self.moves, self._hops = True, hops
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def start(self, legs: Sequence[Leg], stream: Stream) -> list[tuple[Wait, str]]:
        if not self._hops:
            return []
        if self._stream is None:
            _copy(legs)
            return [(_nothing, "copying")]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            _copy(legs)
            return [(self._stream.record_event().wait, "copying")]

    def give_up(self) -> None: ...


def _copy(legs: Sequence[Leg]) -> None:
    """Copy sent tensors to received ones, as far as they fit."""
    incoming = [leg.tensor.view(-1) for leg in legs if leg.arrives]
    outgoing = [leg.tensor.view(-1) for leg in legs if not leg.arrives]
    for target, source in zip(incoming, outgoing, strict=False):
        size = min(target.numel(), source.numel())
        target[:size].copy_(source[:size])


def _nothing() -> None:
    """The wait for a copy on a CPU, which is over when it returns."""


class _FilledPool(BufferPool):
    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = super().allocate(numel, dtype, device)
        return buffer.normal_(std=_WEIGHT_STD) if dtype.is_floating_point else buffer.zero_()


@contextmanager
def simulated_ring(num_ranks: int, device: torch.device, *, hops: bool) -> Iterator[None]:
    """A context in which this process is rank 0 of a ring whose slices are all equally large.

    Without ``hops`` nothing is moved, so that the difference is the cost of hops.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        ring = ring_of(make_mesh(device.type))
        ring.transport, ring.pool = CopyTransport(ring, device, hops=hops), _FilledPool()
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


def steps_table(
    workload: Workload, tokens: Sequence[int], ranks: Sequence[int], device: torch.device
) -> list[str]:
    """Whole steps with recomputation by block: with hops, and relative to those without."""
    lines = [
        "| tokens | ranks | step, ms | hops exposed | peak, MiB |",
        "|---:|---:|---:|---:|---:|",
    ]
    for num_tokens in tokens:
        for num_ranks in ranks:
            moving, still = (
                step_cost(workload.with_tokens(num_tokens), num_ranks, device, hops=hops)
                for hops in (True, False)
            )
            cells = f"{moving.ms:.2f} | {moving.ms / still.ms - 1:+.1%} | {moving.peak}"
            lines.append(f"| {num_tokens} | {num_ranks} | {cells} |")
    return lines


def step_cost(workload: Workload, num_ranks: int, device: torch.device, *, hops: bool) -> Cost:
    """A step of AdamW on this rank's tokens."""
    with simulated_ring(num_ranks, device, hops=hops):
        model = Model(workload).to(device, workload.dtype)
        policy = RotationPolicy(recompute="block")
        rotate_all(model, mesh=make_mesh(device.type), policy=policy, min_numel=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        batch = make_batch(workload, 1, device)

        def step() -> None:
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        return cost(step, device)


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
        print("\n".join(cross_entropy_table(4096, 128_256, 8192, 8, device)), "\n")
        print("\n".join(steps_table(_LLAMA_STEP, [4096, 16_384], (2, 4, 8), device)))
        return
    torch.set_num_threads(1)
    print("a CPU: toy sizes, to show that it runs\n")
    print("\n".join(slices_table(_TOY_BLOCK, [32, 64], (2, 4), device)), "\n")
    print("\n".join(cross_entropy_table(32, 512, 64, 4, device)), "\n")
    print("\n".join(steps_table(_TOY_STEP, [32], (2, 4), device)))


if __name__ == "__main__":
    main()
