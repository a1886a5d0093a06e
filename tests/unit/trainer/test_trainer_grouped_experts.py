"""Experts by grouped products of torch are equal to the loop over them, in gradients too."""

import pytest
import torch
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


def test_experts_without_any_row_get_gradients_of_zero() -> None:
    experts = Experts(3, DIM, HIDDEN).bfloat16()
    x = torch.randn(4, DIM, dtype=torch.bfloat16)
    output = experts(x, torch.full((4, 2), 3), torch.ones(4, 2))
    assert not output.any()
    output.sum().backward()
    assert all(each.grad is not None and not each.grad.any() for each in experts.parameters())
