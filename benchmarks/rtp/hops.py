"""The cost of a hop: CPU time per MiB, of bare transfers of gloo and of a ring, and an all-reduce.

python -m benchmarks.rtp.hops
"""

import os
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring import Direction, Ring, Stream, ring_of
from torch import Tensor

from benchmarks.rtp.ranks import run_on_ranks

_MIB = 2**20
_TOTAL_MIB = 54
_SIZES_MIB = (0.25, 1, 2, 4, 9, 18)
_NUM_ROUNDS = 8

Cost = tuple[float, float, float]  # seconds: on the clock, of the process, of these in the kernel


def costs() -> dict[str, Cost]:
    """Medians of the cost of moving all data once."""
    here, there = torch.randn(2, _TOTAL_MIB * _MIB // 4).unbind()
    found = {"a copy in memory": _cost(lambda: there.copy_(here))}
    for size in _SIZES_MIB:
        found[f"bare transfers of {size:g} MiB on gloo"] = _cost(
            partial(_hops, here, there, int(size * _MIB) // 4)
        )
    ring = ring_of(make_mesh("cpu"))
    for size in _SIZES_MIB:
        found[f"hops of {size:g} MiB"] = _cost(
            partial(_ring_hops, ring, here, int(size * _MIB) // 4)
        )
    found["all-reduces of 27 MiB"] = _cost(
        lambda: [dist.all_reduce(part) for part in there.chunk(2)]
    )
    return found


def _hops(here: Tensor, there: Tensor, numel: int) -> None:
    """Send each part to the next rank and receive from the previous one, part after part."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for outgoing, incoming in zip(torch.split(here, numel), torch.split(there, numel), strict=True):
        ops = (
            dist.P2POp(dist.irecv, incoming, (rank - 1) % size),
            dist.P2POp(dist.isend, outgoing, (rank + 1) % size),
        )
        for work in dist.batch_isend_irecv(list(ops)):
            work.wait()


def _ring_hops(ring: Ring, here: Tensor, numel: int) -> None:
    """The same as `_hops`, in the way of a rotation."""
    for outgoing in torch.split(here, numel):
        incoming = ring.pool.take(numel, here.dtype, here.device)
        ring.shift(outgoing, incoming, Direction.CLOCKWISE, Stream.WEIGHTS).wait()
        ring.pool.put(incoming)


def _cost(act: Callable[[], object]) -> Cost:
    rounds = []
    for _ in range(_NUM_ROUNDS):
        dist.barrier()
        before = _clocks()
        act()
        rounds.append([after - then for after, then in zip(_clocks(), before, strict=True)])
    wall, cpu, kernel = (statistics.median(column) for column in zip(*rounds, strict=True))
    return wall, cpu, kernel


def _clocks() -> Cost:
    return (
        time.perf_counter(),
        time.process_time(),
        resource.getrusage(resource.RUSAGE_SELF).ru_stime,
    )


def main() -> None:
    ranks = run_on_ranks(2, costs)
    print(
        f"2 ranks, load average {os.getloadavg()[0]:.1f}; ms per MiB that a rank sends, "
        "mean of the ranks\n"
    )
    print("| | on the clock | CPU | of it in the kernel |\n|---|---:|---:|---:|")
    for name in ranks[0]:
        cells = [
            1e3 * statistics.mean(column) / _TOTAL_MIB
            for column in zip(*(rank[name] for rank in ranks), strict=True)
        ]
        print(f"| {name} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")


if __name__ == "__main__":
    main()
