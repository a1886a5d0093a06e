"""When samples and blocks are read next, for the node cache: it evicts the last to come. Pure."""

from collections.abc import Callable

import numpy as np

from gyre_daemon.order.epochs import EpochOrder, EpochOrders
from gyre_daemon.order.shuffle.block_order import BlockOrder
from gyre_daemon.order.shuffle.blocks import BlockTable
from gyre_daemon.order.shuffle.permutation import Int64Array
from gyre_daemon.order.stages import Stages

NEVER = (1 << 63) - 1  # a position that no job reaches
# Epochs in which a next use is looked for. `drop` may leave a sample out of several epochs in a
# row; one that none of these reads may as well be evicted.
_MAX_EPOCHS_AHEAD = 8

_Span = tuple[Int64Array, Int64Array]  # places [first, end)


class NextUses:
    """Looks for samples and blocks in the epochs to come of one job."""

    def __init__(self, stages: Stages, epochs: EpochOrders) -> None:
        """Look at nothing yet.

        Args:
            stages: of the job.
            epochs: the orders of its epochs.
        """
        self._stages = stages
        self._epochs = epochs

    def of_samples(self, sample_ids: Int64Array, position: int) -> Int64Array:
        """See `BatchPlanner.next_use`."""

        def span(epoch: EpochOrder, which: Int64Array) -> _Span:
            places = epoch.inverse(sample_ids[which])
            return places, places + 1

        return self._in_spans(sample_ids, position, span)

    def of_blocks(self, table: BlockTable, blocks: Int64Array, position: int) -> Int64Array:
        """As `of_samples`, for the blocks of the order `block`.

        It is the first position of the stretch which reads a block, or `position` if that has
        begun.
        """

        def span(epoch: EpochOrder, which: Int64Array) -> _Span:
            assert isinstance(epoch, BlockOrder)
            return epoch.span(blocks[which])

        return self._in_spans(table.first_sample(blocks), position, span)

    def _in_spans(
        self,
        sample_ids: Int64Array,
        position: int,
        span: Callable[[EpochOrder, Int64Array], _Span],
    ) -> Int64Array:
        """The first position at or after `position` in the span of each of n items.

        Args:
            sample_ids: int64 [n], a sample of each item; an epoch that lacks it has no span of it.
            position: where to begin.
            span: takes an epoch's order and numbers of items, and returns their spans of places.
        """
        found = np.full(len(sample_ids), NEVER)
        first_epoch = self._stages.at(position)[0]
        for epoch in range(first_epoch, first_epoch + _MAX_EPOCHS_AHEAD):
            left = np.flatnonzero(found == NEVER)
            if not left.size:
                break
            left = left[sample_ids[left] < self._stages.num_samples(epoch)]
            if left.size:
                spans = span(self._epochs.of(epoch), left)
                after = position - self._stages.begin(epoch)
                found[left] = self._first_in_epoch(spans, epoch, after)
        return found

    def _first_in_epoch(self, span: _Span, epoch: int, after: int) -> Int64Array:
        """The first position of an epoch in each span of places, or NEVER.

        Args:
            span: places of the epoch.
            epoch: of the job.
            after: the least place.
        """
        first = np.full(len(span[0]), NEVER)
        length = self._stages.length(epoch)
        position, num_samples = self._stages.begin(epoch), self._stages.num_samples(epoch)
        for padding in range(0, length, num_samples):  # padding reads samples again
            low = np.maximum(span[0] + padding, max(after, 0))
            usable = low < np.minimum(span[1] + padding, length)
            first[usable] = np.minimum(first[usable], position + low[usable])
            if (first != NEVER).all():  # later padding is read later
                break
        return first
