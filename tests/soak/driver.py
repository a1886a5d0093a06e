"""One run: starts everything, makes one fault after the other, and leaves the histories."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from gyre_client import Loader

from tests.soak.cluster import BUDGET_BYTES, CACHE_BYTES, Cluster
from tests.soak.faults import Fault, in_turns, usable
from tests.soak.history import DRIVER, Writer
from tests.soak.plan import DATASETS, LOCAL, Job

_LONGEST_PAUSE_S = 2.0  # between two faults
_WARM_UP_BATCHES = 40
_WARM_UP_S = 240.0
_FILES_CLOSE_S = 32.0  # the daemon closes the files of an earlier index 30 s after the last read

Tell = Callable[[str], None]


def run(
    folder: Path,
    jobs: Sequence[Job],
    seed: int,
    *,
    seconds: float | None,
    tell: Tell = lambda text: None,
) -> Path:
    """Runs jobs under faults, and returns the folder of the histories.

    Args:
        folder: An empty folder, with a short path because of the sockets.
        jobs: What reads.
        seed: Of the faults, their victims and their times.
        seconds: How long to go on; None to make every fault once.
        tell: Gets a line of progress with every fault.
    """
    draw = Random(seed)
    with Cluster(folder, jobs) as cluster:
        history = Writer(cluster.histories / DRIVER)
        plan = {
            "jobs": [job.to_json() for job in jobs],
            "budget_bytes": BUDGET_BYTES + CACHE_BYTES,
            "seed": seed,
        }
        history.write("plan", **plan)
        for number in range(len(cluster.daemons)):
            _warm_up(cluster, number)
            history.write("base", **cluster.state_of(number))
        for rank in cluster.ranks:
            rank.start()
        cluster.wait_for_batches()
        _trouble(cluster, draw, history, seconds, tell)
        cluster.finish()
        time.sleep(_FILES_CLOSE_S)
        for number in range(len(cluster.daemons)):
            history.write("idle", **cluster.state_of(number))
        for number, daemon in enumerate(cluster.daemons):
            history.write("stopped", daemon=number, status=daemon.stop())
        history.write("left", **cluster.left())
        history.close()
        return cluster.histories


def _trouble(
    cluster: Cluster, draw: Random, history: Writer, seconds: float | None, tell: Tell
) -> None:
    faults = usable(cluster)
    began = time.monotonic()
    for num_done, fault in enumerate(in_turns(draw, faults)):
        is_over = (
            num_done >= len(faults) if seconds is None else time.monotonic() - began >= seconds
        )
        if is_over:
            return
        time.sleep(draw.uniform(0, _LONGEST_PAUSE_S))
        what = _make(cluster, draw, history, fault)
        for number in range(len(cluster.daemons)):
            history.write("memory", daemon=number, memory_bytes=cluster.memory_bytes(number))
        tell(f"{time.monotonic() - began:6.0f} s  {num_done + 1:4}  {fault.name}: {what}")


def _make(cluster: Cluster, draw: Random, history: Writer, fault: Fault) -> str:
    """Makes a fault, mends it, and waits until every rank reads again."""
    history.write("fault", name=fault.name)
    with fault.make(cluster, draw, history.write) as what:
        time.sleep(draw.uniform(fault.shortest_s, fault.longest_s))
    since = [rank.num_lines() for rank in cluster.ranks]
    history.write("mended", name=fault.name, what=what)
    cluster.wait_for_batches(since)
    history.write("running")
    return what


def _warm_up(cluster: Cluster, number: int) -> None:
    """Reads some of every dataset, so that the daemon has all that it keeps without clients."""
    for dataset in DATASETS:
        address = cluster.daemons[number].address
        with Loader(
            dataset, batch_size=32, address=address, reattach_timeout_s=_WARM_UP_S
        ) as loader:
            batches = loader.stream()
            for _ in range(_WARM_UP_BATCHES):
                next(batches)
        if dataset in LOCAL:
            cluster.take_checksums(number, dataset)
