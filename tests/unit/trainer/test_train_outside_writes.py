"""Which writes to parameters are taken for those of a step, and digests of values."""

import pytest
import torch
from gyre_trainer.shards.averaging import OutsideWrites
from gyre_trainer.shards.layout import digest_of
from torch import nn


def watched() -> tuple[nn.Parameter, OutsideWrites]:
    parameter = nn.Parameter(torch.ones(3))
    writes = OutsideWrites([parameter])
    writes.settle()
    return parameter, writes


def test_a_closure_sees_no_write_outside_of_its_step() -> None:
    parameter, writes = watched()
    optimizer = torch.optim.LBFGS([parameter], lr=0.1, max_iter=3)
    found = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        found.append(writes.found)
        return loss

    for _ in range(2):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    assert len(found) > 2
    assert not any(found)
    with torch.no_grad():
        parameter.zero_()
    assert writes.found


def test_what_was_written_before_a_step_is_found_in_it() -> None:
    parameter, writes = watched()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with torch.no_grad():
        parameter.zero_()
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert writes.found


def test_an_optimizer_may_be_given_other_parameters_later() -> None:
    parameter, writes = watched()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    optimizer.step()
    optimizer.param_groups[0]["params"] = [parameter]
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert not writes.found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("length", [1, 7, 5 * 4093 * 8 + 3])
def test_a_digest_depends_on_each_value_and_on_nothing_else(
    dtype: torch.dtype, length: int
) -> None:
    values = torch.arange(length + 1).to(dtype)
    digest = digest_of(values[1:])
    assert digest == digest_of(values[1:].clone())
    for at in {1, length // 2 + 1, length}:
        before = values[at].clone()
        values[at] = 0 if before else 1
        assert digest_of(values[1:]) != digest
        values[at] = before
    assert digest_of(values[1:]) == digest
