"""Balances ranks by the lengths of samples: which are read together, and by whom."""

from collections.abc import Callable

import numpy as np

from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.datasets.formats import stored_fields
from gyre_daemon.datasets.packing import Packed
from gyre_daemon.errors import InvalidRequest
from gyre_daemon.order.balance import Balance, CostRule, Float64Array
from gyre_daemon.order.buckets import LengthsOf
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.order.planner import Order

_DIFFER = {"balance": "cost differently", "bucket": "can be sorted"}
_AT_ONCE = 1 << 16  # samples looked up together, for the sake of memory


def balance_of(dataset: Dataset, rule: CostRule) -> Balance:
    """Shares out the global batches of a dataset by the cost of its samples.

    Raises:
        InvalidRequest: the rule names no ragged field of the dataset.
    """
    if packed := dataset.packed:
        if rule.field not in ("", packed.stored.name):
            raise InvalidRequest(
                f"`balance` names the field {rule.field!r:.100}, but the sequences are packed from "
                f"{packed.stored.name!r:.100}; leave the field out"
            )
        return Balance(_sample_costs(packed, rule))
    lengths_of = _ragged_lengths(dataset, rule.field, "balance")
    return Balance(lambda sample_ids: rule.cost(lengths_of(sample_ids)))


def bucket_lengths(dataset: Dataset, order: Order) -> LengthsOf | None:
    """The lengths by which an order makes its batches; None if it has no buckets.

    Raises:
        InvalidRequest: the samples of the dataset have one length, or no such field.
    """
    if order.bucket is None or dataset.mixture:  # which the planner refuses
        return None
    if dataset.packed:
        raise InvalidRequest(
            "`bucket` does not go with `pack`, because all sequences have one length. Leave one of "
            "the two out."
        )
    return _ragged_lengths(dataset, order.bucket.field, "bucket")


def _sample_costs(packed: Packed, rule: CostRule) -> Callable[[Int64Array], Float64Array]:
    sequences = packed.sequences
    costs = rule.cost(sequences.lengths.astype(np.int64))
    return np.add.reduceat(costs, sequences.bounds[:-1]).take


def _ragged_lengths(dataset: Dataset, field: str, argument: str) -> LengthsOf:
    """Looks the lengths of samples up, in elements of a field.

    Args:
        dataset: whose samples.
        field: its name.
        argument: which of the loader's names it, for the error.

    Raises:
        InvalidRequest: it is no ragged field of the dataset.
    """
    index = dataset.sized
    stored = stored_fields(index.fields if dataset.transforms else dataset.fields)
    ragged = [spec.name for spec in stored if spec.ragged]
    if field not in ragged:
        there = f"there are {', '.join(ragged)}" if ragged else "this dataset has none"
        raise InvalidRequest(
            f"`{argument}` names the field {field!r:.100}; only fields whose samples differ in "
            f"length {_DIFFER[argument]}, and {there}"
        )
    column = [spec.name for spec in stored].index(field)
    num_bytes = max(stored[column].element_bytes, 1)

    def lengths_of(sample_ids: Int64Array) -> Int64Array:
        parts = [
            index.locate(sample_ids[begin : begin + _AT_ONCE]).tensor_bytes[:, column]
            for begin in range(0, len(sample_ids), _AT_ONCE)
        ]
        return np.concatenate([np.empty(0, np.int64), *parts]) // num_bytes

    return lengths_of
