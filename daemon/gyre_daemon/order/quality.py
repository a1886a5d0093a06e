"""How well an order shuffles, beside one in which every sample is equally likely everywhere (1.0). Pure arithmetic on samples.

Three numbers, each 0 for an order by sample id and 1 for a uniform one, since each sees a fault that the others do not:

* *displacement*: how far samples are from where they lie in the dataset, on average. A shuffle buffer moves them by its size.
* *mixing*: how far apart in the dataset two samples of one batch lie, on average. Reading whole shards leaves mates together.
* *spread*: how many different neighbourhoods a batch comes from, of as many as it has samples. Reading a few random places and
  taking a run from each displaces and mixes well, but its batches know few places.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.order.plan import Plan
from gyre_daemon.order.steps import StripPlan

_MAX_MATES = 1024  # of a batch that are looked at
_NUM_BATCHES = 64  # of an order that are looked at
_METER_ALL, _METER_MANY = 32, 2048  # batches of a stream: all of the first are looked at, then one in 16, then one in 256
_LAST_BATCHES = 64  # that a meter remembers


@dataclass(frozen=True, slots=True)
class ShuffleQuality:
    """1.0 is a uniform shuffle, 0.0 the order by sample id; each is at most 1."""

    displacement: float
    spread: float
    mixing: float

    @property
    def worst(self) -> float:
        """The least of the three: what an order is judged by."""
        return min(self.displacement, self.spread, self.mixing)


def batch_quality(sample_ids: Int64Array, places: Int64Array, num_samples: int) -> ShuffleQuality:
    """Of one batch, before the cut at 1: averages over batches are what tells anything.

    Args:
        sample_ids: int64 [n], n and num_samples at least 2.
        places: int64 [n], where in their epoch the samples come.
        num_samples: N.
    """
    n = len(sample_ids)
    apart = num_samples / 3  # two uniformly random samples, on average
    displacement = float(np.abs(sample_ids - places).mean()) / apart
    ranked = np.sort(sample_ids).astype(np.float64)
    mixing = float(((2 * np.arange(n) - n + 1) * ranked).sum()) / (n * (n - 1) / 2) / apart
    num_places = min(n, num_samples)
    neighbourhoods = len(np.unique((sample_ids.astype(np.float64) * (num_places / num_samples)).astype(np.int64)))
    uniform = num_places * (1 - (1 - 1 / num_places) ** n)
    return ShuffleQuality(displacement, (neighbourhoods - 1) / (uniform - 1), mixing)


def expected_quality(plan: Plan) -> ShuffleQuality:
    """Of an order, from batches spread evenly over its first epoch; a few milliseconds, whatever the size of the dataset.

    A dataset of one sample, and a batch of one, have nothing to shuffle: then, and where fewer than two mates can be looked at,
    two successive batches' worth of positions are taken as mates.
    """
    size = max(plan.order.global_batch_size, 2)
    num_mates = min(size, _MAX_MATES, plan.num_samples)
    if num_mates < 2:
        return ShuffleQuality(1.0, 1.0, 1.0)
    last = max(0, plan.num_samples - size)
    firsts = np.unique(np.linspace(0, last, _NUM_BATCHES).astype(np.int64))
    mates = np.linspace(0, min(size, plan.num_samples) - 1, num_mates).astype(np.int64)
    places = firsts[:, None] + mates
    ids = plan.sample_ids_at(places.reshape(-1)).reshape(places.shape)
    return average([batch_quality(ids[row], places[row], plan.num_samples) for row in range(len(firsts))])


class ShuffleMeter:
    """The quality of what a stream really reads, from some of its last batches; less than a microsecond a batch, on average."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._last: list[ShuffleQuality] = []
        self._num_seen = 0

    def add(self, plan: StripPlan, first_place: Callable[[int], int]) -> None:
        """Batches were read.

        Args:
            plan: of one rank's parts of them.
            first_place: given a step, where in its epoch the rank's part begins; see `Plan.first_place`.
        """
        every = 1 if self._num_seen < _METER_ALL else 16 if self._num_seen < _METER_MANY else 256
        seen, self._num_seen = self._num_seen, self._num_seen + len(plan)
        for row in range(-(seen + 1) % every, len(plan), every):
            self._look_at(plan.sample_ids[row], first_place(plan.first_step + row))

    def _look_at(self, sample_ids: Int64Array, first_place: int) -> None:
        num_mates = min(len(sample_ids), _MAX_MATES)
        if num_mates < 2 or self._num_samples < 2:
            return
        mates = np.linspace(0, len(sample_ids) - 1, num_mates).astype(np.int64)
        places = (first_place + mates) % self._num_samples
        self._last = [*self._last[1 - _LAST_BATCHES :], batch_quality(sample_ids[mates], places, self._num_samples)]

    @property
    def quality(self) -> ShuffleQuality | None:
        """Of the last batches; None before the first one that has two samples."""
        return average(self._last) if self._last else None


def average(qualities: Sequence[ShuffleQuality]) -> ShuffleQuality:
    """Of several batches, or of the ranks of a job; at least one."""
    values = np.array([(each.displacement, each.spread, each.mixing) for each in qualities])
    displacement, spread, mixing = np.clip(values.mean(axis=0), 0.0, 1.0).tolist()
    return ShuffleQuality(displacement, spread, mixing)
