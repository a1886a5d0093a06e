"""Computes few of many equal chunks of tokens while a plan counts what a step costs.

[Note: Chunks that stand for others]

A head computes its logits chunk by chunk. A plan's dry run computes no values: to it, all chunks
but the last differ in nothing, and each takes as much Python as the first. So while it counts, the
first, the second and the last are computed, and the second stands for all between. `multiplicity`
says for how many, and what is counted is multiplied by that. Memory is as with all of them, because
a chunk lets go of its logits before the next one begins.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

# None: nothing is counted, so all chunks are computed.
_stands_for: ContextVar[int | None] = ContextVar("stands_for", default=None)


@contextmanager
def few_for_all() -> Iterator[None]:
    """A context in which a chunk may stand for others; without it all are computed."""
    token = _stands_for.set(1)
    try:
        yield
    finally:
        _stands_for.reset(token)


def multiplicity() -> int:
    """For how many chunks the one that is computed now stands, itself among them."""
    return _stands_for.get() or 1


def computed_of(chunks: Sequence[slice]) -> Iterator[slice]:
    """The chunks to compute, in order: all, or few where `few_for_all` says so.

    Args:
        chunks: all of one size but the last.
    """
    if _stands_for.get() is None or len(chunks) <= 3:
        yield from chunks
        return
    yield chunks[0]
    _stands_for.set(len(chunks) - 2)
    try:
        yield chunks[1]
    finally:
        _stands_for.set(1)
    yield chunks[-1]
