"""What the samples of a dataset cost a trainer, from lengths that its index knows."""

from collections.abc import Callable

import numpy as np

from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.datasets.formats import stored_fields
from gyre_daemon.errors import InvalidRequest
from gyre_daemon.order.balance import Balance, CostRule, Float64Array
from gyre_daemon.order.shuffle.permutation import Int64Array


def balance_of(dataset: Dataset, rule: CostRule) -> Balance:
    """Shares out the global batches of a dataset by what its samples cost.

    Raises:
        InvalidRequest: the rule names no ragged field of the dataset.
    """
    return Balance(_packed(dataset, rule) if dataset.packed else _ragged(dataset, rule))


def _packed(dataset: Dataset, rule: CostRule) -> Callable[[Int64Array], Float64Array]:
    assert dataset.packed
    if rule.field not in ("", dataset.packed.stored.name):
        raise InvalidRequest(
            f"`balance` names the field {rule.field!r:.100}, but the sequences are packed from "
            f"{dataset.packed.stored.name!r:.100}; leave the field out"
        )
    sequences = dataset.packed.sequences
    costs = np.add.reduceat(rule.cost(sequences.lengths.astype(np.int64)), sequences.bounds[:-1])
    return costs.take


def _ragged(dataset: Dataset, rule: CostRule) -> Callable[[Int64Array], Float64Array]:
    index = dataset.sized
    stored = stored_fields(index.fields if dataset.transforms else dataset.fields)
    ragged = [spec.name for spec in stored if spec.ragged]
    if rule.field not in ragged:
        there = f"there are {', '.join(ragged)}" if ragged else "this dataset has none"
        raise InvalidRequest(
            f"`balance` names the field {rule.field!r:.100}; only fields whose samples differ in "
            f"length cost differently, and {there}"
        )
    column = [spec.name for spec in stored].index(rule.field)
    num_bytes = max(stored[column].element_bytes, 1)

    def costs_of(sample_ids: Int64Array) -> Float64Array:
        return rule.cost(index.locate(sample_ids).tensor_bytes[:, column] // num_bytes)

    return costs_of
