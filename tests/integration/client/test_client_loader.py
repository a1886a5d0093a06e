"""What a Loader yields, in which order, and how it resumes, against a real daemon."""

import gc
import pickle
import weakref
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset
from gyre_client import Loader, objects, texts
from gyre_client.errors import InvalidRequest
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection
from gyre_protos.v1 import loader_pb2 as pb
from torch.utils.data import DataLoader

from tests.batches import NUM_SAMPLES, SAMPLE_LENGTH, Batch, ids, same, take


def test_batches_hold_their_samples_and_are_the_same_on_every_run(numbers: str) -> None:
    runs = []
    for _ in range(2):
        with Loader("numbers", batch_size=10, seed=3, address=numbers) as loader:
            runs.append(take(loader, 25))
    assert same(*runs)
    for batch in runs[0]:
        expected = batch["sample_id"][:, None] * SAMPLE_LENGTH + torch.arange(SAMPLE_LENGTH)
        assert batch["tokens"].dtype == torch.int16
        assert torch.equal(batch["tokens"].to(torch.int64), expected)
    assert sorted(ids(runs[0])[:NUM_SAMPLES]) == list(range(NUM_SAMPLES))


def test_ranks_share_each_batch_whatever_their_number(numbers: str) -> None:
    def read(rank: int, world_size: int) -> list[list[int]]:
        with Loader(
            "numbers", batch_size=12, rank=rank, world_size=world_size, address=numbers, job="one"
        ) as loader:
            return [batch["sample_id"].tolist() for batch in take(loader, 20)]

    whole = read(0, 1)
    for world_size in (2, 3):
        parts = [read(rank, world_size) for rank in range(world_size)]
        assert [list(chain(*step)) for step in zip(*parts, strict=True)] == whole
    with Connection(parse_address(numbers)) as connection:
        order = pb.OrderSpec(seed=0, global_batch_size=12)
        planned = connection.plan_step(
            pb.PlanStepRequest(
                dataset=pb.DatasetRef(name="numbers"), order=order, step=19, world_size=1
            )
        )
    assert list(planned.sample_ids) == whole[19]


def test_inside_a_torch_dataloader(numbers: str) -> None:
    with (
        Loader("numbers", batch_size=10, epochs=2, address=numbers) as bare,
        Loader("numbers", batch_size=10, epochs=2, address=numbers) as wrapped,
    ):
        dataloader: DataLoader[Batch] = DataLoader(wrapped, batch_size=None, num_workers=0)
        assert len(dataloader) == 21
        assert same(list(bare), list(dataloader))


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_torch_dataloader_that_would_stack_batches_is_refused(
    numbers: str, batch_size: int
) -> None:
    with Loader("numbers", batch_size=10, address=numbers) as loader:
        stacking: DataLoader[Batch] = DataLoader(loader, batch_size=batch_size)
        with pytest.raises(InvalidRequest, match=r"Use DataLoader\(loader, batch_size=None\)"):
            iter(stacking)
        listing: DataLoader[Batch] = DataLoader(loader, batch_size=batch_size, collate_fn=list)
        assert len(next(iter(listing))) == batch_size


def test_a_loop_keeps_nothing_of_the_function_around_it(numbers: str) -> None:
    """What a function drops while it reads is gone, though the Loader looks at who reads."""

    def train(loader: Loader) -> None:
        dropped = torch.zeros(1)
        gone = weakref.ref(dropped)
        for _ in loader:
            del dropped
            assert gone() is None
            break

    with Loader("numbers", batch_size=10, address=numbers) as loader:
        train(loader)


@pytest.mark.parametrize("num_read", [0, 1, 13])
def test_a_state_resumes_after_the_last_batch_yielded(numbers: str, num_read: int) -> None:
    with Loader("numbers", batch_size=10, seed=5, address=numbers) as loader:
        uninterrupted = take(loader, 20)
    with Loader("numbers", batch_size=10, seed=5, address=numbers) as loader:
        take(loader, num_read)
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        assert (loader.step, loader.epoch) == (num_read, num_read * 10 // NUM_SAMPLES)
    with Loader("numbers", batch_size=10, seed=5, address=numbers) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        assert loader.step == num_read
        assert same(take(loader, 20 - num_read), uninterrupted[num_read:])


def test_a_state_can_be_loaded_between_batches(numbers: str) -> None:
    with Loader("numbers", batch_size=10, address=numbers) as loader:
        first = take(loader, 4)
        state = loader.state_dict()
        second = take(loader, 4)
        loader.load_state_dict(state)
        assert same(take(loader, 4), second)
        assert loader.step == 8
        assert not same(first, second)


def test_an_iteration_continues_where_the_last_one_was_left(numbers: str) -> None:
    with Loader("numbers", batch_size=10, address=numbers) as loader:
        # zip takes a fourth and drops it
        left = [batch for batch, _ in zip(loader, range(3), strict=False)]
        rest = list(loader)
        assert len(left) + 1 + len(rest) == 11
        assert len(list(loader)) == 10, "and then with the next epoch"


@pytest.mark.parametrize(("tail", "num_steps"), [("wrap", 21), ("drop", 20), ("pad", 22)])
def test_the_tail_of_an_epoch(numbers: str, tail: str, num_steps: int) -> None:
    with Loader("numbers", batch_size=10, epochs=2, tail=tail, address=numbers) as loader:
        assert loader.num_samples == NUM_SAMPLES
        assert loader.steps_per_epoch == (10 if tail == "drop" else 11)
        assert len(loader) == num_steps
        epochs = []
        batches = []
        for batch in loader:
            epochs.append(loader.epoch)
            batches.append(batch)
    assert len(batches) == num_steps
    assert epochs[-1] == 2
    assert all(("mask" in batch) == (tail == "pad") for batch in batches)
    if tail == "pad":
        assert [int(batch["mask"].sum()) for batch in batches] == ([10] * 10 + [1]) * 2


def test_an_endless_loader_has_no_length(numbers: str) -> None:
    with Loader("numbers", batch_size=10, epochs=None, address=numbers) as loader:
        with pytest.raises(TypeError, match="never ends"):
            len(loader)
        assert sum(1 for _ in islice(loader, 50)) == 50


def test_batches_may_be_written_to_and_outlive_the_loader(numbers: str) -> None:
    with Loader("numbers", batch_size=10, address=numbers) as loader:
        kept = next(loader)
        copy = {name: tensor.clone() for name, tensor in kept.items()}
        spoilt = next(loader)
        for tensor in spoilt.values():
            tensor.zero_()
        take(loader, 30)
        assert same([kept], [copy])
    loader.__dict__.clear()  # nothing of the loader is needed any more
    gc.collect()
    assert same([kept], [copy])


def test_ragged_fields(gyred: Any, tmp_path: Path) -> None:
    samples = [{"__key__": f"{n:03d}", "txt": f"text {n}" * n, "json": {"n": n}} for n in range(30)]
    with webdataset.TarWriter(str(tmp_path / "shard-000.tar")) as writer:
        for sample in samples:
            writer.write(sample)
    dataset = {
        "uri": str(tmp_path / "shard-000.tar"),
        "format": "webdataset",
        "fields": ["txt", "json"],
    }
    daemon = gyred({"datasets": {"texts": dataset}})
    with Loader("texts", batch_size=10, address=daemon.address) as loader:
        batches = list(loader)
    assert sorted(ids(batches)) == list(range(30))
    for batch in batches:
        numbers = batch["sample_id"].tolist()
        assert texts(batch, "txt") == [samples[n]["txt"] for n in numbers]
        assert objects(batch, "json") == [{"n": n} for n in numbers]
