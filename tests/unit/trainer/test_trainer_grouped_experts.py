"""Experts by grouped products of torch are equal to the loop over them, in gradients too."""

import pytest
import torch
from gyre_trainer.accounting.counters import Counters
from gyre_trainer.layers.experts import Experts, grouped_mlps, mlps
from torch import Tensor

DIM, HIDDEN = 16, 24  # rows of 16 bytes in both dtypes


def outcome(sizes: list[int], dtype: torch.dtype, *, grouped: bool) -> list[Tensor]:
    """The output, and the gradients of the rows and of all weights."""
    torch.manual_seed(0)
    starts = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    experts = Experts(len(sizes), DIM, HIDDEN).to(dtype)
    rows = torch.randn(starts[-1], DIM, dtype=dtype, requires_grad=True)
    stacks = experts.gate, experts.up, experts.down
    if grouped:
        output = grouped_mlps(rows, torch.tensor(starts[1:], dtype=torch.int32), *stacks)
    else:
        output = mlps(rows, starts, *stacks)
    output.sin().mean().backward()  # type: ignore[no-untyped-call]
    grads = [each.grad for each in (rows, *stacks)]
    return [output.detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("sizes", [[3, 5, 1], [0, 4, 0], [1], [0, 0, 2]])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-6)])
def test_grouped_products_are_the_loop_over_the_experts(
    sizes: list[int], dtype: torch.dtype, tolerance: float
) -> None:
    found, expected = outcome(sizes, dtype, grouped=True), outcome(sizes, dtype, grouped=False)
    assert len(found) == len(expected) == 5
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("dims", [(2, 3), (2, 2), (3, 2), (3, 3)])
def test_operations_of_grouped_products_are_those_of_their_groups(dims: tuple[int, int]) -> None:
    """Groups of 8 and 16 rows, columns or addends; or two products of whole matrices."""
    one = torch.ones((2,) * (dims[0] - 2) + (24, 24), dtype=torch.bfloat16)
    other = torch.ones((2,) * (dims[1] - 2) + (24, 24), dtype=torch.bfloat16)
    ends = None if dims == (3, 3) else torch.tensor([8, 24], dtype=torch.int32)
    with Counters() as counters:
        torch._grouped_mm(one, other, offs=ends)
    assert counters.operations == 2 * 24**3 * (2 if dims == (3, 3) else 1)


def test_training_by_grouped_products_has_the_operations_of_the_loop() -> None:
    found = []
    for grouped in (True, False):
        with Counters() as counters:
            outcome([3, 5, 1], torch.bfloat16, grouped=grouped)
        found.append(counters.operations)
    assert found[0] == found[1] == 3 * 3 * 2 * (3 + 5 + 1) * DIM * HIDDEN


def test_experts_without_any_row_get_gradients_of_zero() -> None:
    experts = Experts(3, DIM, HIDDEN).bfloat16()
    x = torch.randn(4, DIM, dtype=torch.bfloat16)
    output = experts(x, torch.full((4, 2), 3), torch.ones(4, 2))
    assert not output.any()
    output.sum().backward()
    assert all(each.grad is not None and not each.grad.any() for each in experts.parameters())
