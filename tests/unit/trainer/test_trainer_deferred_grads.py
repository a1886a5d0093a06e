"""Deferred weight gradients of linear layers, and the sums that slices add to."""

import pytest
import torch
import torch.nn.functional as F
from gyre_trainer.rotation.rule import DeferredGrads, DeferWeightGrads, RunningSum
from gyre_trainer.shards import layout
from gyre_trainer.shards.layout import SliceGrad
from torch import Tensor


def late_and_usual(
    weight: Tensor, source: Tensor, *, twice: bool = False, elsewhere: bool = False
) -> list[tuple[Tensor, Tensor]]:
    """Gradients of weight, bias and input, deferred and as usual."""

    def loss(weight: Tensor, bias: Tensor, source: Tensor) -> Tensor:
        output = F.linear(source, weight, bias).tanh()
        if twice:
            output = output + F.linear(source, weight)
        return output.square().sum() + (weight.exp().sum() if elsewhere else 0)

    def leaves() -> tuple[Tensor, Tensor, Tensor]:
        bias = torch.linspace(-1, 1, len(weight), dtype=weight.dtype)
        return (
            weight.clone().requires_grad_(),
            bias.requires_grad_(),
            source.clone().requires_grad_(),
        )

    inputs = leaves()
    expected = torch.autograd.grad(loss(*inputs), inputs)
    inputs = leaves()
    total = RunningSum(source.dtype)
    deferred = DeferredGrads({id(inputs[2]): total}, {id(inputs[0]): 0})
    with DeferWeightGrads(deferred):
        output = loss(*inputs)
    grads: tuple[Tensor | None, ...] = torch.autograd.grad(output, inputs, allow_unused=True)
    of_weight, of_bias, of_source = grads
    assert of_bias is not None
    assert of_source is None
    of_sum = total.result()
    assert of_sum is not None
    found = SliceGrad([torch.full_like(weight, torch.nan)], empty=True, scale=1.0)
    assert (of_weight is not None) == elsewhere
    if of_weight is not None:
        found.add(0, of_weight)
    for product in deferred.take_products():
        found.add_product(product.position, product.left, product.right)
    assert deferred.take_products() == []
    return list(zip((found._parts[0], of_bias, of_sum), expected, strict=True))


@pytest.mark.parametrize(
    ("shape", "num_rows"), [((3,), 4), ((5, 3), 4), ((2, 5, 3), 4), ((0, 3), 4), ((5, 3), 0)]
)
@pytest.mark.parametrize(
    ("twice", "elsewhere"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_deferred_gradients_equal_the_usual_ones(
    shape: tuple[int, ...], num_rows: int, twice: bool, elsewhere: bool
) -> None:
    torch.manual_seed(0)
    weight, source = (
        torch.randn(num_rows, 3, dtype=torch.float64),
        torch.randn(shape, dtype=torch.float64),
    )
    for found, expected in late_and_usual(weight, source, twice=twice, elsewhere=elsewhere):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_gradients_of_unbound_matrices_are_deferred_too() -> None:
    torch.manual_seed(0)
    sources = torch.randn(3, 5, 4, dtype=torch.float64)
    stack = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)

    def loss() -> Tensor:
        matrices = stack.unbind()
        return torch.stack(
            [F.linear(sources[which], matrices[which]).tanh() for which in (0, 2)]
        ).sum()

    (expected,) = torch.autograd.grad(loss(), stack)
    deferred = DeferredGrads({}, {id(stack): 0})
    with DeferWeightGrads(deferred):
        output = loss()
    assert deferred.entries == {}
    grads: tuple[Tensor | None, ...] = torch.autograd.grad(output, stack, allow_unused=True)
    assert grads == (None,)
    found = SliceGrad([torch.full_like(stack, torch.nan)], empty=True, scale=1.0)
    for product in deferred.take_products():
        found.add_product(product.position, product.left, product.right, product.entry)
    torch.testing.assert_close(found._parts[0], expected, rtol=1e-13, atol=1e-13)


def test_other_weights_and_autocast_are_left_alone() -> None:
    weight, other, source = (
        torch.randn(4, 3, requires_grad=True),
        torch.randn(4, 3, requires_grad=True),
        torch.randn(2, 3),
    )
    deferred = DeferredGrads({}, {id(weight): 0})
    with DeferWeightGrads(deferred):
        outputs = F.linear(source, other).sum()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = outputs + F.linear(source, weight).sum()
    assert all(grad is not None for grad in torch.autograd.grad(outputs, (weight, other)))
    assert deferred.take_products() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slices_gradient_is_scaled_and_starts_with_the_first_contribution(
    dtype: torch.dtype,
) -> None:
    parts = [torch.full((2, 2), torch.nan) for _ in range(3)]
    grad = SliceGrad(parts, empty=True, scale=0.5)
    one = torch.ones(2, 2, dtype=dtype)
    grad.add(0, one)
    grad.add(0, one)
    grad.add_product(1, one, one)
    grad.add_product(1, one, one)
    grad.close()
    assert [part.flatten().tolist() for part in parts] == [[1.0] * 4, [2.0] * 4, [0.0] * 4]


@pytest.mark.parametrize("empty", [True, False])
def test_a_product_in_another_dtype_is_added_to_some_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch, empty: bool
) -> None:
    monkeypatch.setattr(layout, "_MAX_PRODUCT_NUMEL", 8)
    left, right = torch.arange(10.0).view(5, 2).bfloat16(), torch.ones(2, 3).bfloat16()
    part = torch.full((5, 3), torch.nan if empty else 1.0)
    SliceGrad([part], empty=empty, scale=0.5).add_product(0, left, right)
    assert torch.equal(part, 0.5 * (left @ right).float() + (0 if empty else 1))


def test_an_arrived_gradient_is_kept_if_nothing_is_added() -> None:
    part = torch.full((2,), 3.0)
    grad = SliceGrad([part], empty=False, scale=0.5)
    grad.close()
    grad.add(0, torch.ones(2))
    assert part.tolist() == [3.5, 3.5]


def test_a_sum_writes_only_to_its_own_memory() -> None:
    lent, given = torch.ones(2, 3), torch.ones(2, 3)
    for first, owned in ((lent, False), (given, True)):
        total = RunningSum(torch.float32)
        total.add(first, owned=owned)
        total.add_product(torch.ones(2, 4), torch.ones(4, 3), (2, 3))
        total.add(torch.ones(2, 3))
        found = total.result()
        assert found is not None
        assert found.tolist() == [[6.0] * 3] * 2
    assert lent.tolist() == [[1.0] * 3] * 2
    assert given.tolist() == [[6.0] * 3] * 2


def test_a_sum_is_rounded_once_however_many_slices_there_are() -> None:
    parts = torch.randn(64, 100, generator=torch.Generator().manual_seed(0)).bfloat16()
    total = RunningSum(torch.bfloat16)
    for part in parts:
        total.add(part)
    found = total.result()
    assert found is not None
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), parts.double().sum(0), rtol=2**-8, atol=1e-5)
