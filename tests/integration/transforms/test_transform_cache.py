"""Transformed samples in the node's cache, through a real daemon: what is decoded how often."""

import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gyre_client import Loader
from gyre_client.errors import ConfigError, CorruptSample
from numpy.testing import assert_array_equal
from PIL import Image

from tests.conftest import Daemon, StartDaemon, to_toml
from tests.daemons import status
from tests.preloaded.interpreter import Interpreter
from tests.waiting import until

NUM, DAMAGED, BATCH_SIZE = 48, 45, 8
Chain = Sequence[Mapping[str, Any]]
DECODE: Chain = [
    {"name": "decode_image", "field": "jpg"},
    {"name": "resize", "size": [40, 44]},
]
RANDOM: Chain = [
    {"name": "random_resized_crop", "size": 24},
    {"name": "horizontal_flip"},
    {"name": "to_chw"},
]
CACHE: Chain = [{"name": "cache"}]
CACHED = [*DECODE, *CACHE, *RANDOM]


def write(folder: Path, damaged: int = -1) -> str:
    """Writes a Parquet file of images with their numbers, of which one may be damaged."""
    folder.mkdir()
    images = []
    for number in range(NUM):
        pixels = np.random.default_rng(number).integers(0, 256, (50 + number, 60, 3), np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG")
        images.append(buffer.getvalue()[: 500 if number == damaged else None])
    columns = {"jpg": pa.array(images, pa.binary()), "cls": pa.array(range(NUM), pa.int64())}
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=12)
    return str(folder)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, interpreter: Interpreter) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("kept")
    sound = {"uri": write(folder / "sound"), "format": "parquet"}
    damaged = {"uri": write(folder / "damaged", DAMAGED), "format": "parquet"}
    address = f"unix:{folder}/run/gyre.sock"
    values = {
        "listen": [address],
        "index_dir": str(folder / "index"),
        "cache_dir": str(folder / "cache"),
        "drain_timeout_s": 3.0,
        "num_transform_workers": 2,
        "datasets": {"damaged": damaged, "sound": sound, "other": sound},
    }
    declared = "".join(f"\n[[datasets.other.transforms]]\n{to_toml(each)}" for each in CACHED)
    (folder / "gyre.toml").write_text(to_toml(values) + declared)
    daemon = Daemon(folder / "gyre.toml", address, folder / "log", {}, interpreter=interpreter)
    daemon.start()
    yield daemon
    daemon.stop()


def epoch(
    daemon: Daemon,
    transform: Chain | None,
    dataset: str = "sound",
    *,
    bypasses: bool = False,
    **options: Any,
) -> tuple[list[dict[str, np.ndarray[Any, Any]]], int]:
    """The batches of a job, and how many records were decoded: the reads that missed the cache."""
    before = status(daemon).cache
    values = {"batch_size": BATCH_SIZE, "seed": 3, "epochs": 1, **options}
    with Loader(dataset, address=daemon.address, transform=transform, **values) as loader:
        batches = [{name: each.numpy().copy() for name, each in batch.items()} for batch in loader]
    after = status(daemon).cache
    assert bypasses or after.num_past == before.num_past
    return batches, after.num_misses - before.num_misses


def assert_equal(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    assert len(found) == len(wanted)
    for left, right in zip(found, wanted, strict=True):
        assert left.keys() == right.keys()
        for name in left:
            assert_array_equal(left[name], right[name])


def test_the_second_seed_job_and_epoch_decode_nothing(daemon: Daemon) -> None:
    plain, num_plain = epoch(daemon, [*DECODE, *RANDOM])
    first, num_first = epoch(daemon, CACHED)
    assert_equal(first, plain)
    assert num_plain < NUM <= num_first  # without `cache` only chunks of the file are kept
    others: Sequence[dict[str, Any]] = [{"seed": 4}, {"order": "block"}, {"order": "sequential"}]
    for options in others:
        plain, _ = epoch(daemon, [*DECODE, *RANDOM], **options)
        found, num_found = epoch(daemon, CACHED, **options)
        assert_equal(found, plain)
        assert not num_found


@pytest.mark.parametrize("order", ["full", "block"])
def test_a_cache_that_is_too_small_changes_no_batch(
    gyred: StartDaemon, tmp_path: Path, order: str
) -> None:
    """A tenth of the records has room; those that are needed first stay."""
    table = {"uri": write(tmp_path / "images"), "format": "parquet", "cache": False}
    limit = NUM * 40 * 44 * 3 // 10
    small = gyred({"cache_memory": limit, "datasets": {"sound": table}})
    options: dict[str, Any] = {"order": order}
    if order == "block":
        options |= {"io_block_bytes": 4096, "window_blocks": 2}
    for seed in (1, 2):
        wanted, _ = epoch(small, [*DECODE, *RANDOM], seed=seed, **options, bypasses=True)
        found, num_decoded = epoch(small, CACHED, seed=seed, **options, bypasses=True)
        assert_equal(found, wanted)
        assert num_decoded
    assert status(small).cache.memory_bytes <= limit
    if order == "block":
        assert status(small).cache.num_evicted


def test_a_daemon_that_starts_again_has_them_on_disk(daemon: Daemon) -> None:
    chain = [*DECODE[:1], {"name": "center_crop", "size": 32}, *CACHE, *RANDOM]
    wanted, _ = epoch(daemon, chain, order="sequential")
    until(lambda: status(daemon).cache.disk_bytes >= NUM * 32 * 32 * 3)
    daemon.stop()
    daemon.start()
    found, num_decoded = epoch(daemon, chain, order="sequential")
    assert_equal(found, wanted)
    assert not num_decoded


def test_images_of_several_sizes_are_kept_too(daemon: Daemon) -> None:
    chain = [*DECODE[:1], {"name": "resize", "size": 30}, {"name": "flatten"}]
    before = status(daemon).num_samples_transformed
    found = [epoch(daemon, [*chain, *CACHE], seed=seed)[0] for seed in (3, 4)]
    assert status(daemon).num_samples_transformed == before + NUM
    for seed, batches in zip((3, 4), found, strict=True):
        wanted, _ = epoch(daemon, chain, seed=seed)
        assert_equal(batches, wanted)
        assert len({tuple(each) for batch in wanted for each in batch["image_shape"].tolist()}) > 1


def test_what_ends_with_the_cache_and_what_a_definition_declares(daemon: Daemon) -> None:
    wanted, _ = epoch(daemon, DECODE)
    found, _ = epoch(daemon, [*DECODE, *CACHE])
    assert_equal(found, wanted)
    declared, _ = epoch(daemon, None, "other")
    wanted, _ = epoch(daemon, CACHED)
    assert_equal(declared, wanted)


def test_a_state_fits_with_the_cache_and_without(daemon: Daemon) -> None:
    wanted, _ = epoch(daemon, CACHED)
    arguments: dict[str, Any] = {"address": daemon.address, "batch_size": BATCH_SIZE, "seed": 3}
    with Loader("sound", transform=CACHED, **arguments) as loader:
        next(loader)
        state = loader.state_dict()
    with Loader("sound", transform=[*DECODE, *RANDOM], **arguments) as loader:
        loader.load_state_dict(state)
        assert_array_equal(next(loader)["image"].numpy(), wanted[1]["image"])


def test_a_damaged_sample_is_named_when_the_job_comes_to_it(daemon: Daemon) -> None:
    arguments: dict[str, Any] = {"batch_size": 4, "order": "sequential"}
    with Loader("damaged", address=daemon.address, transform=CACHED, **arguments) as loader:
        assert len(list(islice(loader, DAMAGED // 4))) == DAMAGED // 4
        with pytest.raises(CorruptSample, match=rf"sample {DAMAGED} .*a\.parquet.*decode_image"):
            next(loader)


@pytest.mark.parametrize(
    ("chain", "reason"),
    [
        ([*CACHE, *DECODE], "is the first transform, so there is nothing to cache"),
        ([*DECODE, *RANDOM, *CACHE], r"behind transforms\[2\] \(random_resized_crop\), which dr"),
        ([*DECODE, *CACHE, *CACHE], r"transforms\[3\] is a second `cache`"),
        ([*DECODE[:1], *CACHE, *RANDOM], r"the samples of 'image' differ in shape \[\*, \*, 3\]"),
    ],
)
def test_what_cannot_be_cached_is_refused(daemon: Daemon, chain: Chain, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Loader("sound", address=daemon.address, batch_size=4, transform=chain)
