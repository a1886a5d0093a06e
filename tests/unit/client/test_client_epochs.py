"""The arithmetic of epochs, and iterators over a loader that only counts."""

import inspect
from itertools import islice
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from gyre_client.batches.batch import Position
from gyre_client.errors import InvalidRequest
from gyre_client.loader.interop import refuse_unknown
from gyre_client.loader.loader import UNKNOWN, EpochIterator
from gyre_client.loader.place import Epochs


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "tail", "length", "sizes"),
    [
        (101, 10, "wrap", 101, [11, 10, 10]),
        (101, 10, "drop", 100, [10, 10, 10]),
        (101, 10, "pad", 110, [11, 11, 11]),
        (100, 10, "wrap", 100, [10, 10, 10]),
        # some epochs have no beginning of a step; a pass is one that has
        (7, 10, "wrap", 7, [1, 1, 1]),
        (7, 10, "pad", 10, [1, 1, 1]),
    ],
)
def test_steps_of_epochs(
    num_samples: int, batch_size: int, tail: str, length: int, sizes: list[int]
) -> None:
    epochs = Epochs([(0, num_samples)], batch_size, tail)
    assert epochs.max_steps(10) == -(-10 * length // batch_size)
    step, found = 0, []
    for _ in sizes:
        stop = epochs.stop(step, 1)
        assert {epochs.epoch_of(each) for each in range(step, stop)} == {epochs.epoch_of(step)}
        found.append(stop - step)
        step = stop
    assert found == sizes
    assert max(found) <= epochs.max_steps(1)
    assert all(epochs.epoch_of(epochs.first_batch(epoch)) >= epoch for epoch in range(9))


def test_iterations_of_several_epochs_follow_each_other() -> None:
    epochs = Epochs([(0, 101)], 10, "wrap")
    assert epochs.max_steps(2) == 21
    assert epochs.stop(0, 2) == epochs.stop(20, 2) == 21
    assert epochs.stop(21, 2) == 41


def test_epochs_that_grow() -> None:
    """Two epochs of 7 in batches of 2, then epochs of 9: 7 + 7 + 9 + 9 positions."""
    epochs = Epochs([(0, 7), (2, 9)], 2)
    assert [epochs.first_batch(epoch) for epoch in range(5)] == [0, 4, 7, 12, 16]
    assert [epochs.epoch_of(step) for step in (0, 3, 4, 6, 7, 11, 12)] == [0, 0, 1, 1, 2, 2, 3]
    assert epochs.max_steps(1) == 5
    assert epochs.stop(5, 2) == 7


class Counted:
    """A stream whose batches are their steps."""

    def __init__(self, length: int = 5) -> None:
        self.position = Position(b"", 0)
        self._iteration, self._stop_batch = 0, UNKNOWN
        self.epochs = Epochs([(0, length)], 1)

    @property
    def _batch(self) -> int:
        return self.position.batch

    def _peek(self) -> Any:
        return self, self._batch, Position(b"", self._batch + 1)

    def reset(self) -> None:
        self.go_to(0)

    def go_to(self, step: int) -> None:
        self.position = Position(b"", step)
        self._stop_batch = UNKNOWN

    def _begin_iteration(self, num_epochs: int | None) -> int:
        return 1 << 64 if num_epochs is None else self.epochs.stop(self._batch, num_epochs)


def steps(stream: Any, num_epochs: int | None = 1, *, restart: bool = False) -> Any:
    return EpochIterator(stream, num_epochs, restart=restart)


def test_each_iteration_is_an_epoch_or_the_rest_of_one() -> None:
    stream = Counted()
    assert list(steps(stream)) == [0, 1, 2, 3, 4]
    assert list(islice(steps(stream), 2)) == [5, 6]
    assert list(steps(stream)) == [7, 8, 9]
    assert list(steps(stream, 2)) == [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
    assert list(islice(steps(stream, None), 7)) == [20, 21, 22, 23, 24, 25, 26]


def test_an_iterator_that_has_ended_stays_ended() -> None:
    stream = Counted()
    ended = steps(stream)
    assert iter(ended) is ended
    assert len(list(ended)) == 5
    assert list(ended) == []
    stream.reset()
    assert list(ended) == []


def test_an_iterator_follows_its_loader_to_another_step() -> None:
    stream = Counted()
    one = steps(stream)
    assert next(one) == 0
    stream.go_to(8)
    assert list(one) == [8, 9]


def test_a_restarted_iteration_begins_at_the_first_batch_even_after_a_break() -> None:
    stream = Counted()
    assert list(islice(steps(stream, restart=True), 3)) == [0, 1, 2]
    again = steps(stream, restart=True)
    assert stream._batch == 3, "not before its first batch is asked for"
    assert list(again) == [0, 1, 2, 3, 4]


def test_only_the_youngest_iterator_goes_on() -> None:
    stream = Counted()
    older = steps(stream)
    next(older)
    younger = steps(stream)
    with pytest.raises(InvalidRequest, match="another iteration of this Loader has begun"):
        next(older)
    assert list(younger) == [1, 2, 3, 4]


def test_the_end_is_known_with_the_last_batch() -> None:
    stream = Counted(3)
    one = steps(stream)
    assert not one.ends_at(3), "not before its first batch is asked for"
    assert [(step, one.ends_at(step + 1)) for step in one] == [(0, False), (1, False), (2, True)]


def test_what_is_raised_before_a_batch_is_taken_leaves_it_there() -> None:
    stream = Counted()
    one = steps(stream)
    peeked, reset = stream._peek, stream.reset
    stream._peek = stream.reset = Mock(side_effect=KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        next(one)
    stream._peek = peeked  # type: ignore[method-assign]
    assert list(one) == [0, 1, 2, 3, 4]
    restarted = steps(stream, restart=True)
    with pytest.raises(KeyboardInterrupt):
        next(restarted)
    stream.reset = reset  # type: ignore[method-assign]
    assert list(restarted) == [0, 1, 2, 3, 4], "an interrupted restart is repeated"


def test_an_unknown_keyword_is_refused_with_its_equivalent() -> None:
    refuse_unknown([])
    with pytest.raises(
        TypeError,
        match=r"unexpected keyword argument 'shuffle': .*order='sequential' for shuffle=False",
    ):
        refuse_unknown(["shuffle"])
    with pytest.raises(TypeError, match=r"argument 'drop_last': use tail='drop'"):
        refuse_unknown(["drop_last"])
    with pytest.raises(TypeError, match=r"argument 'num_workers': leave it out"):
        refuse_unknown(["num_workers"])
    with pytest.raises(TypeError, match=r"argument 'colour'$"):
        refuse_unknown(["colour"])


def test_every_keyword_of_the_dataloader_is_explained() -> None:
    names = set(inspect.signature(torch.utils.data.DataLoader.__init__).parameters) - {
        "self",
        "dataset",
        "batch_size",
    }
    for name in names:
        with pytest.raises(TypeError, match=f"argument '{name}': "):
            refuse_unknown([name])
