"""One scenario of mixtures on Gyre and on public loaders; prints the result of each.

    python -m benchmarks.loader.samples.mixtures

Two sources, weights 0.7 and 0.3, batches of 12. Three questions, each by reading sample ids:
how far is the share of a source in any 120 successive samples from its weight; does a resume on the
same rank give the batches of a run straight through; does a resume that goes from 1 to 2 to 4 ranks
give the same global batches.
"""

import logging
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torchdata.nodes
import webdataset
from datasets.distributed import split_dataset_by_node
from gyre_client import Loader

from benchmarks.loader.markdown import table
from tests.conftest import Daemon, to_toml

SIZES, WEIGHTS, G, STEPS, BLOCK = (3000, 900), (0.7, 0.3), 12, 60, 120
FIRST = (0, 3000)
Steps = list[list[int]]
# Takes rank, world size, a state or None, and a number of steps; returns the ids of each step that
# the rank got, and its state behind them.
Reading = Callable[[int, int, Any, int], tuple[Steps, Any]]


def in_batches(ids: Iterator[int], size: int, num: int) -> Steps:
    return [list(islice(ids, size)) for _ in range(num)]


def by_datasets(rank: int, world_size: int, state: Any, num: int) -> tuple[Steps, Any]:
    sources = [
        datasets.Dataset.from_dict({"id": list(range(first, first + size))})
        .to_iterable_dataset(num_shards=4)
        .shuffle(seed=5, buffer_size=100)
        for first, size in zip(FIRST, SIZES, strict=True)
    ]
    mixed = datasets.interleave_datasets(
        sources, probabilities=list(WEIGHTS), seed=5, stopping_strategy="all_exhausted"
    )
    mine = split_dataset_by_node(mixed, rank, world_size)
    if state is not None:
        mine.load_state_dict(state)
    found = in_batches((row["id"] for row in mine), G // world_size, num)
    return found, mine.state_dict()


def by_nodes(rank: int, world_size: int, state: Any, num: int) -> tuple[Steps, Any]:
    nodes = {
        str(number): torchdata.nodes.SamplerWrapper(
            np.random.default_rng(5)
            .permutation(np.arange(first, first + size))[rank::world_size]
            .tolist()
        )
        for number, (first, size) in enumerate(zip(FIRST, SIZES, strict=True))
    }
    mixed = torchdata.nodes.MultiNodeWeightedSampler(
        nodes,
        {str(number): weight for number, weight in enumerate(WEIGHTS)},
        stop_criteria="CYCLE_FOREVER",
        rank=rank,
        world_size=world_size,
        seed=5,
    )
    mixed.reset(state)
    return in_batches(mixed, G // world_size, num), mixed.state_dict()


def by_webdataset(rank: int, world_size: int, state: Any, num: int) -> tuple[Steps, Any]:
    if state is not None:
        raise NotImplementedError("RandomMix has no state to resume from")
    sources = [
        np.random.default_rng(5).permutation(np.arange(first, first + size))[rank::world_size]
        for first, size in zip(FIRST, SIZES, strict=True)
    ]
    mixed = webdataset.RandomMix([each.tolist() for each in sources], list(WEIGHTS))
    return in_batches(iter(mixed), G // world_size, num), 0


def by_gyre(address: str) -> Reading:
    def read(rank: int, world_size: int, state: Any, num: int) -> tuple[Steps, Any]:
        with Loader(
            "mixed", batch_size=G, seed=5, rank=rank, world_size=world_size, address=address
        ) as loader:
            if state is not None:
                loader.load_state_dict(state)
            found = [batch["tokens"][:, 0].tolist() for batch in islice(loader.stream(), num)]
            return found, loader.state_dict()

    return read


def attempt(question: Callable[[], str]) -> str:
    try:
        return question()
    except Exception as error:
        return f"refused: {type(error).__name__}: {str(error)[:80]}"


def answers(read: Reading) -> tuple[str, str, str]:
    straight: Steps = []

    def shares() -> str:
        straight.extend(read(0, 1, None, STEPS)[0])
        ids = np.array(straight).reshape(-1, BLOCK)
        share = (ids >= FIRST[1]).mean(axis=1)
        return f"{abs(share - WEIGHTS[1]).max():.3f}"

    def same() -> str:
        found, state = read(0, 1, None, 20)
        found += read(0, 1, state, STEPS - 20)[0]
        return compared(found)

    def elastic() -> str:
        found: Steps = []
        state = None
        for world_size, num in ((1, 20), (2, 20), (4, 20)):
            parts = [read(rank, world_size, state, num) for rank in range(world_size)]
            found += [[each for its, _ in parts for each in its[step]] for step in range(num)]
            state = parts[0][1]
        return compared(found)

    def compared(found: Steps) -> str:
        others = sum(sorted(one) != sorted(two) for one, two in zip(found, straight, strict=True))
        return "the same" if not others else f"{others} of {STEPS} batches differ"

    return attempt(shares), attempt(same), attempt(elastic)


def main() -> None:
    logging.getLogger("datasets").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        tables = {}
        for name, first, size in zip("ab", FIRST, SIZES, strict=True):
            np.repeat(np.arange(first, first + size, dtype=np.uint16), 2).tofile(
                folder / f"{name}.bin"
            )
            tables[name] = {
                "uri": str(folder / f"{name}.bin"),
                "format": "tokens",
                "dtype": "uint16",
                "sequence_length": 2,
            }
        mixture = {"weights": dict(zip("ab", WEIGHTS, strict=True)), "block": BLOCK}
        address = f"unix:{folder}/gyre.sock"
        config = folder / "gyre.toml"
        config.write_text(
            to_toml(
                {
                    "listen": [address],
                    "index_dir": str(folder / "indexes"),
                    "datasets": tables,
                    "mixtures": {"mixed": mixture},
                }
            )
        )
        daemon = Daemon(config, address, folder / "log", {}).start()
        try:
            contenders: dict[str, Reading] = {
                "Gyre": by_gyre(address),
                "datasets.interleave_datasets": by_datasets,
                "torchdata MultiNodeWeightedSampler": by_nodes,
                "webdataset RandomMix": by_webdataset,
            }
            rows = [(name, *answers(read)) for name, read in contenders.items()]
        finally:
            daemon.stop()
    header = ("loader", f"share is off in {BLOCK} by", "resumed on 1 rank", "on 1, 2, 4 ranks")
    print("\n".join(table(header, rows)))


if __name__ == "__main__":
    main()
