"""Packed sequences, and text that is tokenised: Gyre beside DataLoaders that do the same.

`python -m benchmarks.loader.text`

Documents have the lengths of web text. The rounds of all contenders are interleaved, and the page
cache is hot. Gyre is a private daemon, and each round is a new session there; a DataLoader has two
new workers in each. Two processes tokenise on either side. The clock starts with the first batch.
"""

import argparse
import itertools
import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import torch
from gyre_client import Loader
from gyre_daemon.order.packing import PackRule, Sequences, best_fit, pack_documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from benchmarks.loader.markdown import table

NUM_DOCUMENTS, NUM_FILES, LENGTH, BATCH_SIZE, NUM_WORKERS = 40_000, 4, 2048, 16, 2
WINDOW = 1000  # documents that a DataLoader packs together on the fly
NUM_TEXTS, TEXT_LENGTH, TEXT_BATCH = 20_000, 512, 64
PACK = {"field": "tokens", "length": LENGTH, "overlong": "split"}
MAX_S = 6.0

Batch = dict[str, torch.Tensor]
Contender = Callable[[Path, int], Any]
WORKERS: dict[str, Any] = {"num_workers": NUM_WORKERS, "multiprocessing_context": "spawn"}


def write_documents(folder: Path) -> None:
    """Arrow files of int32 ids, as `datasets` keeps them."""
    generator = np.random.default_rng(0)
    for number in range(NUM_FILES):
        lengths = generator.lognormal(6.2, 1.1, NUM_DOCUMENTS // NUM_FILES).astype(np.int32) + 1
        ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int32)))
        ids = generator.integers(1, 50_000, int(ends[-1]), np.int32)
        batch = pa.table({"tokens": pa.ListArray.from_arrays(pa.array(ends), pa.array(ids))})
        path = str(folder / f"{number}.arrow")
        with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_table(batch)


class Documents:
    """The documents of the files, mapped."""

    def __init__(self, folder: Path) -> None:
        columns = [
            pa.ipc.open_file(pa.memory_map(str(path))).read_all().column("tokens").chunk(0)
            for path in sorted(folder.glob("*.arrow"))
        ]
        self._ends = [column.offsets.to_numpy() for column in columns]
        self._ids = [column.values.to_numpy() for column in columns]
        self.lengths = np.concatenate([np.diff(each) for each in self._ends]).astype(np.int64)

    def __getitem__(self, number: int) -> np.ndarray[Any, Any]:
        file, row = divmod(number, NUM_DOCUMENTS // NUM_FILES)
        ends = self._ends[file]
        ids: np.ndarray[Any, Any] = self._ids[file][ends[row] : ends[row + 1]]
        return ids


@cache
def documents(folder: Path) -> Documents:
    return Documents(folder)


def sequence(parts: list[np.ndarray[Any, Any]]) -> Batch:
    """One sequence of documents, with its positions and its mask."""
    tokens, position = np.zeros(LENGTH, np.int32), np.zeros(LENGTH, np.int32)
    begin = 0
    for part in parts:
        tokens[begin : begin + len(part)] = part
        position[begin : begin + len(part)] = np.arange(len(part))
        begin += len(part)
    arrays = {"tokens": tokens, "position": position, "loss_mask": position > 0}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


class PackedBefore(Dataset[Batch]):
    """Sequences by their number, packed in advance by Gyre's own function."""

    def __init__(self, folder: Path) -> None:
        lengths = documents(folder).lengths
        self._folder, self._packed = folder, packed(lengths)

    def __len__(self) -> int:
        return self._packed.num_sequences

    def __getitem__(self, number: int) -> Batch:
        its, whole = self._packed, documents(self._folder)
        first, stop = its.bounds[number : number + 2].tolist()
        assert its.begins is not None
        columns = (each[first:stop].tolist() for each in (its.documents, its.begins, its.lengths))
        places = zip(*columns, strict=True)
        return sequence([whole[number][at : at + count] for number, at, count in places])


def packed(lengths: np.ndarray[Any, Any]) -> Sequences:
    rule = PackRule(LENGTH, "split")
    return pack_documents(len(lengths), lambda which: lengths[which], rule, np.empty(0, np.int64))


class PackedOnTheFly(IterableDataset[Batch]):
    """Documents in a random order, packed in windows as they come."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed = folder, seed

    def __iter__(self) -> Iterator[Batch]:
        info, whole = get_worker_info(), documents(self._folder)
        order = np.random.default_rng(self._seed).permutation(NUM_DOCUMENTS)
        mine = order[info.id :: info.num_workers] if info else order
        for begin in range(0, len(mine), WINDOW):
            cut = [
                whole[number][at : at + LENGTH]
                for number in mine[begin : begin + WINDOW].tolist()
                for at in range(0, len(whole[number]), LENGTH)
            ]
            numbers, counts = best_fit(np.array([len(each) for each in cut]), LENGTH)
            ends = np.cumsum(counts).tolist()
            for first, stop in itertools.pairwise([0, *ends]):
                yield sequence([cut[number] for number in numbers[first:stop].tolist()])


@contextmanager
def gyre_packed(folder: Path, seed: int) -> Iterator[Iterator[Batch]]:
    with Loader(folder, batch_size=BATCH_SIZE, seed=seed, pack=PACK) as loader:
        yield loader.stream()


@contextmanager
def packed_before(folder: Path, seed: int) -> Iterator[Iterator[Batch]]:
    shuffle = torch.Generator().manual_seed(seed)
    data = PackedBefore(folder)
    yield iter(DataLoader(data, BATCH_SIZE, shuffle=True, generator=shuffle, **WORKERS))


@contextmanager
def packed_on_the_fly(folder: Path, seed: int) -> Iterator[Iterator[Batch]]:
    yield iter(DataLoader(PackedOnTheFly(folder, seed), BATCH_SIZE, **WORKERS))


def write_texts(folder: Path) -> None:
    """JSON lines of pieces of Python's own library, and a tokenizer of 8,000 ids for them."""
    source = "\n".join(
        path.read_text(errors="replace")
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    )
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(7.0, 0.6, NUM_TEXTS), 50, 8000).astype(int)
    begins = generator.integers(0, len(source) - 8000, NUM_TEXTS)
    with (folder / "a.jsonl").open("w") as file:
        for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True):
            file.write(json.dumps({"text": source[begin : begin + length]}) + "\n")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([source[: 4 << 20]], trainer)
    tokenizer.save(str(folder.parent / "tokenizer.json"))


class Texts(Dataset[Batch]):
    """Lines by their number, tokenised and padded."""

    def __init__(self, folder: Path) -> None:
        self._path, self._tokenizer = folder / "a.jsonl", folder.parent / "tokenizer.json"
        lines = np.frombuffer(self._path.read_bytes(), np.uint8)
        self._ends = np.concatenate(([0], np.flatnonzero(lines == ord("\n")) + 1))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> Batch:
        begin, end = self._ends[number : number + 2].tolist()
        text = json.loads(_mapped(self._path)[begin:end].tobytes())["text"]
        ids = _tokenizer(self._tokenizer).encode(text).ids[:TEXT_LENGTH]
        tokens = torch.zeros(TEXT_LENGTH, dtype=torch.int32)
        tokens[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
        return {"tokens": tokens, "sample_id": torch.tensor(number)}


@cache
def _tokenizer(path: Path) -> Any:
    return Tokenizer.from_file(str(path))


@cache
def _mapped(path: Path) -> np.ndarray[Any, Any]:
    return np.memmap(path, np.uint8, "r")


@contextmanager
def gyre_texts(folder: Path, seed: int) -> Iterator[Iterator[Batch]]:
    path = str(folder.parent / "tokenizer.json")
    chain: list[dict[str, object]] = [
        {"name": "tokenize", "field": "json", "key": "text", "tokenizer": path},
        {"name": "crop_or_pad", "field": "tokens", "length": TEXT_LENGTH},
    ]
    with Loader(folder, batch_size=TEXT_BATCH, seed=seed, transform=chain) as loader:
        yield loader.stream()


@contextmanager
def loaded_texts(folder: Path, seed: int) -> Iterator[Iterator[Batch]]:
    shuffle = torch.Generator().manual_seed(seed)
    yield iter(DataLoader(Texts(folder), TEXT_BATCH, shuffle=True, generator=shuffle, **WORKERS))


CASES: dict[str, tuple[str, dict[str, Contender]]] = {
    "packed": (
        "sequences/s",
        {
            "Gyre": gyre_packed,
            "DataLoader, packed in advance": packed_before,
            "DataLoader, packed on the fly": packed_on_the_fly,
        },
    ),
    "texts": ("documents/s", {"Gyre": gyre_texts, "DataLoader": loaded_texts}),
}


def measure(contender: Contender, folder: Path, seed: int) -> tuple[float, float]:
    """Rows per second from the first batch on, and CPU time of a row in microseconds."""
    with contender(folder, seed) as batches:
        next(batches)
        began, began_cpu_s, count = time.monotonic(), _cpu_s(), 0
        for batch in batches:
            count += len(batch["tokens"])
            if time.monotonic() - began > MAX_S:
                break
        return count / (time.monotonic() - began), 1e6 * (_cpu_s() - began_cpu_s) / count


def _cpu_s() -> float:
    """CPU time of this process and of all that it started and that still run."""
    me = psutil.Process()
    return sum(sum(each.cpu_times()[:2]) for each in (me, *me.children(recursive=True)))


def check_texts(folder: Path) -> None:
    """Both sides give the same ids for the same line."""
    lines = Texts(folder)
    with gyre_texts(folder, 0) as batches:
        batch = next(batches)
    for number, ids in zip(batch["sample_id"].tolist(), batch["tokens"], strict=True):
        assert torch.equal(ids, lines[number]["tokens"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="gyre-text-") as place:
        folders = {name: Path(place) / name for name in CASES}
        for folder in folders.values():
            folder.mkdir()
        write_documents(folders["packed"])
        write_texts(folders["texts"])
        check_texts(folders["texts"])
        for case, (unit, contenders) in CASES.items():
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
            for seed, (name, contender) in itertools.product(range(rounds), contenders.items()):
                found[name].append(measure(contender, folders[case], seed))
                print(f"{case}, round {seed + 1}, {name}: {found[name][-1]}", flush=True)
            print("\n".join(table(("", unit, "from", "to", "CPU us"), _rows(found))))


def _rows(found: dict[str, list[tuple[float, float]]]) -> Iterator[list[str]]:
    for name, measured in found.items():
        rates, cpu = ([each[part] for each in measured] for part in (0, 1))
        values = statistics.median(rates), min(rates), max(rates), statistics.median(cpu)
        yield [name, *(f"{value:,.0f}" for value in values)]


if __name__ == "__main__":
    main()
