"""The order `block`: samples are read in blocks, and mixed with those of hundreds of other blocks, in O(1) memory.

Places of an epoch become sample ids in two steps.

*The belt* is all samples, block after block, the blocks in a keyed random order. It is cut into as many equal *sections* as
there are blocks; a section has the samples of one to three blocks that follow each other on the belt.

*The sliding window.* Places are cut into *groups* as long as the sections. Group g takes its samples from the sections
`[g - h, g + h]`, evenly from all of them, and every section gives its samples evenly to the groups around it: element k of
group g is element k of section `g - d(k)`, where the offsets d are spread symmetrically over `[-h, h]`. Where that section lies
before the belt's beginning or behind its end, the belt is reflected there: the section is the mirrored one, the element the
mirrored k. As the offsets are symmetric this is a bijection, with its inverse at the same cost, and each section is read within
one stretch of `2h + 1` groups and never again.

Within a section the samples are permuted. Within a group, the elements come in runs that have every offset once: first the even
ones in a random order, then the odd ones, since neighbouring sections may share a block. Where a group is shorter than the
window, a batch spans several, and neighbouring groups read neighbouring sections; so groups come *interlaced*: in stretches of
as many groups as reach every section of the window once, first every fourth one, then those behind them. So successive samples,
up to a quarter of the window, come from nearly as many blocks, and a batch of that size is as mixed as one of a global shuffle.
"""

import hashlib

import numpy as np
import numpy.typing as npt

from gyre_daemon.order.blocks import BlockTable
from gyre_daemon.order.permutation import KEY_BYTES, Int64Array, Permutation, epoch_key
from gyre_daemon.order.scatter import SCATTER_KEY_BYTES, Scatter

_NUM_LACED = 4
_MIN_WINDOW_BLOCKS, _MAX_WINDOW_BLOCKS, _WINDOW_BYTES = 256, 4096, 512 << 20
_MIN_IO_BLOCK_BYTES, _MAX_IO_BLOCK_BYTES = 128 << 10, 4 << 20
_KEY_ENDS = np.cumsum((KEY_BYTES, SCATTER_KEY_BYTES, SCATTER_KEY_BYTES))


def default_window_blocks(global_batch_size: int) -> int:
    """Four blocks for each sample of a batch: so batch-mates come from different blocks as good as always."""
    return min(max(4 * global_batch_size, _MIN_WINDOW_BLOCKS), _MAX_WINDOW_BLOCKS)


def default_io_block_bytes(window_blocks: int) -> int:
    """As long as requests are worth while, and as the window fits into 512 MiB: half of a node cache of the usual size."""
    return min(max(_WINDOW_BYTES // window_blocks, _MIN_IO_BLOCK_BYTES), _MAX_IO_BLOCK_BYTES)


class BlockOrder:
    """A bijection from the places of one epoch to sample ids, and back."""

    def __init__(self, seed: int, epoch: int, table: BlockTable, window_blocks: int) -> None:
        """Prepare one epoch; takes time and memory as there are irregular blocks, which is one per shard of equal samples.

        Args:
            seed: in `[0, 2**64)`.
            epoch: in `[0, 2**64)`.
            table: of the dataset's blocks.
            window_blocks: how many blocks are mixed with each other, at least 1.
        """
        key = hashlib.blake2b(epoch_key(seed, epoch), person=b"gyre.block.order").digest()
        of_belt, of_sections, of_runs, _ = np.split(np.frombuffer(key, np.uint8), _KEY_ENDS)
        self._belt = _Belt(of_belt.tobytes(), table)
        self._within_section = Scatter(of_sections.tobytes())
        self._within_half = Scatter(of_runs.tobytes())
        self._sections = _Sections(table.num_samples, table.num_blocks)
        self._window = 2 * min((window_blocks - 1) // 2, table.num_blocks - 1) + 1
        self._lace = _NUM_LACED * max(1, self._window // (_NUM_LACED * self._sections.size))

    def __call__(self, places: Int64Array) -> Int64Array:
        """Sample ids at places of the epoch; both int64 [n], all in `[0, N)`."""
        turn, element = self._sections.split(places)
        group = self._interlace(turn)
        section, element = self._slide(group, self._shuffle_runs(group, element), sign=-1)
        element = self._within_section(section, element, self._sections.sizes(section))
        return self._belt(self._sections.join(section, element))

    def inverse(self, sample_ids: Int64Array) -> Int64Array:
        """Places at which sample ids occur; both int64 [n], all in `[0, N)`."""
        section, element = self._sections.split(self._belt.inverse(sample_ids))
        element = self._within_section.inverse(section, element, self._sections.sizes(section))
        group, element = self._slide(section, element, sign=1)
        return self._sections.join(self._unlace(group), self._unshuffle_runs(group, element))

    def span(self, blocks: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The places `[first, end)` of the epoch outside which no sample of each block comes."""
        first, last = (self._sections.split(ends)[0] for ends in self._belt.ends(blocks))
        reach, count = self._window // 2, self._sections.count
        first_turn, last_turn = np.maximum(first - reach, 0), np.minimum(last + reach, count - 1)
        if self._lace > _NUM_LACED:  # else groups come in their order
            first_turn -= first_turn % self._lace
            last_turn = np.minimum(last_turn - last_turn % self._lace + self._lace, count) - 1
        behind = self._sections.join(last_turn, self._sections.sizes(last_turn))
        return self._sections.join(first_turn, np.zeros_like(first_turn)), behind

    def _interlace(self, turn: Int64Array) -> Int64Array:
        """Which group comes when: within laces, every fourth one, then those behind them, and so on."""
        place = turn % self._lace
        quarter = self._lace // _NUM_LACED
        return np.where(self._is_laced(turn), turn - place + place % quarter * _NUM_LACED + place // quarter, turn)

    def _unlace(self, group: Int64Array) -> Int64Array:
        place = group % self._lace
        quarter = self._lace // _NUM_LACED
        return np.where(self._is_laced(group), group - place + place % _NUM_LACED * quarter + place // _NUM_LACED, group)

    def _is_laced(self, group: Int64Array) -> npt.NDArray[np.bool_]:
        """Whether the lace of a group is whole and has groups of one length only."""
        begin = group // self._lace * self._lace
        end, num_longer = begin + self._lace, self._sections.num_longer
        return (end <= self._sections.count) & ((end <= num_longer) | (begin >= num_longer))

    def _slide(self, origin: Int64Array, element: Int64Array, sign: int) -> tuple[Int64Array, Int64Array]:
        """From groups to sections (sign -1) or back (1): moved by the element's offset, reflected at the ends."""
        begin, place, length = self._runs(element)
        doubled = (2 * place + 1 - length) * self._window
        offset = np.sign(doubled) * (np.abs(doubled) // (2 * length))
        moved = origin + sign * offset
        reflected = np.where(moved < 0, -1 - moved, np.minimum(moved, 2 * self._sections.count - 1 - moved))
        return reflected, np.where(reflected == moved, element, begin + length - 1 - place)

    def _shuffle_runs(self, group: Int64Array, element: Int64Array) -> Int64Array:
        """The element that each place of a group takes: of its run first the even ones, shuffled, then the odd ones."""
        begin, place, length = self._runs(element)
        num_even = (length + 1) // 2
        odd = (place >= num_even).astype(np.int64)
        half = 2 * (group * (self._sections.size + 1) + begin) + odd
        return begin + 2 * self._within_half(half, place - odd * num_even, np.where(odd, length // 2, num_even)) + odd

    def _unshuffle_runs(self, group: Int64Array, element: Int64Array) -> Int64Array:
        begin, place, length = self._runs(element)
        num_even = (length + 1) // 2
        odd = place % 2
        half = 2 * (group * (self._sections.size + 1) + begin) + odd
        return begin + self._within_half.inverse(half, place // 2, np.where(odd, length // 2, num_even)) + odd * num_even

    def _runs(self, element: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Of each element of a group its run's first element, its place in the run, and the run's length.

        A run is as long as the window, but for a group's last; a group's surplus element is a run of its own.
        """
        size = self._sections.size
        begin = np.where(element == size, size, element // self._window * self._window)
        length = np.where(element == size, 1, np.minimum(self._window, size - begin))
        return begin, element - begin, length


class _Sections:
    """N places cut into `count` sections of `size` elements each, the first ones with a surplus element more."""

    def __init__(self, num_places: int, count: int) -> None:
        self.count = count
        self.size, self.num_longer = divmod(num_places, count)

    def split(self, places: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The section of each place, and its element in it."""
        edge = self.num_longer * (self.size + 1)
        longer = places < edge
        begin, size = np.where(longer, 0, edge), np.where(longer, self.size + 1, self.size)
        section, element = np.divmod(places - begin, size)
        return section + np.where(longer, 0, self.num_longer), element

    def join(self, sections: Int64Array, elements: Int64Array) -> Int64Array:
        """The place of each section's element."""
        return sections * self.size + np.minimum(sections, self.num_longer) + elements

    def sizes(self, sections: Int64Array) -> Int64Array:
        """How many elements sections have."""
        return self.size + (sections < self.num_longer)


class _Belt:
    """All samples, block after block, the blocks in a keyed random order.

    Where a block begins on the belt would follow from its turn, were all of one size. The others are kept with their places:
    one of each shard where samples are of one size.
    """

    def __init__(self, key: bytes, table: BlockTable) -> None:
        self._table = table
        self._turn = Permutation(key, table.num_blocks)  # turn to block
        irregular = table.irregular()
        turns = self._turn.inverse(irregular)
        in_order = np.argsort(turns)
        sizes = table.sizes(irregular[in_order])
        surplus = np.cumsum(sizes - table.regular_size)
        self._turns = np.append(turns[in_order], -1)  # a last one, for those before all others
        self._begins = self._turns * table.regular_size + np.append(surplus - sizes + table.regular_size, 0)
        self._ends = self._begins + np.append(sizes, table.regular_size)

    def __call__(self, places: Int64Array) -> Int64Array:
        """Sample ids at places of the belt."""
        last = np.searchsorted(self._begins[:-1], places, side="right") - 1  # irregular block at the place or before it
        size = self._table.regular_size
        behind = places - self._ends[last]
        turns = self._turns[last] + np.where(behind < 0, 0, 1 + behind // size)
        elements = np.where(behind < 0, places - self._begins[last], behind % size)
        ids: Int64Array = self._table.first_sample(self._turn(turns)) + elements
        return ids

    def ends(self, blocks: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The first and the last place of each block."""
        first = self.inverse(self._table.first_sample(blocks))
        return first, first + self._table.sizes(blocks) - 1

    def inverse(self, sample_ids: Int64Array) -> Int64Array:
        """Places at which sample ids lie."""
        blocks = self._table.block_of(sample_ids)
        turns = self._turn.inverse(blocks)
        last = np.searchsorted(self._turns[:-1], turns, side="right") - 1
        behind = turns - self._turns[last] - 1
        begins = np.where(behind < 0, self._begins[last], self._ends[last] + behind * self._table.regular_size)
        places: Int64Array = begins + sample_ids - self._table.first_sample(blocks)
        return places
