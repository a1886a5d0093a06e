"""Packs the documents of a mixture: those of each source by themselves. Pure.

A sequence has documents of one source, so the quotas of the mixture count sequences: a source has
its share of the places for tokens. Which documents share a sequence does not depend on weights.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from gyre_daemon.datasets.formats import FieldSpec
from gyre_daemon.datasets.mixing import SOURCE
from gyre_daemon.errors import InvalidRequest
from gyre_daemon.order.mixture import MixedSource, Mixture
from gyre_daemon.order.packing import PackRule, Sequences, pack_documents
from gyre_daemon.order.planner import NO_SAMPLES
from gyre_daemon.order.shuffle.permutation import Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class MixedSequences:
    """The facts of packed sequences that come from several sources.

    Attributes:
        mixture: of the sequences.
        names: S, of the datasets with documents of their own.
        bounds: int64 [S + 1], the first sequence of each, and P.
    """

    mixture: Mixture
    names: tuple[str, ...]
    bounds: Int64Array

    @property
    def field(self) -> FieldSpec:
        """Of each sequence, the number of its source."""
        int32 = np.dtype("<i4")
        return FieldSpec(SOURCE, int32, (), ragged=False, codec="indexed", categories=self.names)

    def source_of(self, sequences: Int64Array) -> Int64Array:
        """The numbers of the sources of sequences; both int64 [n]."""
        return np.searchsorted(self.bounds, sequences, side="right") - 1


@dataclass(frozen=True, slots=True)
class _Counted:
    """So many sequences, for an order to go through."""

    num_samples: int

    def blocks(self, io_block_bytes: int) -> NoReturn:
        """See `BlockIndex.blocks`: an order of blocks is refused for the mixture."""
        raise AssertionError


def pack_sources(
    mixture: Mixture,
    names: tuple[str, ...],
    lengths_of: Callable[[Int64Array], Int64Array],
    rule: PackRule,
    left_out: Int64Array,
) -> tuple[Sequences, MixedSequences]:
    """Pack the documents of each source of a mixture.

    Args:
        mixture: of the documents.
        names: S, of the datasets with documents of their own, in the order of the documents.
        lengths_of: see `pack_documents`.
        rule: how.
        left_out: see `pack_documents`.

    Raises:
        InvalidRequest: the documents of a source cannot be packed; names it.
    """
    packed: list[Sequences] = []
    for name, (first, stop) in zip(names, _ranges(mixture, 0), strict=True):
        some = left_out[slice(*np.searchsorted(left_out, (first, stop)))]

        def own_lengths(documents: Int64Array, first: int = first) -> Int64Array:
            return lengths_of(documents + first)

        try:
            its = pack_documents(stop - first, own_lengths, rule, some - first)
        except InvalidRequest as error:
            raise InvalidRequest(f"the source `{name}`: {error}") from error
        packed.append(replace(its, documents=its.documents + first))
    counts = [its.num_samples for its in packed]
    bounds = np.concatenate(([0], np.cumsum(counts)))
    mixed, _ = _mixed(mixture, iter(counts))
    return _joined(packed), MixedSequences(mixed, names, bounds)


def _ranges(mixture: Mixture, first_id: int) -> Iterator[tuple[int, int]]:
    """The documents `[first, stop)` of each dataset with its own documents."""
    for source in mixture.sources:
        begin = first_id + source.first_id
        if isinstance(source.ordered, Mixture):
            yield from _ranges(source.ordered, begin)
        else:
            yield begin, begin + source.ordered.num_samples


def _mixed(mixture: Mixture, counts: Iterator[int]) -> tuple[Mixture, int]:
    """The same mixture, of so many sequences of each dataset, and their number."""
    sources: list[MixedSource] = []
    first_id = 0
    for each in mixture.sources:
        if isinstance(each.ordered, Mixture):
            nested, count = _mixed(each.ordered, counts)
            its = replace(each, ordered=nested)
        else:
            count = next(counts)
            its = replace(each, ordered=_Counted(count))
        sources.append(replace(its, corrupt=NO_SAMPLES, first_id=first_id))
        first_id += count
    return mixture.of(sources), first_id


def _joined(packed: Sequence[Sequences]) -> Sequences:
    """All sequences, source after source."""
    begins = None
    if any(its.begins is not None for its in packed):
        begins = np.concatenate(
            [np.zeros_like(its.documents) if its.begins is None else its.begins for its in packed]
        )
    parts = np.cumsum([0, *(len(its.documents) for its in packed)])
    bounds = [its.bounds[:-1] + first for its, first in zip(packed, parts, strict=False)]
    return Sequences(
        np.concatenate([its.documents for its in packed]),
        begins,
        np.concatenate([its.lengths for its in packed]),
        np.concatenate([*bounds, parts[-1:]]),
        sum(its.num_empty for its in packed),
        sum(its.num_overlong for its in packed),
    )
