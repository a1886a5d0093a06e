"""The loops that people write, against a real daemon.

Epochs, breaks, validation, and states inside and between epochs.
"""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from gyre_client import Loader
from gyre_client.errors import InvalidRequest
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection

NUM_SAMPLES = 101
LENGTH = 8


@pytest.fixture(scope="module")
def address(shared_gyred: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "tokens.bin"
    np.arange(NUM_SAMPLES * LENGTH, dtype=np.uint16).tofile(path)
    numbers = {"uri": str(path), "format": "tokens", "sequence_length": LENGTH, "dtype": "uint16"}
    found: str = shared_gyred({"datasets": {"numbers": numbers}}).address
    return found


@pytest.fixture(scope="module")
def whole(address: str) -> list[list[int]]:
    """The steps of the first five epochs and more."""
    with loader(address) as reading:
        return ids(islice(reading.stream(), 60))


def loader(address: str, **arguments: Any) -> Loader:
    return Loader("numbers", batch_size=10, seed=3, address=address, **arguments)


def ids(batches: Iterator[dict[str, torch.Tensor]] | Loader) -> list[list[int]]:
    return [batch["sample_id"].tolist() for batch in batches]


def flat(lists: list[list[Any]]) -> list[Any]:
    return list(chain(*lists))


def num_batches_sent(address: str) -> int:
    with Connection(parse_address(address)) as connection:
        return connection.status().num_batches_sent


@pytest.mark.parametrize(
    ("tail", "sizes"), [("wrap", [11, 10, 10]), ("drop", [10, 10, 10]), ("pad", [11, 11, 11])]
)
def test_a_loop_over_epochs(address: str, tail: str, sizes: list[int]) -> None:
    with loader(address, tail=tail) as reading:
        with loader(address, tail=tail) as other:
            expected = ids(islice(other.stream(), sum(sizes)))
        epochs = []
        for epoch in range(3):
            assert reading.epoch == epoch
            epochs.append(ids(reading))
    assert [len(epoch) for epoch in epochs] == sizes
    assert len(reading) == max(sizes)
    assert flat(epochs) == expected
    if tail == "wrap":
        assert sorted(flat(flat(epochs))[: 3 * NUM_SAMPLES]) == sorted([*range(NUM_SAMPLES)] * 3)
    else:
        assert all(
            len({*flat(epoch)}) == (100 if tail == "drop" else NUM_SAMPLES) for epoch in epochs
        )


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_batch_larger_than_the_dataset(address: str, num_ranks: int) -> None:
    """One step an iteration; with `wrap`, an epoch in which no step begins has no iteration."""
    keys: dict[str, Any] = {"seed": 3, "address": address, "world_size": num_ranks}
    for tail, epochs in (("wrap", [0, 2, 5]), ("pad", [0, 1, 2])):
        found = []
        for rank in range(num_ranks):
            with Loader("numbers", batch_size=256, tail=tail, rank=rank, **keys) as reading:
                assert len(reading) == reading.steps_per_epoch == 1
                for epoch in epochs:
                    assert reading.epoch == epoch
                    (batch,) = reading
                    assert len(batch["sample_id"]) == 256 // num_ranks
                    counts = batch.get("mask", torch.ones(256 // num_ranks, dtype=torch.bool))
                    found.append((epoch, batch["sample_id"][counts].tolist()))
        for epoch in epochs:
            step = [each for at, some in found if at == epoch for each in some]
            assert len(step) == (256 if tail == "wrap" else NUM_SAMPLES)
            assert set(step) == set(range(NUM_SAMPLES))
    with pytest.raises(InvalidRequest, match="no whole batch of 256, and tail is 'drop'"):
        Loader("numbers", batch_size=256, tail="drop", rank=0, **keys)


def test_one_session_serves_all_epochs(address: str) -> None:
    """The end of an epoch opens nothing: what was read ahead is what comes."""
    with loader(address) as reading:
        opened = []
        for _ in range(5):
            list(reading)
            opened.append(reading._place._stream)
        assert len({id(stream) for stream in opened}) == 1


def test_epochs_says_how_many_an_iteration_passes_over(
    address: str, whole: list[list[int]]
) -> None:
    with loader(address, epochs=2) as reading:
        assert len(reading) == 21
        assert ids(reading) == whole[:21]
        assert ids(islice(reading, 5)) == whole[21:26]
        assert ids(reading) == whole[26:41], "the rest of two epochs"
    with loader(address, epochs=None) as endless:
        assert ids(islice(endless, 60)) == whole
        with pytest.raises(TypeError, match="no length"):
            len(endless)


def test_the_stream_goes_on_from_where_the_loader_stands(
    address: str, whole: list[list[int]]
) -> None:
    with loader(address) as reading:
        assert ids(islice(reading, 4)) == whole[:4]
        assert ids(islice(reading.stream(), 30)) == whole[4:34]
        assert next(reading)["sample_id"].tolist() == whole[34]
        assert ids(reading) == whole[35:41]


def test_a_break_loses_nothing(address: str, whole: list[list[int]]) -> None:
    seen = []
    with loader(address) as reading:
        for _ in range(3):
            for batch in reading:
                seen.append(batch["sample_id"].tolist())
                if len(seen) == 7:
                    break
    assert seen == whole[:21], "7 steps, the rest of that epoch, and the next one"


@pytest.mark.parametrize("num_read", [0, 5, 10, 11, 12, 20, 21])
def test_a_state_inside_an_epoch_and_between_two_is_exact(
    address: str, whole: list[list[int]], num_read: int
) -> None:
    with loader(address) as reading:
        for _ in range(num_read):
            next(reading)
        state = reading.state_dict()
    with loader(address) as resumed:
        resumed.load_state_dict(state)
        first_epoch = resumed.epoch
        resumed.set_epoch(first_epoch)  # as a framework does
        assert resumed.step == num_read
        assert [ids(resumed) for _ in range(first_epoch, 3)] == [
            whole[begin:end]
            for begin, end in ((num_read, 11), (max(num_read, 11), 21), (max(num_read, 21), 31))
            if begin < end
        ]


def test_a_state_saved_after_the_last_batch_is_the_next_epoch_s(
    address: str, whole: list[list[int]]
) -> None:
    with loader(address) as reading:
        for _ in reading:
            state = reading.state_dict()
        assert reading.state_dict() == state
    with loader(address) as resumed:
        resumed.load_state_dict(state)
        assert resumed.epoch == 1
        assert ids(resumed) == whole[11:21]


def test_set_epoch_and_reset_go_to_the_beginning(address: str, whole: list[list[int]]) -> None:
    with loader(address) as reading:
        reading.reset()
        reading.set_epoch(0)
        assert ids(reading) == whole[:11]
        reading.set_epoch(1)
        assert ids(islice(reading, 4)) == whole[11:15]
        reading.set_epoch(1)
        assert ids(islice(reading, 4)) == whole[11:15], "nothing was loaded: from its beginning"
        reading.set_epoch(3)
        assert (reading.step, reading.epoch) == (31, 3)
        assert ids(reading) == whole[31:41]
        state = reading.state_dict()
        reading.reset()
        assert ids(reading) == whole[:11]
        reading.load_state_dict(state)
        assert ids(reading) == whole[41:51]
        with pytest.raises(InvalidRequest, match=r"epoch is -1; it must be from 0"):
            reading.set_epoch(-1)


def test_a_place_that_cannot_be_leaves_the_loader_where_it_was(
    address: str, whole: list[list[int]]
) -> None:
    with Loader("numbers", batch_size=1, address=address) as one:
        expected = ids(islice(one.stream(), 3))
    with Loader("numbers", batch_size=1, tail="pad", address=address) as reading:
        next(reading)
        epochs = type(reading._place.epochs)
        reading._place.epochs = epochs([(0, 1 << 62)], batch_size=1)
        with pytest.raises(InvalidRequest, match="beyond any training"):
            reading.set_epoch(2)
        assert ids(islice(reading.stream(), 2)) == expected[1:]


@pytest.mark.parametrize("tail", ["pad", "drop", "wrap"])
def test_a_validation_loader_starts_again_each_pass(address: str, tail: str) -> None:
    with loader(address, order="sequential", tail=tail, restart=True) as validation:
        expected = [[step * 10 + place for place in range(10)] for step in range(10)]
        if tail != "drop":
            expected.append([100, *range(9)])
        assert ids(islice(validation, 4)) == expected[:4]
        for _ in range(3):
            validation.set_epoch(7)
            assert ids(validation) == expected
        assert len(validation) == len(expected)


def test_several_epochs_of_a_shuffled_restart(address: str, whole: list[list[int]]) -> None:
    num_before = num_batches_sent(address)
    with loader(address, epochs=2, restart=True) as reading:
        for _ in range(3):
            assert ids(reading) == whole[:21]
        with pytest.raises(InvalidRequest, match="restart=True ends with its epochs"):
            reading.stream()
    assert num_batches_sent(address) - num_before == 3 * 21, "nothing is read beyond its end"


def test_the_older_of_two_iterators_is_refused(address: str, whole: list[list[int]]) -> None:
    with loader(address) as reading:
        older = iter(reading)
        next(older)
        younger = iter(reading)
        with pytest.raises(InvalidRequest, match="only the youngest one may go on"):
            next(older)
        assert ids(younger) == whole[1:11]


def test_keywords_of_the_dataloader_are_refused_with_the_equivalent(address: str) -> None:
    with pytest.raises(TypeError, match="order='sequential' for shuffle=False"):
        loader(address, shuffle=False)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'colour'$"):
        loader(address, colour=False)
