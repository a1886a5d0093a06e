"""The quick fake tensors of dry runs have the results of torch's."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from gyre_trainer.accounting.fake_mode import QuickFakeTensorMode
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    FakeTensorMode.cache_clear()


def described(tensor: Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage().nbytes()
    place = tensor.stride(), tensor.storage_offset(), storage
    return tensor.shape, *place, tensor.dtype, tensor.requires_grad


PROGRAMS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "rows of one shape": lambda x: [x[start : start + 2] for start in (0, 2, 4)],
    "what is computed from them": lambda x: [x[start : start + 2] * 2 for start in (0, 2, 4)],
    "written to": lambda x: [x[start : start + 2].addmm_(x[:2, :2], x[:2]) for start in (0, 4)],
    "columns": lambda x: [x[:, 1:3] + 1, x.t()[1:3] + 1, x[:, ::2].contiguous()],
    "strides": lambda x: [x.as_strided((2, 2), (2, 1), start) for start in (0, 3)],
    "numbers": lambda x: [x.long() + 1, x.long() + 1.0, x.long() + True],
    "lists": lambda x: [
        torch.cat([x, x]),
        torch.stack([x, x], 1),
        *torch.split(x, [1, 5]),
        *x.unbind(1),
    ],
    "dtypes": lambda x: [x.bfloat16() @ x.bfloat16().t(), x.sum(dtype=torch.float64)],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_those_of_torch(name: str) -> None:
    found = []
    for mode in (FakeTensorMode(), QuickFakeTensorMode()):
        FakeTensorMode.cache_clear()
        with mode:
            found += [  # what is computed, and what is known
                [described(each) for each in PROGRAMS[name](torch.empty(6, 8))] for _ in range(2)
            ]
    assert found == found[:1] * 4
    real = [described(each) for each in PROGRAMS[name](torch.empty(6, 8))]
    assert real == found[0]


def test_an_operator_on_the_next_rows_is_known() -> None:
    with QuickFakeTensorMode():
        chunks = torch.split(torch.empty(8, 4), 2)
        chunks[0].mul(2)
        with patch.object(FakeTensorMode, "_dispatch_impl") as dispatched:
            assert chunks[1].mul(2).shape == (2, 4)
        dispatched.assert_not_called()
