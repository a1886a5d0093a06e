"""What `gyre plan --cost` says about each order is what a daemon then asks of an object server."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from gyre_client import Loader
from gyre_client.transport.arguments import order
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1 import loader_pb2_grpc as pb_grpc

from tests.channels import identified_channel
from tests.conftest import Daemon, StartDaemon
from tests.object_server.process import ObjectServerProcess, object_server

SEQUENCE, BATCH, EPOCHS = 128, 32, 2
SHARD_SAMPLES = (700, 513, 64)
IO_BLOCK, WINDOW = 8 << 10, 24
CACHE_BYTES = 1 << 20


class Asked(NamedTuple):
    num_requests: int
    num_bytes: int


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServerProcess]:
    with object_server() as process:
        for number, num_samples in enumerate(SHARD_SAMPLES):
            process.put(
                f"/data/{number}.bin",
                np.random.default_rng(number).bytes(num_samples * SEQUENCE * 2),
            )
        yield process


@pytest.fixture
def daemon(gyred: StartDaemon, server: ObjectServerProcess) -> Daemon:
    about = {
        "uri": f"{server.url}/data/{{0..2}}.bin",
        "format": "tokens",
        "dtype": "uint16",
        "sequence_length": SEQUENCE,
    }
    datasets = {"plain": {**about, "cache": False}, "blocks": about, "kept": about}
    return gyred({"hedge": False, "cache_memory": CACHE_BYTES, "datasets": datasets})


def asked(daemon: Daemon) -> Asked:
    """Up to now, of objects."""
    with identified_channel(daemon.address) as channel:
        counts = pb_grpc.LoaderStub(channel).GetStatus(pb.GetStatusRequest(), timeout=120).storage
    ours = [count for count in counts if count.kind == "read"]
    return Asked(sum(count.num_requests for count in ours), sum(count.num_bytes for count in ours))


def estimates(daemon: Daemon, dataset: str) -> dict[str, Asked]:
    request = pb.PlanCostRequest(
        dataset=pb.DatasetRef(name=dataset),
        order=order(BATCH, 1, 5, "wrap", "block", IO_BLOCK, WINDOW),
        num_epochs=EPOCHS,
        cache_bytes=CACHE_BYTES,
    )
    with identified_channel(daemon.address) as channel:
        answer = pb_grpc.LoaderStub(channel).PlanCost(request, timeout=120)
    return {each.order: Asked(each.num_requests, each.num_bytes) for each in answer.estimates}


def measured(
    daemon: Daemon, dataset: str, epochs: int = EPOCHS, num_nodes: int = 1, **options: Any
) -> Asked:
    """What one of so many nodes asks for when it reads the epochs; it has one rank."""
    before = asked(daemon)
    # nothing is read beyond them
    where: dict[str, Any] = {"address": daemon.address, "epochs": epochs, "restart": True}
    options |= {"rank": 0, "world_size": num_nodes} if num_nodes > 1 else {}
    with Loader(dataset, batch_size=BATCH, seed=5, tail="drop", **where, **options) as loader:
        num_samples = sum(len(batch["sample_id"]) for batch in loader)
    assert num_samples == epochs * (sum(SHARD_SAMPLES) // BATCH) * BATCH // num_nodes
    after = asked(daemon)
    return Asked(after.num_requests - before.num_requests, after.num_bytes - before.num_bytes)


def test_estimated_requests_are_those_that_are_made(daemon: Daemon) -> None:
    foreseen = {dataset: estimates(daemon, dataset) for dataset in ("plain", "blocks", "kept")}
    assert foreseen["plain"] == foreseen["blocks"] == foreseen["kept"], (
        "estimates do not depend on what is configured"
    )
    left_out = sum(SHARD_SAMPLES) % BATCH  # the tail
    # where two meet, both may wait for a sample at once, which is one request
    full = measured(daemon, "plain", epochs=1)
    assert full.num_requests == foreseen["plain"]["full"].num_requests // EPOCHS - left_out
    assert full.num_bytes == foreseen["plain"]["full"].num_bytes // EPOCHS - left_out * SEQUENCE * 2
    kept = measured(daemon, "kept")
    assert kept == foreseen["kept"]["full with the cache"], "each block once in all epochs"
    block = measured(daemon, "blocks", order="block", io_block_bytes=IO_BLOCK, window_blocks=WINDOW)
    once = foreseen["blocks"]["block"]
    assert once.num_requests / EPOCHS <= block.num_requests <= once.num_requests, (
        "a cache of all the data keeps what it can"
    )
    assert once.num_bytes / EPOCHS <= block.num_bytes <= once.num_bytes


def test_one_of_four_nodes_reads_a_fourth_by_full_and_all_by_block(daemon: Daemon) -> None:
    for dataset in ("plain", "blocks", "kept"):  # opens it, so that only samples are counted
        foreseen = estimates(daemon, dataset)
    steps = sum(SHARD_SAMPLES) // BATCH
    full = measured(daemon, "plain", epochs=1, num_nodes=4)
    assert full.num_bytes == steps * BATCH // 4 * SEQUENCE * 2
    kept = measured(daemon, "kept", num_nodes=4)
    assert kept == foreseen["full with the cache"], "a cache of all the data is filled once"
    block = measured(
        daemon,
        "blocks",
        epochs=1,
        num_nodes=4,
        order="block",
        io_block_bytes=IO_BLOCK,
        window_blocks=WINDOW,
    )
    once = foreseen["block"].num_bytes / EPOCHS
    assert 0.95 * once <= block.num_bytes <= once
