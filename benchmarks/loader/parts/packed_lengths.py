"""Gain and cost of packing into several lengths, compared with padding.

    python -m benchmarks.loader.parts.packed_lengths

A million documents with the lengths of web text, in steps of 64 samples of 8,192 tokens: how full
sequences are, the sum of L^2 of all rows for each token of a document, processor time of one thread
to pack and to plan, and how many steps have sequences of several lengths.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from gyre_daemon.order.buckets import BucketRule, RowLengths
from gyre_daemon.order.packing import PackRule, pack_documents
from gyre_daemon.order.planner import BatchPlanner, Order
from gyre_daemon.order.sequences import Sequences
from gyre_daemon.order.shuffle.permutation import Int64Array
from gyre_daemon.order.substitutes import NO_SAMPLES

from benchmarks.loader.markdown import table

T = TypeVar("T")
NUM_DOCUMENTS, LONGEST, BATCH_SIZE, WINDOW, NUM_RANKS, ROUNDS = 1_000_000, 8192, 64, 64, 8, 3
TOGETHER = 8  # steps planned at once
CHAINS = ((8192,), (2048, 8192), (1024, 2048, 8192), (1024, 2048, 4096, 8192))
HEADS = ("", "filled", "attention over rows", "packing", "a step", "on 8 ranks", "mixed steps")


@dataclass(frozen=True)
class Shape:
    """The share of the rows filled with tokens, and the sum of L^2 for each such token."""

    filled: float
    per_token: float


def cpu_s(work: Callable[[], T]) -> tuple[T, float]:
    """The result of some work, and its least processor time of this thread."""
    times = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        found = work()
        times.append(time.thread_time() - began)
    return found, min(times)


def padded(lengths: Int64Array, window_batches: int) -> Shape:
    """Batches padded to their longest document, sorted within windows."""
    size = BATCH_SIZE * window_batches
    shuffled = np.random.default_rng(1).permutation(lengths)
    windows = shuffled[: len(shuffled) // size * size].reshape(-1, size)
    batches = np.sort(windows, axis=1).reshape(-1, BATCH_SIZE)
    longest = batches.max(axis=1).astype(float)
    rows = BATCH_SIZE * longest
    return Shape(batches.sum() / rows.sum(), (rows * longest).sum() / batches.sum())


def planner(packed: Sequences, chain: tuple[int, ...]) -> BatchPlanner:
    """Plans steps of one length, where there are several."""
    if len(chain) == 1:
        return BatchPlanner(Order("full", "drop", 1, BATCH_SIZE), packed.num_samples)
    order = Order("full", "drop", 1, BATCH_SIZE, bucket=BucketRule("tokens", WINDOW))
    return BatchPlanner(order, packed.num_samples, lengths_of=RowLengths(packed.grouped.of))


def step_ms(packed: Sequences, chain: tuple[int, ...], num_ranks: int) -> float:
    """Processor time of planning one rank's part of a step, in milliseconds."""

    def plan() -> int:
        its = planner(packed, chain)
        num_steps = min(its.num_steps(1), 1000) // TOGETHER * TOGETHER
        for step in range(0, num_steps, TOGETHER):
            its.batches(step, TOGETHER, num_ranks - 1, num_ranks)
        return num_steps

    num_steps, seconds = cpu_s(plan)
    return seconds / num_steps * 1e3


def packed_row(lengths: Int64Array, chain: tuple[int, ...]) -> tuple[str, ...]:
    """The row of the table for sequences of these lengths."""
    rule = PackRule(chain[-1], "split", shorter=chain[:-1])
    packed, pack_s = cpu_s(lambda: pack_documents(len(lengths), lengths.take, rule, NO_SAMPLES))
    its = planner(packed, chain)
    plan = its.batches(0, its.num_steps(1), 0, 1)
    filled = packed.num_tokens / (packed.num_samples * LONGEST)
    rows = np.array([LONGEST]) if plan.row_lengths is None else plan.row_lengths
    shape = Shape(filled, float(rows.mean()) / filled)
    own = packed.grouped.of(plan.sample_ids.reshape(-1)).reshape(plan.sample_ids.shape)
    times = [f"{step_ms(packed, chain, num_ranks):.3f} ms" for num_ranks in (1, NUM_RANKS)]
    mixed = float((own != own[:, :1]).any(axis=1).mean())
    return (*shown(f"packed, {[*chain]}", shape), f"{pack_s:.2f} s", *times, f"{mixed:.1%}")


def shown(name: str, shape: Shape) -> tuple[str, str, str]:
    """The first cells of a row."""
    return name, f"{shape.filled:.3%}", f"{shape.per_token:,.0f}"


def main() -> None:
    """Print the table."""
    draws = np.random.default_rng(0).lognormal(6.2, 1.1, NUM_DOCUMENTS)
    lengths = draws.astype(np.int64) + 1
    cut = np.minimum(lengths, LONGEST)
    whole = Shape(float(cut.mean()) / LONGEST, LONGEST**2 / float(cut.mean()))
    rows: list[tuple[str, ...]] = [
        (*shown(f"padded to {LONGEST}", whole), *[""] * 4),
        (*shown(f"padded to the longest of {BATCH_SIZE}", padded(cut, 1)), *[""] * 4),
        (*shown("the same, with `bucket`", padded(cut, WINDOW)), *[""] * 4),
    ]
    rows += [packed_row(lengths, chain) for chain in CHAINS]
    print("\n".join(table(HEADS, rows)))


if __name__ == "__main__":
    main()
