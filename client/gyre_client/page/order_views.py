"""The order of a job as the page shows it: where its next steps lie, and where it resumes."""

from collections.abc import Mapping, Sequence
from typing import Any

from gyre_protos.text import printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.display.formatting import plain
from gyre_client.errors import InvalidRequest
from gyre_client.messages.requests import order
from gyre_client.transport.connection import Connection

NUM_STEPS = 1000
# The map: steps are looked at, evenly spaced, so that few samples are located; each is some 10 µs
# of the daemon's and 20 µs of this process's time.
_MAX_COLUMNS, _MIN_COLUMNS, _MAX_LOCATED = 60, 6, 48_000
_NUM_BANDS = 40
_MODES = {
    pb.ORDER_MODE_FULL: "full",
    pb.ORDER_MODE_BLOCK: "block",
    pb.ORDER_MODE_SEQUENTIAL: "sequential",
}


def order_map(
    connection: Connection, ref: pb.DatasetRef, cursor: bytes, step: int
) -> dict[str, Any]:
    """Returns the places of the next thousand steps of a job in its dataset.

    Some of these steps are located. The dataset, shard after shard, is cut into bands; each column
    of `cells` counts the samples of one step in each band.

    Args:
        connection: To the daemon.
        ref: The dataset.
        cursor: Any one of the job.
        step: The first of the steps.

    Raises:
        GyreError: The daemon refuses it.
    """
    description = connection.describe(ref)
    request = pb.LocateStepRequest(dataset=ref, cursor=cursor, step=step)
    first = connection.locate_step(request)
    begin = request.batch = first.batch
    if first.skipped:
        first = connection.locate_step(request)
    num_rows = max(1, len(first.rows))
    num_columns = min(_MAX_COLUMNS, max(_MIN_COLUMNS, _MAX_LOCATED // num_rows))
    num_samples, num_bands = description.num_samples, min(_NUM_BANDS, description.num_samples)
    steps, cells, epochs = [], [], []
    shards: dict[int, list[str]] = {}
    seen: set[str] = set()
    for column in range(num_columns):
        request.batch = begin + column * NUM_STEPS // num_columns
        located = first if not column else connection.locate_step(request)
        counts = [0] * num_bands
        for row in located.rows:
            band = min(num_bands - 1, row.sample_id * num_bands // num_samples)
            counts[band] += 1
            for sample in row.samples[:1]:
                _note(shards.setdefault(band, []), located.shards[sample.shard])
        seen.update(located.shards)
        steps.append(located.step)
        epochs.append(located.epoch)
        cells.append(counts)
    return {
        "steps": steps,
        "epochs": epochs,
        "cells": cells,
        "bands": [[printable(name) for name in shards.get(band, [])] for band in range(num_bands)],
        "num_samples": num_samples,
        "num_shards": description.num_shards,
        "num_shards_seen": len(seen),
        "evenness": evenness(cells),
        "order": _order(first.order),
        "resume": _resume(first),
    }


def _note(names: list[str], name: str) -> None:
    """Keeps the least and the greatest name of a band's shards."""
    if name not in names:
        names.append(name)
        names.sort()
        del names[1:-1]


def evenness(cells: Sequence[Sequence[int]]) -> float | None:
    """Returns how evenly steps draw from all bands, in [0, 1]; None where one draw says nothing.

    It compares the variance of the counts with that of a uniform draw: 1 is as even as chance, or
    more so, and 0 is a step from one band alone.
    """
    num_drawn = sum(cells[0]) if cells else 0
    num_bands = len(cells[0]) if cells else 0
    if num_drawn < 2 or num_bands < 2:
        return None
    mean = num_drawn / num_bands
    squares = [sum((count - mean) ** 2 for count in column) / mean for column in cells]
    found = sum(squares) / len(squares)  # chi-squared: num_bands - 1 by chance
    by_chance, most = num_bands - 1, num_drawn * (num_bands - 1)
    return min(1.0, max(0.0, 1 - (found - by_chance) / (most - by_chance)))


def _order(spec: pb.OrderSpec) -> dict[str, Any]:
    return {
        "mode": _MODES.get(spec.mode, "full"),
        "seed": str(spec.seed),  # a number of JavaScript is not that large
        "batch_size": spec.global_batch_size,
        "io_block_bytes": spec.io_block_bytes,
        "window_blocks": spec.window_blocks,
    }


def _resume(located: pb.LocateStepResponse) -> dict[str, Any]:
    """Returns the step, and the places of its first samples."""
    places = [
        {
            "sample_id": row.sample_id,
            "shard": printable(located.shards[sample.shard]),
            "shard_row": sample.row,
        }
        for row in located.rows[:3]
        for sample in row.samples[:1]
    ]
    return {
        "step": located.step,
        "epoch": located.epoch,
        "num_samples_before": located.batch * located.order.global_batch_size,
        "places": places,
    }


_COST_BOUNDS = {
    "batch_size": (1, 1 << 20),
    "epochs": (1, 1000),
    "io_block": (0, 1 << 30),
    "window": (0, 1 << 16),
    "cache": (0, 1 << 50),
}


def cost_request(dataset: str, values: Mapping[str, str]) -> pb.PlanCostRequest:
    """Returns the request for the cost of each order, from the settings of the sliders.

    Raises:
        InvalidRequest: One is missing, no whole number, or out of its bounds.
    """
    numbers = {}
    for name, (least, most) in _COST_BOUNDS.items():
        text = values.get(name, "")
        if not text.isdecimal() or not least <= int(text[:20]) <= most:
            raise InvalidRequest(f"{name} is {text[:20]!r}; it must be {least} to {most}")
        numbers[name] = int(text)
    prices: dict[str, float | None] = {"request_price": None, "egress_price": None}
    for name in prices:
        if text := values.get(name, ""):
            try:
                prices[name] = float(text)
            except ValueError:
                raise InvalidRequest(f"{name} is {text[:20]!r}; it must be a number") from None
    spec = order(
        numbers["batch_size"], 1, 0, "wrap", "block", numbers["io_block"], numbers["window"]
    )
    return pb.PlanCostRequest(
        dataset=pb.DatasetRef(name=dataset),
        order=spec,
        num_epochs=numbers["epochs"],
        cache_bytes=numbers["cache"],
        price_per_1000_requests=prices["request_price"],
        price_per_gb=prices["egress_price"],
    )


def costs(connection: Connection, request: pb.PlanCostRequest) -> dict[str, Any]:
    """Returns the cost of each order.

    Raises:
        GyreError: The daemon refuses it.
    """
    response = connection.plan_cost(request)
    answer = plain(response)
    answer["recommendation"] = printable(response.recommendation)
    return answer
