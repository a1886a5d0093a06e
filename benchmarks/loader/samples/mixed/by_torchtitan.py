"""torchtitan: `InterleavedDataset` of text datasets, which pack by themselves, and its loader."""

import importlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets

from benchmarks.loader.samples.mixed.documents import (
    LENGTH,
    NAMES,
    SEED,
    G,
    Sample,
    Variant,
    documents_in,
    length_of,
)
from benchmarks.loader.samples.mixed.files import write_parquet
from benchmarks.loader.samples.mixed.scenario import Rank

write = write_parquet


def reader(rank: Rank) -> "TitanReader":
    """A rank's part of the mixture."""
    texts = importlib.import_module("torchtitan.hf_datasets.text_datasets")
    for name in NAMES:
        texts.DATASETS[name] = texts.DatasetConfig(
            path=str(rank.folder / name),
            loader=partial(_load, variant=rank.variant),
            sample_processor=_text_of,
        )
    config = texts.InterleavedHuggingFaceTextDataLoader.Config(
        sources=[
            texts.HFDataSource(dataset=name, weight=weight, infinite=True)
            for name, weight in zip(NAMES, rank.weights, strict=True)
        ],
        seed=SEED,
    )
    loader = texts.InterleavedHuggingFaceTextDataLoader(
        config,
        dp_world_size=rank.world_size,
        dp_rank=rank.rank,
        tokenizer=_Tokens(),
        seq_len=LENGTH,
        local_batch_size=G // rank.world_size,
    )
    if rank.own_state is not None:
        loader.load_state_dict(rank.own_state)
    return TitanReader(loader)


def _load(path: str, variant: Variant) -> Any:
    """A dataset of the user, who may filter it and shuffle it."""
    files = [str(each) for each in sorted(Path(path).glob("*.parquet"))]
    found = datasets.Dataset.from_parquet(files, cache_dir=f"{path}/cache").select_columns("id")
    kept = [each for each in found["id"] if variant.passes(each)]
    first = found["id"][0]
    return found.select([each - first for each in kept]).shuffle(seed=SEED)


def _text_of(sample: dict[str, Any]) -> str:
    return str(sample["id"])


class _Tokens:
    """Makes tokens of a document's number: one more than there are, as the last has no target."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(text) + 1] * (length_of(int(text)) + 1)


class TitanReader:
    """See `Reader`."""

    def __init__(self, loader: Any) -> None:
        """Read nothing yet."""
        self._loader = loader

    def steps(self) -> Iterator[list[Sample]]:
        """See `Reader.steps`: the rest of a document that was cut is not counted again."""
        for inputs, _ in self._loader:
            yield [_begun_in(row.tolist()) for row in inputs["input"]]

    def state(self) -> Any:
        """See `Reader.state`."""
        return self._loader.state_dict()


def _begun_in(tokens: list[int]) -> Sample:
    found = documents_in(tokens)
    is_rest = tokens.count(tokens[0]) < length_of(found[0]) and len(found) > 1
    return found[is_rest:]
