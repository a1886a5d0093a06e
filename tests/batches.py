"""A dataset of numbered samples, and comparisons of batches, for tests of several files.

The fixtures `numbers_file` and `numbers` of `tests/integration/conftest.py` make the dataset.
"""

from itertools import islice

import torch
from gyre_client import Loader

NUM_SAMPLES = 101
SAMPLE_LENGTH = 8  # tokens

Batch = dict[str, torch.Tensor]


def same(first: list[Batch], second: list[Batch]) -> bool:
    """Whether two lists of batches have the same fields and values."""
    return len(first) == len(second) and all(
        list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(first, second, strict=True)
    )


def ids(batches: list[Batch]) -> list[int]:
    """The sample ids of batches, in their order."""
    return [number for batch in batches for number in batch["sample_id"].tolist()]


def take(loader: Loader, num: int) -> list[Batch]:
    """The next batches of a loader, beyond the ends of epochs."""
    return list(islice(loader.stream(), num))
