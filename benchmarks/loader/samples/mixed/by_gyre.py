"""Gyre: a mixture of two Parquet folders; the daemon is killed with the ranks."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gyre_client import Loader
from gyre_client.command.cli import main

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
    """A daemon that serves the sources, filtered or not, as two mixtures."""
    tables: dict[str, dict[str, Any]] = {}
    for name in NAMES:
        tables[name] = {"uri": str(folder / name), "format": "parquet"}
        tables[f"long-{name}"] = tables[name] | {"filter": f"length(tokens) >= {documents.LEAST}"}
    mixtures = {
        mixture: {"weights": _named(WEIGHTS, prefix), "block": 120}
        for mixture, prefix in (("all", ""), ("long", "long-"))
    }
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
    """See `Reader`. The running job is told of other weights in the stage before they begin."""

    def __init__(self, rank: Rank) -> None:
        """Open the session."""
        self._rank = rank
        variant = rank.variant
        self._name = "long" if variant.is_filtered else "all"
        self._loader = Loader(
            self._name,
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
        for number, batch in enumerate(self._loader.stream()):
            if number == 1:
                self._meet()
                if self._is_to_tell():
                    self._tell()
            if self._rank.variant.is_packed:
                yield [documents.documents_in(row.tolist()) for row in batch["tokens"]]
            else:
                yield [(each,) for each in batch["id"].tolist()]

    def state(self) -> Any:
        """See `Reader.state`."""
        return self._loader.state_dict()

    def _meet(self) -> None:
        """Wait until all ranks have a batch: a rank that begins later would begin a new run."""
        stage = self._rank.folder / f"{self._rank.job}-{self._rank.first_step}"
        stage.mkdir(exist_ok=True)
        (stage / str(self._rank.rank)).touch()
        while len(list(stage.iterdir())) < self._rank.world_size:
            time.sleep(0.02)

    def _is_to_tell(self) -> bool:
        first = self._rank.first_step
        is_before = first < CHANGE_AT <= first + self._rank.num_steps
        return self._rank.variant.is_changed and self._rank.rank == 0 and is_before

    def _tell(self) -> None:
        prefix = "long-" if self._rank.variant.is_filtered else ""
        weights = ",".join(f"{name}={its}" for name, its in _named(LATER, prefix).items())
        flags = [f"--weights={weights}", f"--from-step={CHANGE_AT}", f"--job={self._rank.job}"]
        if self._rank.variant.is_packed:
            flags += [f"--pack={key}={value}" for key, value in PACK.items()]
        if main(["mix", self._name, *flags, f"--address={self._rank.address}"]):
            raise RuntimeError("gyre mix was refused")


def _named(weights: tuple[float, float], prefix: str) -> dict[str, float]:
    return {f"{prefix}{name}": its for name, its in zip(NAMES, weights, strict=True)}
