"""Packed sequences, and text that is tokenised: Gyre beside DataLoaders that do the same.

`python -m benchmarks.loader.samples.text`

Documents have the lengths of web text. The rounds of all contenders are interleaved, and the page
cache is hot. Gyre is a private daemon, and each round is a new session there; a DataLoader has two
new workers in each. Two processes tokenise on either side. The clock starts with the first batch.
Where Gyre caches, its daemon has served all documents in an epoch of another seed before.
"""

import argparse
import ctypes
import itertools
import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from gyre_client import Loader
from gyre_daemon.order.sequences import PackRule, Sequences, best_fit, pack_documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from benchmarks.loader.markdown import table

NUM_DOCUMENTS, NUM_FILES, LENGTH, BATCH_SIZE, NUM_WORKERS = 40_000, 4, 2048, 16, 2
WINDOW = 1000  # documents that a DataLoader packs together on the fly
NUM_TEXTS, TEXT_BATCH, TEXT_WINDOW = 20_000, 4, 100
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
        return self._packed.num_samples

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
    """Pieces of Python's own library in two formats, and a tokenizer of 8,000 ids for them."""
    source = "\n".join(
        path.read_text(errors="replace")
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    )
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(7.0, 0.6, NUM_TEXTS), 50, 8000).astype(int)
    begins = generator.integers(0, len(source) - 8000, NUM_TEXTS)
    pairs = zip(begins.tolist(), lengths.tolist(), strict=True)
    texts = [source[begin : begin + length] for begin, length in pairs]
    lines = "".join(json.dumps({"text": each}) + "\n" for each in texts)
    (folder / "jsonl/a.jsonl").write_text(lines)
    pq.write_table(pa.table({"text": texts}), folder / "parquet/a.parquet", row_group_size=1000)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([source[: 4 << 20]], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


class Texts:
    """Documents by their number, tokenised by the library."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = folder.parent / "tokenizer.json"
        if (folder / "a.jsonl").exists():
            self._lines = _mapped(folder / "a.jsonl")
            ends = np.flatnonzero(self._lines == ord("\n")) + 1
            self._ends = np.concatenate(([0], ends))
        else:
            self._column = pq.read_table(folder / "a.parquet").column("text").combine_chunks()

    def ids(self, number: int) -> list[int]:
        if hasattr(self, "_column"):
            text = self._column[number].as_py()
        else:
            begin, end = self._ends[number : number + 2].tolist()
            text = json.loads(self._lines[begin:end].tobytes())["text"]
        found: list[int] = _tokenizer(self._tokenizer).encode(text).ids
        return found


class TextsOnTheFly(IterableDataset[Batch]):
    """Texts in a random order, tokenised, and packed in windows as they come."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed = folder, seed

    def __iter__(self) -> Iterator[Batch]:
        info, whole = get_worker_info(), Texts(self._folder)
        order = np.random.default_rng(self._seed).permutation(NUM_TEXTS)
        mine = order[info.id :: info.num_workers] if info else order
        for begin in range(0, len(mine), TEXT_WINDOW):
            cut = [
                np.array(ids[at : at + LENGTH], np.int32)
                for ids in map(whole.ids, mine[begin : begin + TEXT_WINDOW].tolist())
                for at in range(0, len(ids), LENGTH)
            ]
            numbers, counts = best_fit(np.array([len(each) for each in cut]), LENGTH)
            ends = np.cumsum(counts).tolist()
            for first, stop in itertools.pairwise([0, *ends]):
                yield sequence([cut[number] for number in numbers[first:stop].tolist()])


@cache
def _tokenizer(path: Path) -> Any:
    return Tokenizer.from_file(str(path))


@cache
def _mapped(path: Path) -> np.ndarray[Any, Any]:
    return np.memmap(path, np.uint8, "r")


def gyre_loader(folder: Path, seed: int, engine: str, *, caches: bool = False) -> Loader:
    path = str(folder.parent / "tokenizer.json")
    field = {"field": "json", "key": "text"} if folder.name == "jsonl" else {"field": "text"}
    chain = [{"name": "tokenize", "tokenizer": path, "engine": engine, **field}]
    chain += [{"name": "cache"}] if caches else []
    return Loader(folder, batch_size=TEXT_BATCH, seed=seed, transform=chain, pack=PACK)


@contextmanager
def gyre_texts(folder: Path, seed: int, engine: str = "auto") -> Iterator[Iterator[Batch]]:
    with gyre_loader(folder, seed, engine) as loader:
        yield loader.stream()


@contextmanager
def gyre_texts_cached(folder: Path, seed: int) -> Iterator[Iterator[Batch]]:
    """The epochs behind a first one, which has another seed and whose time does not count."""
    with gyre_loader(folder, seed + 1000, "library", caches=True) as first:
        for _ in first:
            pass
        with gyre_loader(folder, seed, "library", caches=True) as loader:
            yield loader.stream()


@contextmanager
def texts_on_the_fly(folder: Path, seed: int) -> Iterator[Iterator[Batch]]:
    yield iter(DataLoader(TextsOnTheFly(folder, seed), TEXT_BATCH, **WORKERS))


TEXTS: dict[str, Contender] = {
    "Gyre, verified engine": gyre_texts,
    "Gyre, tokenizers": partial(gyre_texts, engine="library"),
    "Gyre, tokenizers and cache, from the second epoch on": gyre_texts_cached,
    "DataLoader, tokenizers, packed on the fly": texts_on_the_fly,
}
CASES: dict[str, tuple[str, dict[str, Contender]]] = {
    "packed": (
        "sequences/s",
        {
            "Gyre": gyre_packed,
            "DataLoader, packed in advance": packed_before,
            "DataLoader, packed on the fly": packed_on_the_fly,
        },
    ),
    "jsonl": ("sequences/s", TEXTS),
    "parquet": ("sequences/s", TEXTS),
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


def adopt_orphans() -> None:
    """Become the parent of daemons whose starters have ended, so that `_cpu_s` counts them."""
    set_child_subreaper = 36  # see PR_SET_CHILD_SUBREAPER(2const)
    if ctypes.CDLL(None, use_errno=True).prctl(set_child_subreaper, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _cpu_s() -> float:
    """CPU time of this process and its descendants, those that have ended too."""
    me = psutil.Process()
    return sum(sum(each.cpu_times()[:4]) for each in (me, *me.children(recursive=True)))


def check_texts(folder: Path) -> None:
    """Both sides give the same ids for the same documents."""
    texts = Texts(folder)
    for contender in (gyre_texts, partial(gyre_texts, engine="library"), gyre_texts_cached):
        with contender(folder, 0) as batches:
            batch = next(batches)
        ends, owners = batch["cu_seqlens"].tolist(), batch["document_id"].tolist()
        bounds = batch["document_id.offsets"].tolist()
        firsts = batch["cu_seqlens.offsets"].tolist()
        flat = batch["tokens"].reshape(-1)
        for row in range(len(batch["tokens"])):
            for place, owner in enumerate(owners[bounds[row] : bounds[row + 1]], firsts[row]):
                ids = flat[ends[place] : ends[place + 1]].tolist()
                whole = texts.ids(owner)
                assert ids in [whole[at : at + LENGTH] for at in range(0, len(whole), LENGTH)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    rounds = arguments.rounds
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="gyre-text-") as place:
        folders = {name: Path(place) / name for name in CASES}
        for folder in folders.values():
            folder.mkdir()
        write_documents(folders["packed"])
        write_texts(Path(place))
        check_texts(folders["jsonl"])
        check_texts(folders["parquet"])
        for case in arguments.cases:
            unit, contenders = CASES[case]
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
