"""On one GPU: what slicing costs, whether hops hide, and what the allocator sees. On a CPU it runs at toy size.

python -m benchmarks.rtp.gpu [--device cuda]

A rank of N is simulated: the ring's neighbours are this process, and a hop copies a buffer on a stream of its own.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from gyre_trainer.layers.cross_entropy import linear_cross_entropy
from gyre_trainer.layers.mlp import GatedMLP
from gyre_trainer.mesh import make_mesh
from gyre_trainer.ring import Direction, Hop, Ring, Stream
from gyre_trainer.roll_call import RollCall
from gyre_trainer.rotate import rotate
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

_NUM_ROUNDS = 10


class CopyHop(Hop):
    """A hop that is a copy on another stream; waiting holds up the current stream, as NCCL's does."""

    def __init__(self, outgoing: Tensor, incoming: Tensor, stream: torch.cuda.Stream | None, roll_call: RollCall) -> None:
        super().__init__((), roll_call)
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
    """Rank 0 of a ring; without ``hops`` nothing is moved, so that the difference is what hops cost."""
    stream = torch.cuda.Stream() if device.type == "cuda" and hops else None  # type: ignore[no-untyped-call]

    def shift(ring: Ring, outgoing: Tensor, incoming: Tensor, direction: Direction, kind: Stream) -> Hop:
        return CopyHop(outgoing, incoming, stream, ring.roll_call) if hops else Hop((), ring.roll_call)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        with patch.object(Ring, "shift", shift):
            yield
    finally:
        dist.destroy_process_group()


def milliseconds(step: Callable[[], object], device: torch.device) -> float:
    """Median of some rounds."""
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


def mlp_milliseconds(dims: tuple[int, int], num_tokens: int, num_ranks: int, device: torch.device, *, hops: bool) -> float:
    """Forward and backward of one gated MLP, in as many slices as there are ranks; unsliced where there is one."""
    x = torch.randn(num_tokens, dims[0], dtype=torch.bfloat16, device=device, requires_grad=True)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        mlp: nn.Module = GatedMLP(*dims).to(device)
    finally:
        torch.set_default_dtype(before)
    if num_ranks == 1:
        return milliseconds(lambda: _step(mlp, x), device)
    with simulated_ring(num_ranks, device, hops=hops):
        rotate(mlp, mesh=make_mesh(device.type))
        return milliseconds(lambda: _step(mlp, x), device)


def _step(module: nn.Module, x: Tensor) -> None:
    module(x).sum().backward()
    module.zero_grad()


def slices_table(dims: tuple[int, int], tokens: Sequence[int], ranks: Sequence[int], device: torch.device) -> list[str]:
    lines = ["| tokens | ranks | unsliced, ms | sliced | hops exposed |", "|---:|---:|---:|---:|---:|"]
    for num_tokens in tokens:
        whole = mlp_milliseconds(dims, num_tokens, 1, device, hops=False)
        for num_ranks in ranks:
            still, moving = (mlp_milliseconds(dims, num_tokens, num_ranks, device, hops=hops) for hops in (False, True))
            lines.append(f"| {num_tokens} | {num_ranks} | {whole:.2f} | {still / whole:.3f} | {moving / still - 1:+.1%} |")
    return lines


def cross_entropy_table(dim: int, vocab_size: int, num_tokens: int, num_ranks: int, device: torch.device) -> list[str]:
    """The rotated head with its loss beside chunks of one whole head and beside all logits at once."""
    targets = torch.randint(0, vocab_size, (num_tokens,), device=device)
    x = torch.randn(num_tokens, dim, dtype=torch.bfloat16, device=device, requires_grad=True)
    head = nn.Linear(dim, vocab_size, bias=False, dtype=torch.bfloat16, device=device)
    lines = ["| head and loss | ms | allocator's peak, MiB |", "|---|---:|---:|"]
    eager = lambda: F.cross_entropy(head(x).float(), targets).backward()  # type: ignore[no-untyped-call]  # noqa: E731
    chunked = lambda: linear_cross_entropy(head, x, targets).backward()  # type: ignore[no-untyped-call]  # noqa: E731
    for label, step in (("all logits", eager), ("chunked", chunked)):
        lines.append(f"| {label} | {milliseconds(step, device):.1f} | {_allocator_peak(step, device)} |")
        head.zero_grad()
    with simulated_ring(num_ranks, device, hops=True):
        rotate(head, mesh=make_mesh(device.type))
        lines.append(
            f"| rotated, {num_ranks} ranks | {milliseconds(chunked, device):.1f} | {_allocator_peak(chunked, device)} |"
        )
    return lines


def _allocator_peak(step: Callable[[], object], device: torch.device) -> str:
    if device.type != "cuda":
        return "-"
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return f"{torch.cuda.max_memory_allocated() / 2**20:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(parser.parse_args().device)
    if device.type == "cuda":
        print(torch.cuda.get_device_name(), "\n")
        tokens = [2**power for power in range(10, 16)]
        print("\n".join(slices_table((4096, 14_336), tokens, (2, 4, 8, 16), device)), "\n")
        print("\n".join(cross_entropy_table(4096, 128_256, 8192, 8, device)))
        return
    torch.set_num_threads(1)
    print("a CPU: toy sizes, to show that it runs\n")
    print("\n".join(slices_table((64, 256), [32, 64], (2, 4), device)), "\n")
    print("\n".join(cross_entropy_table(32, 512, 64, 4, device)))


if __name__ == "__main__":
    main()
