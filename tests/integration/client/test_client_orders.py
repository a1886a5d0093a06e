"""Orders other than a global shuffle, and jobs that join others, against a real daemon."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gyre_client import Loader
from gyre_client.errors import CursorRejected
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection

from tests.object_server.process import object_server

NUM_SAMPLES, LENGTH = 1000, 8
# blocks of 32 samples
BLOCK: dict[str, Any] = {"order": "block", "io_block_bytes": 512, "window_blocks": 8}

Batch = dict[str, torch.Tensor]


@pytest.fixture
def address(gyred: Any, tmp_path: Path) -> str:
    """Serves `numbers`: sample i is [8i, 8i + 8)."""
    np.arange(NUM_SAMPLES * LENGTH, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    daemon = gyred(
        {
            "datasets": {
                "numbers": {
                    "uri": str(tmp_path / "tokens.bin"),
                    "format": "tokens",
                    "dtype": "uint16",
                    "sequence_length": LENGTH,
                }
            }
        }
    )
    address: str = daemon.address
    return address


def ids(loader: Loader, num: int) -> list[int]:
    """The samples of the next batches, whose tensors are theirs."""
    read = []
    for batch in islice(loader.stream(), num):
        assert batch["tokens"].tolist() == [
            list(range(LENGTH * i, LENGTH * i + LENGTH)) for i in batch["sample_id"].tolist()
        ]
        read += batch["sample_id"].tolist()
    return read


def test_blocks_give_every_sample_once_to_any_number_of_ranks(address: str) -> None:
    with Loader("numbers", batch_size=20, seed=3, address=address, **BLOCK) as loader:
        whole = ids(loader, 50)
        assert loader.step == len(loader)
    assert sorted(whole) == list(range(NUM_SAMPLES))
    parts = []
    for rank in range(4):
        with Loader(
            "numbers", batch_size=20, seed=3, address=address, rank=rank, world_size=4, **BLOCK
        ) as loader:
            parts.append(np.array(ids(loader, 50)).reshape(50, 5))
    assert np.concatenate(parts, axis=1).reshape(-1).tolist() == whole


def test_blocks_resume_and_refuse_another_window(address: str) -> None:
    with Loader("numbers", batch_size=20, seed=3, address=address, **BLOCK) as loader:
        ids(loader, 7)
        state = loader.state_dict()
        ahead = ids(loader, 60)
    with Loader("numbers", batch_size=20, seed=3, address=address, **BLOCK) as loader:
        loader.load_state_dict(state)
        assert ids(loader, 60) == ahead
    wider: dict[str, Any] = {**BLOCK, "window_blocks": 9}
    for order, differs in (
        (wider, "the window in blocks is 8 there and 9 here"),
        ({}, "order mode is block there and full here"),
    ):
        other = Loader("numbers", batch_size=20, seed=3, address=address, **order)
        with other, pytest.raises(CursorRejected, match=differs):
            other.load_state_dict(state)


def test_each_block_is_one_request(gyred: Any) -> None:
    """2000 samples of 2 KiB in 124 blocks; the cache holds half of them, the window an eighth.

    Some are asked for again.
    """
    num_shards, shard_bytes = 4, 500 * 2048
    with object_server() as server:
        for shard in range(num_shards):
            server.put(f"/blocks/{shard}.bin", bytes([shard]) * shard_bytes)
        tokens = {
            "format": "tokens",
            "sequence_length": 2048,
            "dtype": "uint8",
            "storage": dict(server.storage_settings),
        }
        daemon = gyred(
            {"cache_memory": "2MiB", "datasets": {"set": {"uri": "s3://blocks/", **tokens}}}
        )
        server.forget()
        order: dict[str, Any] = {"order": "block", "io_block_bytes": 32 << 10, "window_blocks": 16}
        with Loader(
            "set", batch_size=16, address=daemon.address, restart=True, prefetch_batches=8, **order
        ) as loader:
            samples = torch.cat([batch["sample_id"] for batch in loader])
        num_reads = server.counts()["reads"]
    assert sorted(samples.tolist()) == list(range(2000))
    num_probes = num_shards  # of the fingerprint
    assert 124 <= num_reads - num_probes <= 1.15 * 124, "one by one it would be 1000 and more"


def test_by_sample_id(address: str) -> None:
    with Loader(
        "numbers", batch_size=300, tail="drop", address=address, order="sequential"
    ) as loader:
        assert ids(loader, 3) == list(range(900))


def test_the_status_of_a_session_has_its_shuffle_quality(address: str) -> None:
    found = {}
    for order in ("full", "sequential"):
        with (
            Loader("numbers", batch_size=40, address=address, order=order) as loader,
            Connection(parse_address(address)) as daemon,
        ):
            ids(loader, 25)
            (session,) = daemon.status().sessions
            assert session.HasField("quality")
            found[order] = session.quality
    assert min(found["full"].displacement, found["full"].spread, found["full"].mixing) > 0.85
    assert (
        max(
            found["sequential"].displacement, found["sequential"].spread, found["sequential"].mixing
        )
        < 0.1
    )
