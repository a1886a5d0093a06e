"""The benchmarks that train: both commands run, and what they compare is comparable. At toy size.

Nothing is timed.
"""

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.loader.datasets import Rinas
from benchmarks.training.ledger import Ledger
from benchmarks.training.loaders import BATCH_SIZE, Window, data_loader, gyre
from benchmarks.training.orders import Buffer
from benchmarks.training.samples import Files, Name, Samples, Scale, Stored, Web, write
from tests.conftest import StartDaemon
from tests.object_server.process import object_server

ROOT = Path(__file__).resolve().parents[3]
SCALE = Scale(
    text_bytes=30_000,
    text_object_bytes=9_000,
    glyphs_per_class=4,
    glyphs_per_object=62,
    held_out_per_class=1,
)
NUM_STEPS = 3
SEED = 5
Batch = dict[str, Tensor]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training") / "data"
    write(folder, SCALE)
    return folder


def by_sample_id(batch: Batch) -> Batch:
    """The same samples in the order of their ids: RINAS takes them as they arrive."""
    order = torch.argsort(batch["sample_id"])
    return {name: tensor[order] for name, tensor in batch.items()}


def assert_same(name: str, got: list[Batch], expected: list[Batch]) -> None:
    for step, (mine, its) in enumerate(
        zip(map(by_sample_id, got), map(by_sample_id, expected), strict=True)
    ):
        assert mine.keys() == its.keys(), name
        for field, tensor in mine.items():
            assert tensor.dtype == its[field].dtype, (name, field)
            assert torch.equal(tensor, its[field]), (name, step, field)


@pytest.mark.parametrize("name", ["text", "glyphs"])
def test_all_loaders_bring_the_same_samples_in_the_same_batches(
    data: Path, gyred: StartDaemon, name: Name
) -> None:
    stored = Stored(name, data / name)
    files = Files(stored.folder)
    expected = list(islice(data_loader(Samples(stored, files), SEED, num_workers=0), NUM_STEPS))
    with object_server(data) as server:
        url = f"{server.url}/{name}"
        web = Web(url)
        ordered, rinas = Samples(stored, web), Rinas(Samples(stored, web))  # type: ignore[arg-type]
        assert_same(
            "ordered", list(islice(data_loader(ordered, SEED, num_workers=0), NUM_STEPS)), expected
        )
        assert_same(
            "rinas", list(islice(data_loader(rinas, SEED, num_workers=0), NUM_STEPS)), expected
        )
        daemon = gyred({"datasets": {"data": stored.config(url)}})
        with gyre("full", daemon.address, SEED, Window(1, 1, 1)) as loader:
            assert_same("full", list(islice(loader.stream(), NUM_STEPS)), expected)
        every = Samples(stored, files)
        with gyre("block", daemon.address, SEED, Window(4, 8, 64)) as loader:
            for batch in islice(loader.stream(), NUM_STEPS):
                alone = [every[index] for index in batch["sample_id"].tolist()]
                assert_same(
                    "block",
                    [batch],
                    [{field: torch.stack([one[field] for one in alone]) for field in batch}],
                )
        web.close()
    files.close()


def test_datasets_are_sorted_and_the_held_out_part_is_another(data: Path) -> None:
    labels = {}
    for folder in ("glyphs", "held-glyphs"):
        stored = Stored("glyphs", data / folder)
        files = Files(stored.folder)
        every = Samples(stored, files)
        labels[folder] = [int(every[index]["cls"]) for index in range(len(every))]
        assert labels[folder] == sorted(labels[folder])
        files.close()
    assert set(labels["glyphs"]) == set(labels["held-glyphs"])
    train, held_out = ((data / name / "0000.bin").read_bytes() for name in ("text", "held-text"))
    assert held_out not in train


@pytest.mark.parametrize("shuffle_shards", [False, True])
def test_a_buffer_brings_each_sample_once_an_epoch(data: Path, *, shuffle_shards: bool) -> None:
    stored = Stored("text", data / "text")
    num_batches = len(stored.places) // BATCH_SIZE
    buffer = Buffer(stored, 32, SEED, shuffle_shards=shuffle_shards)
    epochs = [
        torch.cat([batch["sample_id"] for batch in islice(buffer.batches, num_batches)])
        for _ in range(2)
    ]
    assert [len(set(ids.tolist())) for ids in epochs] == [num_batches * BATCH_SIZE] * 2
    assert not torch.equal(*epochs)
    assert buffer.quality()["mixing"] < 0.9
    buffer.close()


def test_a_ledger_measures_what_is_missing_and_nothing_twice(tmp_path: Path) -> None:
    measured = []

    def measure(key: tuple[str, int]) -> dict[str, Any]:
        measured.append(key)
        return {"value": key[1]}

    keys = [("a", 1), ("a", 2), ("b", 3)]
    assert not Ledger(tmp_path / "ledger").fill(keys, measure, max_s=-1.0)
    assert measured == []
    assert Ledger(tmp_path / "ledger").fill(keys[:2], measure, max_s=1e9)
    again = Ledger(tmp_path / "ledger")
    assert again.fill(keys, measure, max_s=1e9)
    assert measured == keys
    assert again["b", 3] == {"value": 3}


def test_both_commands_run(tmp_path: Path) -> None:
    commands = {}
    for name in ("throughput", "quality"):
        line: list[str | Path] = [
            sys.executable,
            "-m",
            f"benchmarks.training.{name}",
            "--toy",
            "--work",
            tmp_path / name,
            "--out",
            tmp_path / f"{name}-report",
        ]
        commands[name] = subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    for name, process in commands.items():
        _, errors = process.communicate()
        assert process.returncode == 0, f"{name}:\n{errors}"
        assert (tmp_path / f"{name}-report.png").read_bytes()[1:4] == b"PNG"
    of_loaders = [
        json.loads(line)[1]
        for line in (tmp_path / "throughput" / "throughput.jsonl").read_text().splitlines()
    ]
    assert [result["losses"][0] for result in of_loaders] == pytest.approx(
        [of_loaders[0]["losses"][0]] * 3, abs=1e-5
    )
    assert all(0 <= result["wait_s"] <= result["elapsed_s"] for result in of_loaders)
    pages = [(tmp_path / f"{name}-report.md").read_text() for name in commands]
    assert all(
        f"| {label} |" in pages[0]
        for label in (
            "ordered DataLoader, 8 workers",
            "paper-style RINAS, 8 workers",
            "Gyre, `full`",
        )
    )
    assert all(
        f"| {order} |" in pages[1]
        for order in ("full", "block", "shuffled shards and a buffer", "a buffer")
    )
