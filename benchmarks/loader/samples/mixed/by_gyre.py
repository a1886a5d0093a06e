"""Gyre: a mixture of two Parquet folders; the daemon is killed with the ranks."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gyre_client import Loader

from benchmarks.loader.samples.mixed import documents
from benchmarks.loader.samples.mixed.documents import CHANGE_AT, LATER, NAMES, SEED, WEIGHTS, G
from benchmarks.loader.samples.mixed.files import write_parquet
from benchmarks.loader.samples.mixed.scenario import Rank, Served
from tests.conftest import Daemon, to_toml

write = write_parquet
PACK = {"field": "tokens", "length": documents.LENGTH}
BALANCE = {"linear": 1.0, "quadratic": 0.1, "field": "tokens"}


@contextlib.contextmanager
def around(folder: Path) -> Iterator[Served]:
    """A daemon that serves the sources, filtered or not, as mixtures with a schedule or without."""
    tables: dict[str, dict[str, Any]] = {}
    for name in NAMES:
        tables[name] = {"uri": str(folder / name), "format": "parquet"}
        tables[f"long-{name}"] = tables[name] | {"filter": f"length(tokens) >= {documents.LEAST}"}
    mixtures: dict[str, dict[str, Any]] = {}
    for mixture, prefix in (("all", ""), ("long", "long-")):
        mixtures[mixture] = {"weights": _named(WEIGHTS, prefix), "block": 120}
        later = [{"step": CHANGE_AT, "weights": _named(LATER, prefix)}]
        mixtures[f"{mixture}-later"] = mixtures[mixture] | {"schedule": later}
    address = f"unix:{folder}/gyre.sock"
    values = {"listen": [address], "index_dir": str(folder / "indexes")}
    (folder / "gyre.toml").write_text(to_toml({**values, "datasets": tables, "mixtures": mixtures}))
    daemon = Daemon(folder / "gyre.toml", address, folder / "log", {}).start()

    def kill() -> None:
        daemon.kill()
        daemon.restart()

    try:
        yield Served(address, kill)
    finally:
        daemon.stop()


def reader(rank: Rank) -> "GyreReader":
    """A rank of a named job."""
    return GyreReader(rank)


class GyreReader:
    """See `Reader`. Other weights are in the schedule of the mixture."""

    def __init__(self, rank: Rank) -> None:
        """Open the session."""
        self._rank = rank
        variant = rank.variant
        name = "long" if variant.is_filtered else "all"
        self._loader = Loader(
            f"{name}-later" if variant.is_changed else name,
            batch_size=G,
            seed=SEED,
            rank=rank.rank,
            world_size=rank.world_size,
            job=rank.job,
            address=rank.address,
            prefetch_batches=2,
            balance=BALANCE if variant.is_packed else None,
            pack=PACK if variant.is_packed else None,
        )
        if rank.own_state is not None:
            self._loader.load_state_dict(rank.own_state)

    def steps(self) -> Iterator[list[tuple[int, ...]]]:
        """See `Reader.steps`."""
        for batch in self._loader.stream():
            if self._rank.variant.is_packed:
                yield [documents.documents_in(row.tolist()) for row in batch["tokens"]]
            else:
                yield [(each,) for each in batch["id"].tolist()]

    def state(self) -> Any:
        """See `Reader.state`."""
        return self._loader.state_dict()


def _named(weights: tuple[float, float], prefix: str) -> dict[str, float]:
    return {f"{prefix}{name}": its for name, its in zip(NAMES, weights, strict=True)}
