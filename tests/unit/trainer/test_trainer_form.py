"""The form of a call's arguments, and of a module's output."""

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from gyre_trainer.rotation.call import Arguments, Form, Missing


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Constant:
    value: int


ONE, TWO = torch.ones(1), torch.ones(2)
VALUES: dict[str, list[Any]] = {
    "tensors": [ONE, TWO],
    "constants": [None, True, 1, 2.0, "three", Constant(4)],
    "nested": [[ONE, (2, TWO)], {"a": ONE, "b": [None, TWO]}, Pair(TWO, "x")],
    "empty containers": [[], {}, ()],
    "nothing": [],
    "mixed": [ONE, (TWO, ONE), None, "x"],
}


@pytest.mark.parametrize("name", VALUES)
def test_values_are_put_together_again(name: str) -> None:
    form = Form(VALUES[name])
    tensors = form.take_tensors()
    assert form.leaves.count(Missing) == len(tensors)
    again = form.filled(tensors)
    assert repr(again) == repr(VALUES[name])
    assert [type(each) for each in again] == [type(each) for each in VALUES[name]]


def test_other_tensors_take_the_places() -> None:
    form = Form([ONE, [1, TWO]], [TWO])
    assert form.take_tensors() == [ONE]
    found = form.filled([TWO], given=[ONE])
    assert found[0] is TWO
    assert found[1][0] == 1
    assert found[1][1] is ONE


def test_arguments_keep_their_names() -> None:
    arguments = Arguments((ONE, (TWO,)), {"scale": 2.0, "mask": ONE})
    args, kwargs = arguments.call(arguments.take_tensors())
    assert args[0] is ONE
    assert args[1] == (TWO,)
    assert list(kwargs) == ["scale", "mask"]
    assert kwargs["scale"] == 2.0
    assert kwargs["mask"] is ONE


def test_a_form_keeps_no_tensor() -> None:
    tensor = torch.ones(3)
    memory = weakref.ref(tensor)
    form = Form([tensor, [tensor]])
    assert len(form.take_tensors()) == 2
    del tensor
    assert memory() is None


def test_writes_to_containers_are_noticed() -> None:
    arguments = Arguments((ONE, [TWO]), {"cache": {"a": 1}})
    given = arguments.take_tensors()
    args, kwargs = arguments.call(given)
    assert arguments.written_to(args, kwargs) is None
    args[1].append(ONE)
    assert arguments.written_to(args, kwargs) is args[1]
    args, kwargs = arguments.call(given)
    kwargs["cache"]["a"] = 2
    assert arguments.written_to(args, kwargs) is kwargs["cache"]
