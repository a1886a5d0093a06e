"""What the daemon notes of batches counts as their memory.

With very small samples it is as much as these.
"""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
from gyre_client import Loader
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection

from tests.conftest import StartDaemon

NUM_JOBS, NUM_BATCHES = 24, 3000
SLACK_BYTES = 8 << 20  # what allocators keep, and the code that the first jobs brought in


def own_bytes(pid: int) -> int:
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(words[1]) << 10 for words in lines if words[0] in ("RssAnon:", "RssShmem:"))


def test_many_sessions_of_small_samples_take_no_more_than_they_reserve(
    gyred: StartDaemon, tmp_path: Path
) -> None:
    np.arange(1_000_000, dtype="<u4").tofile(tmp_path / "tokens.bin")
    tokens = {
        "uri": str(tmp_path / "tokens.bin"),
        "format": "tokens",
        "dtype": "int32",
        "sequence_length": 4,
    }
    daemon = gyred({"memory_budget": "512MiB", "datasets": {"tokens": tokens}})
    assert daemon.process

    def loader(seed: int) -> Loader:
        return Loader("tokens", batch_size=64, seed=seed, job=f"job {seed}", address=daemon.address)

    with loader(0) as first:
        next(first)
    before = own_bytes(daemon.process.pid)
    with ExitStack() as stack:
        for seed in range(NUM_JOBS):
            its = stack.enter_context(loader(seed))
            for _ in range(NUM_BATCHES):
                next(its)
        with Connection(parse_address(daemon.address)) as connection:
            reserved = connection.status().memory_reserved_bytes
        assert own_bytes(daemon.process.pid) - before <= reserved + SLACK_BYTES
