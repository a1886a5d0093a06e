"""All of a mixture together, by a real daemon: ranks come and go, and batches stay the same.

Filters, packing, balanced ranks, steps that are left out and a change of weights, in one job on
two, four and one ranks. The daemon is killed in between, and so are ranks that have read beyond
their state. `tests/property/order/test_daemon_elastic.py` has the order alone, at random.
"""

import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gyre_client import Loader
from gyre_client.batches.batch import texts

from tests.batches import Batch
from tests.conftest import StartDaemon
from tests.elastic import OpenRank, Stage, in_stages
from tests.mixtures import SIZES, source_of, text_of, write_sources
from tests.packing import check_packed

G = 8
MIXTURE = {"weights": {"web": 0.5, "code": 0.3, "books": 0.2}, "block": 40}

# Its id, its source, its documents with texts, and the bytes of its part of all tensors.
Row = tuple[int, int, list[tuple[int, str]], bytes]


def rows_of(batch: Batch) -> list[Row]:
    sources, ids = batch["source"].tolist(), batch["sample_id"].tolist()
    if "cu_seqlens" not in batch:
        assert set(batch) == {"id", "text", "text.offsets", "source", "sample_id"}
        both = zip(batch["id"].tolist(), texts(batch, "text"), strict=True)
        return [(*each, [its], b"") for *each, its in zip(ids, sources, both, strict=True)]
    parts = iter(check_packed(batch, "text", 0))
    counts = batch["document_id.offsets"].diff().tolist()
    return [
        (*each, [(its, bytes(text.tolist()).decode()) for its, text in islice(parts, count)], data)
        for *each, count, data in zip(ids, sources, counts, packed_bytes(batch), strict=True)
    ]


def packed_bytes(batch: Batch) -> Iterator[bytes]:
    """Of each sequence, all that the tensors of a packed batch have of it, to the bit."""
    length = batch["text"].shape[1]
    segments, owners = batch["cu_seqlens.offsets"].tolist(), batch["document_id.offsets"].tolist()
    for row in range(len(batch["text"])):
        ends = batch["cu_seqlens"][segments[row] : segments[row + 1] + 1] - row * length
        documents = batch["document_id"][owners[row] : owners[row + 1]]
        its = [batch[name][row] for name in ("text", "position", "loss_mask")]
        yield b"".join(each.numpy().tobytes() for each in (*its, ends, documents))


def all_rows(parts: list[Batch]) -> list[Row]:
    """The rows of a global batch, in the order of their ids: ranks share them by cost."""
    assert {len(batch["sample_id"]) for batch in parts} == {G // len(parts)}
    return sorted(row for batch in parts for row in rows_of(batch))


# Four ranks that read on from a state, save what they read and their state, and read until a kill.
KILLED = """
import pickle, sys
from gyre_client import Loader
with open(sys.argv[1], "rb") as file:
    arguments, state, num_steps = pickle.load(file)
ranks = [Loader("all", rank=rank, world_size=4, **arguments) for rank in range(4)]
for each in ranks:
    each.load_state_dict(state)
streams = [each.stream() for each in ranks]
read = [
    [{name: each.clone() for name, each in next(stream).items()} for stream in streams]
    for _ in range(num_steps)
]
with open(sys.argv[2], "wb") as file:
    pickle.dump((read, [each.state_dict() for each in ranks]), file)
held = [next(stream) for stream in streams * 2]
print("reading", flush=True)
sys.stdin.read()
"""


def killed(
    folder: Path, arguments: dict[str, Any], state: dict[str, Any], num_steps: int
) -> tuple[list[list[Row]], dict[str, Any]]:
    """Steps of ranks that get SIGKILL two steps behind their state, and that state."""
    folder.mkdir()
    (folder / "asked").write_bytes(pickle.dumps((arguments, state, num_steps)))
    command = [sys.executable, "-c", KILLED, str(folder / "asked"), str(folder / "read")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == b"reading\n"
        finally:
            process.kill()
    read, states = pickle.loads((folder / "read").read_bytes())
    assert all(each == states[0] for each in states)
    return [all_rows(parts) for parts in read], states[0]


@pytest.mark.parametrize("pack", [None, {"field": "text", "length": 40, "overlong": "split"}])
def test_kills_ranks_filters_balance_packing_and_a_change_of_weights(
    gyred: StartDaemon, tmp_path: Path, pack: dict[str, Any] | None
) -> None:
    datasets = write_sources(tmp_path / "data")
    for table in datasets.values():
        table["filter"] = "length(text) >= 5"
    daemon = gyred({"datasets": datasets, "mixtures": {"all": MIXTURE}})

    def arguments(name: str) -> dict[str, Any]:
        return {
            "batch_size": G,
            "seed": 9,
            "job": name,
            "address": daemon.address,
            "prefetch_batches": 2,
            "balance": {"linear": 1.0, "quadratic": 0.1, "field": "text"},
            "pack": pack,
            "skip_steps": [(9, 11)],
        }

    def job(name: str, change: Mapping[str, Any] = MappingProxyType({})) -> OpenRank:
        def open_rank(rank: int, num_ranks: int) -> Loader:
            return Loader("all", rank=rank, world_size=num_ranks, **arguments(name), **change)

        return open_rank

    change = {"weights": {"web": 0.25, "code": 0.75}}
    whole, state = in_stages(daemon, job("straight"), [Stage(1, 12)], all_rows)
    whole += in_stages(daemon, job("straight", change), [Stage(1, 14)], all_rows, state=state)[0]
    for _, source, its, _ in (each for step in whole for each in step):
        for value, text in its:
            assert len(text) >= 5
            assert pack or text == text_of(value)
            assert pack or source_of(value) == list(SIZES)[source]
    assert {source for step in whole[:12] for _, source, *_ in step} == {0, 1, 2}
    assert {source for step in whole[12:] for _, source, *_ in step} == {0, 1}  # from step 14 on
    stages = [Stage(2, 2), Stage(2, 7, kill_before=4)]
    found, state = in_stages(daemon, job("elastic"), stages, all_rows)
    more, state = killed(tmp_path / "killed", arguments("elastic"), state, 3)
    stages = [Stage(4, 6, kill_before=3), Stage(1, 8)]
    last, _ = in_stages(daemon, job("elastic", change), stages, all_rows, state=state)
    assert found + more + last == whole


# Parts of texts that begin where chance wants it, in each epoch elsewhere.
CROPPED = [{"name": "crop_or_pad", "field": "text", "length": 5, "start": "random"}]


def write_letters(folder: Path) -> dict[str, dict[str, Any]]:
    """Two datasets of 30 and 18 alphabets, each of which begins with another letter."""
    tables = {}
    for name, ids in (("many", range(30)), ("few", range(100, 118))):
        (folder / name).mkdir(parents=True)
        values = [letters_of(each) for each in ids]
        pq.write_table(pa.table({"id": [*ids], "text": values}), folder / name / "0.parquet")
        tables[name] = {"uri": str(folder / name), "format": "parquet"}
    return tables


def letters_of(value: int) -> str:
    return "".join(chr(ord("a") + (value + each) % 26) for each in range(20 + value % 7))


def test_random_transforms_draw_the_same_on_any_number_of_ranks(
    gyred: StartDaemon, tmp_path: Path
) -> None:
    """Several epochs of each source; the daemon is killed, ranks come and go."""
    mixture = {"weights": {"many": 0.5, "few": 0.5}, "block": 20, "transforms": CROPPED}
    daemon = gyred({"datasets": write_letters(tmp_path), "mixtures": {"all": mixture}})

    def open_rank(rank: int, num_ranks: int) -> Loader:
        return Loader(
            "all",
            batch_size=G,
            seed=9,
            rank=rank,
            world_size=num_ranks,
            job=f"{num_ranks} ranks",
            address=daemon.address,
            prefetch_batches=2,
        )

    def all_crops(parts: list[Batch]) -> list[tuple[int, bytes]]:
        assert {len(batch["text"]) for batch in parts} == {G // len(parts)}
        return [
            (its, bytes(text))
            for batch in parts
            for its, text in zip(batch["id"].tolist(), batch["text"].tolist(), strict=True)
        ]

    whole, _ = in_stages(daemon, open_rank, [Stage(1, 24)], all_crops)
    crops: dict[int, set[bytes]] = {}
    for its, crop in (row for step in whole for row in step):
        assert crop.decode() in letters_of(its)
        crops.setdefault(its, set()).add(crop)
    assert sum(len(each) > 1 for each in crops.values()) > len(crops) // 2
    stages = [Stage(2, 6, kill_before=3), Stage(8, 6), Stage(1, 5, kill_before=1), Stage(4, 7)]
    found, _ = in_stages(daemon, open_rank, stages, all_crops)
    assert found == whole
