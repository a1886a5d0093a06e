"""Calls of a training script. `sent` is the keywords of a `Loader` of `tokens`, or of a method."""

import math
from typing import Any

from tests.bad_inputs.row import Row

INVALID = ("", "InvalidRequest")
WRONG_TYPES = {"text": "8", "a float": 1.5, "nan": math.nan, "a list": [8], "None": None}
WHOLE = ("batch_size", "seed", "rank", "world_size", "prefetch_batches", "io_block_bytes", "epochs")
WORDS = ("tail", "order", "token_dtype")
_MAY_BE_NONE = ("epochs",)
CALLS: dict[str, tuple[dict[str, Any], tuple[str, str], str]] = {
    "batch_size 0": ({"batch_size": 0}, INVALID, "batch_size is 0"),
    "batch_size -1": ({"batch_size": -1}, INVALID, "batch_size is -1"),
    "batch_size 2^32": ({"batch_size": 1 << 32}, INVALID, "batch_size is 4294967296"),
    "batch_size 10^100": ({"batch_size": 10**100}, INVALID, "batch_size is an integer of 333 bits"),
    "seed -1": ({"seed": -1}, INVALID, "seed is -1"),
    "seed 2^64": ({"seed": 1 << 64}, INVALID, "seed is 18446744073709551616"),
    "rank -1": ({"rank": -1, "world_size": 2}, INVALID, "rank"),
    "rank 2 of 2": ({"rank": 2, "world_size": 2}, INVALID, "rank"),
    "rank alone": ({"rank": 1}, INVALID, "rank"),
    "world_size 0": ({"rank": 0, "world_size": 0}, INVALID, "world"),
    "world_size 3": ({"rank": 0, "world_size": 3}, INVALID, "not divisible"),
    "epochs 0": ({"epochs": 0}, INVALID, "epochs is 0"),
    "epochs -1": ({"epochs": -1}, INVALID, "epochs is -1"),
    "prefetch -1": ({"prefetch_batches": -1}, INVALID, "prefetch_batches is -1"),
    "prefetch 2^32": ({"prefetch_batches": 1 << 32}, INVALID, "prefetch_batches is"),
    "blocks without block": ({"io_block_bytes": 4096}, INVALID, "belong to order='block'"),
    "options without format": ({"options": {"a": 1}}, INVALID, "need a path, a URI or a format"),
    "num_workers": ({"num_workers": 4}, ("", "TypeError"), "num_workers.*leave it out"),
    "shuffle": ({"shuffle": True}, ("", "TypeError"), "shuffle"),
    "an unknown keyword": ({"batchsize": 4}, ("", "TypeError"), "batchsize"),
    "token_dtype float16": ({"token_dtype": "float16"}, INVALID, "token_dtype|float16"),
    "address of nonsense": ({"address": "nowhere"}, INVALID, "nowhere|address"),
    "address without a path": ({"address": "unix:"}, INVALID, "address|unix"),
    "address of port 99999": ({"address": "tcp:127.0.0.1:99999"}, INVALID, "port|99999"),
    "address of a scheme": ({"address": "http://127.0.0.1:80"}, INVALID, "address|http"),
    "dataset empty": ({"dataset": ""}, INVALID, "name of the dataset is empty"),
    "dataset unknown": ({"dataset": "wiki"}, ("", "UnknownDataset"), "no dataset is named 'wiki'"),
}
# What a state dict may be. `sent` is passed to `load_state_dict`.
STATES: dict[str, Any] = {
    "empty": {},
    "of a step": {"step": 3},
    "of text": {"cursor": "text"},
    "of no bytes": {"cursor": b""},
    "of None": {"cursor": None},
    "of a list": {"cursor": [1, 2]},
    "of damage": {"cursor": b"GYRE"},
    "of a megabyte": {"cursor": bytes(1 << 15)},
}


def _wrong_types() -> list[Row]:
    rows = []
    for name in WHOLE:
        for words, value in WRONG_TYPES.items():
            if value is None and name in (*_MAY_BE_NONE, "rank", "world_size"):
                continue
            sent = {"rank": 0, "world_size": 1, name: value}
            rows.append(Row(f"call {name} {words}", sent, *INVALID, name))
    return rows


ROWS = [
    *(Row(f"call {words}", sent, *told, text) for words, (sent, told, text) in CALLS.items()),
    *_wrong_types(),
    *(Row(f"call {name} unknown", {name: "sideways"}, *INVALID, "sideways") for name in WORDS),
]
STATE_ROWS = [
    Row(f"state {words}", sent, "", "CursorRejected", "") for words, sent in STATES.items()
]
