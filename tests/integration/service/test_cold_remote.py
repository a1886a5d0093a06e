"""Jobs on a dataset in object storage that no cache has yet.

What the daemon's memory is, and what is asked for twice.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gyre_client import Loader

from tests.conftest import Daemon, StartDaemon
from tests.daemons import status
from tests.object_server.process import ObjectServerProcess, object_server
from tests.object_server.script import Rule, Script

NUM_OBJECTS, OBJECT_BYTES = 8, 8 << 20
BLOCK_BYTES = 256 << 10
SLACK_BYTES = 64 << 20  # beside the budget and the cache
# Of it: objects of the first jobs, stacks of threads, and what allocators keep.
KEPT_BYTES = 16 << 20
FIRST_BYTE = Script(first_byte_p50_s=0.01, first_byte_p99_s=0.05)


@pytest.fixture(scope="module")
def tokens() -> npt.NDArray[np.int32]:
    return np.random.default_rng(0).integers(
        -(1 << 31), 1 << 31, NUM_OBJECTS * OBJECT_BYTES // 4, np.int32
    )


@pytest.fixture(scope="module")
def server(
    tokens: npt.NDArray[np.int32], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ObjectServerProcess]:
    root = tmp_path_factory.mktemp("objects")
    (root / "data").mkdir()
    for number, part in enumerate(np.split(tokens, NUM_OBJECTS)):
        part.tofile(root / f"data/{number}.bin")
    with object_server(root) as process:
        process.follow(FIRST_BYTE)
        yield process


@pytest.fixture
def start(gyred: StartDaemon, server: ObjectServerProcess) -> Callable[..., Daemon]:
    def start(sample_bytes: int, **more: Any) -> Daemon:
        about = {"format": "tokens", "dtype": "int32", "sequence_length": sample_bytes // 4}
        table = {"uri": "s3://data/*.bin", **about, "storage": server.storage_settings}
        return gyred({"datasets": {"set": table}, **more})

    return start


def read(
    daemon: Daemon,
    tokens: npt.NDArray[np.int32],
    sample_bytes: int,
    batch_size: int,
    seed: int,
    num_batches: int = -1,
    **options: Any,
) -> None:
    """Read an epoch or its beginning, and check that every sample comes once with its bytes."""
    # bytes after the last whole sample are ignored
    per_object = OBJECT_BYTES // sample_bytes * sample_bytes // 4
    wanted = np.concatenate([part[:per_object] for part in np.split(tokens, NUM_OBJECTS)]).reshape(
        -1, sample_bytes // 4
    )
    seen: list[int] = []
    with Loader(
        "set",
        batch_size=batch_size,
        seed=seed,
        tail="pad",
        restart=True,
        address=daemon.address,
        **options,
    ) as loader:
        for batch in itertools.islice(loader, num_batches if num_batches >= 0 else None):
            is_real = batch["mask"].numpy()
            ids = batch["sample_id"].numpy()[is_real]
            np.testing.assert_array_equal(batch["tokens"].numpy()[is_real], wanted[ids])
            seen += ids.tolist()
    assert len(set(seen)) == len(seen)
    assert len(seen) == (len(wanted) if num_batches < 0 else num_batches * batch_size)


def together(work: Callable[[int], None], seeds: tuple[int, ...]) -> None:
    with ThreadPoolExecutor(len(seeds)) as executor:
        list(executor.map(work, seeds))


def own_bytes(daemon: Daemon) -> int:
    """A daemon's resident memory without mapped files and arenas."""
    assert daemon.process
    lines = Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


@contextmanager
def watched(daemon: Daemon) -> Iterator[list[int]]:
    """A daemon's resident memory in bytes, without mapped files, sampled repeatedly."""
    assert daemon.process
    path, seen, done = Path(f"/proc/{daemon.process.pid}/status"), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            lines = (line.split() for line in path.read_text().splitlines())
            seen.append(
                sum(int(words[1]) << 10 for words in lines if words[0] in ("RssAnon:", "RssShmem:"))
            )

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        done.set()
        watcher.join()


@pytest.mark.parametrize(("sample_bytes", "batch_size"), [(2048, 512), (100 << 10, 32)])
def test_resident_memory_is_that_of_budget_and_cache(
    start: Callable[..., Daemon], tokens: npt.NDArray[np.int32], sample_bytes: int, batch_size: int
) -> None:
    """Also while a thousand requests are on their way.

    What is received has its place before it is asked for, and what carried it is given back: the
    daemon keeps no more afterwards than when it began, but for the cache and some MiB of objects.
    """
    budget, cache = 48 << 20, 24 << 20
    daemon = start(
        sample_bytes, memory_budget=budget, session_memory=budget // 2, cache_memory=cache
    )
    with watched(daemon) as seen:
        together(lambda seed: read(daemon, tokens, sample_bytes, batch_size, seed, 12), (1, 2))
    assert status(daemon).cache.memory_bytes <= cache
    assert max(seen) > min(seen[1:]) + cache, "it did work"
    assert max(seen) <= budget + cache + SLACK_BYTES
    assert own_bytes(daemon) <= min(seen[1:]) + cache + KEPT_BYTES


@pytest.mark.parametrize(("sample_bytes", "num_in_flight"), [(4 << 10, 250), (100 << 10, 50)])
def test_resident_memory_is_bounded_while_hundreds_of_bodies_stand_still(
    start: Callable[..., Daemon],
    server: ObjectServerProcess,
    tokens: npt.NDArray[np.int32],
    sample_bytes: int,
    num_in_flight: int,
) -> None:
    """Half of a body is held beside its place until the rest is there.

    No more of them than there are places.
    """
    memory = 48 << 20
    daemon = start(
        sample_bytes,
        memory_budget=4 * memory,
        session_memory=memory,
        cache_memory=0,
        hedge=False,
        max_requests=4096,
    )
    server.follow(Script(rules=[Rule("slow", delay_s=0.5)]))
    server.forget()
    try:
        with watched(daemon) as seen:
            read(daemon, tokens, sample_bytes, (2 << 20) // sample_bytes, 1, 28)
    finally:
        server.follow(FIRST_BYTE)
    assert server.counts()["most_in_flight"] >= num_in_flight
    assert max(seen) > min(seen[1:]) + memory // 4, "it did work"
    assert max(seen) <= memory + SLACK_BYTES


@pytest.mark.parametrize("order", ["full", "block"])
def test_two_jobs_with_seeds_of_their_own_ask_for_each_byte_once(
    start: Callable[..., Daemon],
    server: ObjectServerProcess,
    tokens: npt.NDArray[np.int32],
    order: str,
) -> None:
    daemon = start(2048, hedge=False, cache_memory=NUM_OBJECTS * OBJECT_BYTES)
    server.forget()
    order_options: dict[str, Any] = (
        {"order": order, "io_block_bytes": BLOCK_BYTES} if order == "block" else {}
    )
    together(lambda seed: read(daemon, tokens, 2048, 256, seed, **order_options), (1, 2))
    (count,) = (count for count in status(daemon).storage if count.kind == "read")
    probes = 2  # of each object: its head, and for the fingerprint
    blocks = OBJECT_BYTES // BLOCK_BYTES
    assert server.counts()["by_path"] == {
        f"/data/{number}.bin": blocks + probes for number in range(NUM_OBJECTS)
    }
    assert count.num_bytes == NUM_OBJECTS * (OBJECT_BYTES + probes * 4096)
    assert status(daemon).cache.num_past == 0
