"""Arranges samples by their lengths: in buckets of similar ones, and by cost over the ranks. Pure.

Buckets are an order around another one. The first `N // G * G` places of an epoch are cut into
windows of `w * G` places. The samples that the inner order has in a window are sorted by their
lengths and cut into batches of G; the batches come in the order of their key, and within a batch
samples stand as the inner order has them. So every sample stays in its window. The places behind,
which fill no batch, stay as they are: the samples that the tail `drop` leaves out are of all
lengths.

`Balance` shares a global batch out so that every rank's part costs about the same. The batch keeps
its samples; only which rank reads which of them changes. So this depends on the number of ranks,
and the cursor does not know of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from gyre_daemon.errors import InvalidRequest
from gyre_daemon.order.permutation import Int64Array, Permutation, key_of
from gyre_daemon.order.steps import EpochOrder, GroupPlan

LengthsOf = Callable[[Int64Array], Int64Array]  # of samples, both int64 [n]

DEFAULT_WINDOW_BATCHES = 64
_MAX_WINDOW_BATCHES = 1 << 16
# Samples of a window: a tenth of a second of a thread, and 16 bytes of memory for each.
_MAX_WINDOW_SAMPLES = 1 << 20
# Sorted windows in memory: prefetched batches use one, batches already read another.
_MAX_KEPT = 4


@dataclass(frozen=True, slots=True)
class BucketRule:
    """How batches of similar samples are made.

    Attributes:
        field: the ragged field whose lengths count.
        window_batches: w, the global batches whose samples are sorted together.
    """

    field: str
    window_batches: int = DEFAULT_WINDOW_BATCHES

    def check(self, mode: str, tail: str, global_batch_size: int) -> None:
        """Refuse an order that it does not go with.

        Raises:
            InvalidRequest: blocks decide which samples are read together, batches span epochs, or a
                window has too many samples.
        """
        if mode == "block":
            raise InvalidRequest(
                "`bucket` sorts samples of the whole dataset, and the order `block` reads a few "
                "blocks at a time. Use the order `full` or `sequential`."
            )
        if tail == "wrap":
            raise InvalidRequest(
                "with `bucket` every batch belongs to one epoch; use the tail `drop` or `pad`"
            )
        if not 2 <= self.window_batches <= _MAX_WINDOW_BATCHES:
            raise InvalidRequest(
                f"`bucket` has window_batches = {self.window_batches}; it must be 2 to "
                f"{_MAX_WINDOW_BATCHES}, as the batches of a window exchange their samples"
            )
        if (num_samples := self.window_batches * global_batch_size) > _MAX_WINDOW_SAMPLES:
            raise InvalidRequest(
                f"a window of {self.window_batches} batches of {global_batch_size} has "
                f"{num_samples} samples, and `bucket` sorts at most {_MAX_WINDOW_SAMPLES} "
                "together. Lower its window_batches."
            )


class BucketedOrder:
    """One epoch, in batches of samples of similar lengths; see `EpochOrder`.

    Any thread may ask.

    Attributes:
        inner: the order whose windows are sorted.
    """

    def __init__(
        self,
        inner: EpochOrder,
        num_samples: int,
        shape: tuple[int, int],
        lengths_of: LengthsOf,
        key: tuple[int, int],
    ) -> None:
        """Sort nothing yet.

        Args:
            inner: of N places.
            num_samples: N.
            shape: w and G, the batches of a window and the samples of a batch.
            lengths_of: takes int64 [n] samples and returns int64 [n].
            key: the order's seed and the epoch, which tell the orders of batches apart.
        """
        self.inner = inner
        self._size = shape[1]
        self._window = shape[0] * shape[1]
        self._num_whole = num_samples // self._size * self._size
        self._lengths_of = lengths_of
        self._key = key
        self._sorted = lru_cache(_MAX_KEPT)(self._sort)

    def __call__(self, places: Int64Array) -> Int64Array:
        """See `EpochOrder`."""
        return self.inner(self._mapped(places, 0))

    def inverse(self, sample_ids: Int64Array) -> Int64Array:
        """See `EpochOrder.inverse`; sorts every window with one of the samples."""
        return self._mapped(self.inner.inverse(sample_ids), 1)

    def more_before(self, place: int, inner_places: Int64Array) -> int:
        """How many more of some samples stand before a place here than in the inner order.

        Args:
            place: in `[0, N]`.
            inner_places: int64 [n], where the inner order has these samples.
        """
        if place >= self._num_whole:
            return 0
        begin = place // self._window * self._window
        end = min(begin + self._window, self._num_whole)
        its = inner_places[(inner_places >= begin) & (inner_places < end)]
        return int((self._mapped(its, 1) < place).sum() - (its < place).sum())

    def _mapped(self, places: Int64Array, direction: int) -> Int64Array:
        """From own places to those of the inner order (0), or from there (1); both int64 [n]."""
        found = places.copy()
        in_windows = np.flatnonzero(places < self._num_whole)
        windows = places[in_windows] // self._window
        for window in np.unique(windows).tolist():
            which, begin = in_windows[windows == window], window * self._window
            found[which] = begin + self._sorted(window)[direction][places[which] - begin]
        return found

    def _sort(self, window: int) -> tuple[Int64Array, Int64Array]:
        """At which place of a window the inner order has each of its samples; and the inverse."""
        begin = window * self._window
        places = np.arange(begin, min(begin + self._window, self._num_whole))
        lengths = self._lengths_of(self.inner(places))
        batches = np.argsort(lengths, kind="stable").reshape(-1, self._size)
        shuffle = Permutation(key_of(b"gyre.buckets", *self._key, window), len(batches))
        there = np.sort(batches[shuffle(np.arange(len(batches)))], axis=1).reshape(-1)
        back = np.empty_like(there)
        back[there] = np.arange(len(there))
        return there, back


def padding(lengths: Int64Array) -> float:
    """The fraction of padding in a batch whose samples are padded to its longest.

    Args:
        lengths: int64 [n], of the samples of the batch.
    """
    longest = int(lengths.max(initial=0))
    return 1 - float(lengths.mean()) / longest if longest else 0.0


Float64Array = npt.NDArray[np.float64]

# Exchanges between the most and the least expensive rank, for each rank. Most steps need fewer.
_EXCHANGES_PER_RANK = 4
# Beyond this spread, exchanges with all other ranks are tried, too. They cost more than they win
# below it.
_EVEN_ENOUGH = 0.01
# Pairs of samples compared for such an exchange: with more samples per rank than this
# allows, exchanges with the least expensive rank are fine enough.
_MAX_PAIRS = 1 << 18
# With more samples per rank, not every pair is compared for an exchange: all pairs of 100,000
# samples would take 80 GB. The result is the same; below, comparing all is faster.
_MAX_COMPARED = 64
# The largest steps to share out: some seconds of a thread and 20 MB at most. Any reader of a
# dataset may ask for any order of it.
_MAX_BATCH_SAMPLES, _MAX_RANKS = 1 << 17, 1 << 14


@dataclass(frozen=True, slots=True)
class CostRule:
    """The cost of a sample: `linear` times its length, and `quadratic` times the square of that.

    Of a packed sequence, both are added up over its documents.

    Attributes:
        linear: the factor of the length.
        quadratic: the factor of its square.
        field: the ragged field whose lengths count; empty where sequences are packed.
    """

    linear: float
    quadratic: float
    field: str = ""

    def __post_init__(self) -> None:
        """Reject factors that give no cost.

        Raises:
            InvalidRequest: one is negative or not finite, or both are 0.
        """
        factors = self.linear, self.quadratic
        if not all(0 <= factor < np.inf for factor in factors) or not any(factors):
            raise InvalidRequest(
                f"`balance` has linear = {self.linear} and quadratic = {self.quadratic}; they must "
                "be numbers of at least 0, and one of them above"
            )

    def check(self, global_batch_size: int, world_size: int) -> None:
        """Refuse global batches that take too long to share out.

        Raises:
            InvalidRequest: they have too many samples, or there are too many ranks.
        """
        if global_batch_size > _MAX_BATCH_SAMPLES or world_size > _MAX_RANKS:
            raise InvalidRequest(
                f"`balance` shares out at most {_MAX_BATCH_SAMPLES} samples to {_MAX_RANKS} ranks, "
                f"and there are {global_batch_size} and {world_size}. Lower the batch size, or "
                "leave `balance` out."
            )

    def cost(self, lengths: Int64Array) -> Float64Array:
        """The cost of samples, or of documents; both [n]."""
        known = lengths.astype(np.float64)
        return self.linear * known + self.quadratic * (known * known)


class Balance:
    """Shares out the global batches of one order."""

    def __init__(self, costs_of: Callable[[Int64Array], Float64Array]) -> None:
        """Share out nothing yet.

        Args:
            costs_of: takes int64 [n] samples and returns float64 [n], the cost of each.
        """
        self._costs_of = costs_of

    def arrangement(self, sample_ids: Int64Array, rank: int, world_size: int) -> Int64Array:
        """Which samples of K global batches are a rank's.

        Args:
            sample_ids: int64 [K, G].
            rank: whose.
            world_size: W, a divisor of G.

        Returns:
            Int64 [K, G / W], their numbers in each global batch, in rising order.
        """
        return np.sort(self._shared(self._costs(sample_ids), world_size)[:, rank], axis=1)

    def part(self, whole: GroupPlan, rank: int, world_size: int) -> GroupPlan:
        """One rank's part of global batches."""
        return whole.rearranged(self.arrangement(whole.sample_ids, rank, world_size))

    def spread(self, sample_ids: Int64Array, world_size: int) -> float:
        """By how much the most expensive rank of a global batch exceeds the mean of all.

        Args:
            sample_ids: int64 [G].
            world_size: W.
        """
        costs = self._costs(sample_ids[None])
        loads = costs[0][self._shared(costs, world_size)[0]].sum(axis=1)
        mean = float(loads.mean())
        return float(loads.max()) / mean - 1 if mean else 0.0

    def _costs(self, sample_ids: Int64Array) -> Float64Array:
        return self._costs_of(sample_ids.reshape(-1)).reshape(sample_ids.shape)

    def _shared(self, costs: Float64Array, world_size: int) -> Int64Array:
        """Int64 [K, W, B], which samples each rank gets."""
        parts = _dealt(costs, world_size)
        loads = _exchange(parts, costs)
        means = costs.sum(axis=1) / world_size
        if parts.shape[2] * costs.shape[1] <= _MAX_PAIRS:
            for step in np.flatnonzero(loads.max(axis=1) > (1 + _EVEN_ENOUGH) * means):
                _lower_peak(parts[step], costs[step], (1 + _EVEN_ENOUGH) * float(means[step]))
        return parts


def _dealt(costs: Float64Array, world_size: int) -> Int64Array:
    """Deal samples in rounds, the most expensive first, each round's first to the cheapest rank.

    Returns:
        Int64 [K, W, B], the samples of each rank.
    """
    num_steps, global_size = costs.shape
    size = global_size // world_size
    falling = np.argsort(-costs, axis=1, kind="stable").reshape(num_steps, size, world_size)
    parts = np.empty((num_steps, world_size, size), np.int64)
    loads = np.zeros((num_steps, world_size))
    steps = np.arange(num_steps)[:, None]
    for turn in range(size):
        ranks = np.argsort(loads, axis=1, kind="stable")
        parts[steps, ranks, turn] = falling[:, turn]
        loads[steps, ranks] += costs[steps, falling[:, turn]]
    return parts


def _exchange(parts: Int64Array, costs: Float64Array) -> Float64Array:
    """Exchange samples of the most and the least expensive rank while that brings them closer.

    Returns:
        Float64 [K, W], the cost of each rank's samples then.
    """
    num_steps, world_size = parts.shape[:2]
    steps = np.arange(num_steps)
    dealt = np.take_along_axis(costs, parts.reshape(num_steps, -1), axis=1).reshape(parts.shape)
    loads: Float64Array = dealt.sum(axis=2)
    for _ in range(_EXCHANGES_PER_RANK * world_size):
        high, low = loads.argmax(axis=1), loads.argmin(axis=1)
        gap = loads[steps, high] - loads[steps, low]
        change, *pair = _best_exchange(dealt[steps, high], dealt[steps, low], gap)
        which = np.flatnonzero((change > 0) & (change < gap))
        if not len(which):
            break
        first, second = (each[which] for each in pair)
        for table in (parts, dealt):
            given = table[which, high[which], first].copy()
            table[which, high[which], first] = table[which, low[which], second]
            table[which, low[which], second] = given
        loads[which, high[which]] -= change[which]
        loads[which, low[which]] += change[which]
    return loads


def _best_exchange(
    dear: Float64Array, cheap: Float64Array, gap: Float64Array
) -> tuple[Float64Array, Int64Array, Int64Array]:
    """The exchange of two ranks that brings their loads closest, in each of K steps.

    Args:
        dear: float64 [K, B], the costs of one rank's samples.
        cheap: float64 [K, B], those of the other one.
        gap: float64 [K], by how much the first rank's load exceeds the other's.

    Returns:
        The cost that the exchange moves, float64 [K], and the two samples, both int64 [K]. Of
        several equally good ones, it is the one with the first samples.
    """
    num_steps, size = dear.shape
    if size > _MAX_COMPARED:
        first = np.array([_first_of_pair(*step) for step in zip(dear, cheap, gap, strict=True)])
        steps = np.arange(num_steps)
        moved = dear[steps, first][:, None] - cheap
        second = np.abs(moved - gap[:, None] / 2).argmin(axis=1)
        return moved[steps, second], first, second
    pairs = (dear[:, :, None] - cheap[:, None, :]).reshape(num_steps, -1)
    best = np.abs(pairs - gap[:, None] / 2).argmin(axis=1)
    return pairs[np.arange(num_steps), best], *np.divmod(best, size)


def _first_of_pair(dear: Float64Array, cheap: Float64Array, gap: float) -> int:
    """The first sample of the best exchange of one step, in memory that grows with B alone."""
    costs = np.unique(cheap)
    above = np.minimum(np.searchsorted(costs, dear - gap / 2), len(costs) - 1)
    misses = [np.abs(dear - costs[near] - gap / 2) for near in (np.maximum(above - 1, 0), above)]
    return int(np.minimum(*misses).argmin())


def _lower_peak(parts: Int64Array, costs: Float64Array, enough: float) -> None:
    """Exchange samples of the most expensive rank with those of any other, while that helps.

    Where ranks have few samples, the least expensive rank may have none that fits, and another one
    does. Each exchange is the one after which the dearer of the two ranks costs least.

    Args:
        parts: int64 [W, B], the samples of each rank; changed.
        costs: float64 [G].
        enough: the cost of the most expensive rank that ends the search.
    """
    world_size, size = parts.shape
    dealt = costs[parts]
    loads = dealt.sum(axis=1)
    for _ in range(_EXCHANGES_PER_RANK * world_size):
        high = int(loads.argmax())
        if loads[high] <= enough:
            return
        moved = dealt[high][:, None] - dealt.reshape(-1)
        dearer = np.maximum(loads[high] - moved, np.repeat(loads, size) + moved)
        first, place = divmod(int(dearer.argmin()), world_size * size)
        if dearer[first, place] >= loads[high]:
            return
        low, second = divmod(place, size)
        for table in (parts, dealt):
            table[high, first], table[low, second] = table[low, second], table[high, first]
        loads[high] -= moved[first, place]
        loads[low] += moved[first, place]
