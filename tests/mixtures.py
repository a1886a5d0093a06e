"""Datasets of several formats that can be mixed, and what batches of a mixture must say of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
from gyre_daemon.order.mixture import MixedSource, Mixture
from gyre_daemon.order.steps import Phase

# The first value of each source's samples: so a sample tells its source.
FIRST = {"web": 0, "code": 1000, "books": 2000}
SIZES = {"web": 90, "code": 40, "books": 25}


def text_of(value: int) -> str:
    return "x" * (value * 7 % 31)


def write_sources(folder: Path) -> dict[str, dict[str, Any]]:
    """Writes three datasets with the fields `id` and `text`; returns their tables."""
    formats = {"web": "parquet", "code": "arrow", "books": "parquet"}
    for name, first in FIRST.items():
        (folder / name).mkdir(parents=True)
        half = SIZES[name] // 2
        for shard, ids in enumerate((range(half), range(half, SIZES[name]))):
            values = [first + each for each in ids]
            columns: dict[str, Any] = {"id": values, "text": [text_of(each) for each in values]}
            if name == "books":
                columns = {"page": np.zeros(len(values), np.int16), **columns}
            if formats[name] == "arrow":
                path = str(folder / name / f"{shard}.arrow")
                feather.write_feather(pa.table(columns), path, compression="uncompressed")
            else:
                pq.write_table(
                    pa.table(columns), folder / name / f"{shard}.parquet", row_group_size=7
                )
    return {name: {"uri": str(folder / name), "format": its} for name, its in formats.items()}


def source_of(value: int) -> str:
    return next(name for name in reversed(FIRST) if value >= FIRST[name])


@dataclass
class Samples:
    num_samples: int

    def blocks(self, io_block_bytes: int) -> None:
        raise AssertionError


def mixture(sizes: list[int], phases: tuple[Phase, ...], block: int, bad: int = 0) -> Mixture:
    """A mixture of sources s0, s1, ... without data."""
    sources, first = [], 0
    for number, size in enumerate(sizes):
        corrupt = np.arange(min(bad, size // 2))
        its = Samples(size)
        sources.append(MixedSource(f"s{number}", f"f{number}", its, corrupt, first))  # type: ignore[arg-type]
        first += size
    return Mixture(tuple(sources), phases, block, first, lambda sizes: (phases, sum(sizes)))
