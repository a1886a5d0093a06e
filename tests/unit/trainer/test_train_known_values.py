"""On fake tensors, integers that follow from a router's choice are known, and nothing else is."""

from collections.abc import Iterator

import pytest
import torch
from gyre_trainer.accounting.step_cost import RealIntegers
from gyre_trainer.errors import ConfigError
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

NUM_TOKENS, NUM_CHOICES, NUM_EXPERTS = 6, 2, 4


@pytest.fixture
def values() -> Iterator[RealIntegers]:
    with FakeTensorMode(allow_non_fake_inputs=True), RealIntegers() as known:
        yield known


def chosen() -> Tensor:
    """The experts of each token, as a router chooses them."""
    return torch.empty(NUM_TOKENS, NUM_EXPERTS).topk(NUM_CHOICES, dim=-1).indices


def test_each_expert_gets_as_many_tokens_and_no_token_an_expert_twice(values: RealIntegers) -> None:
    experts = chosen()
    assert experts.flatten().bincount(minlength=NUM_EXPERTS).tolist() == [3] * NUM_EXPERTS
    assert not bool((experts[:, 0] == experts[:, 1]).any())
    for expert in range(NUM_EXPERTS):
        tokens, places = torch.where(experts == expert)
        assert tokens.shape == places.shape == (3,)
        assert torch.empty(NUM_TOKENS, 5)[tokens].shape == (3, 5)
        assert torch.empty(NUM_TOKENS, NUM_CHOICES, 5)[experts == expert].shape == (3, 5)
    assert values.assumes_even_routing


def test_a_choice_along_another_dim_is_even_too(values: RealIntegers) -> None:
    experts = torch.empty(NUM_EXPERTS, NUM_TOKENS).topk(NUM_CHOICES, dim=0).indices
    assert experts.flatten().bincount().tolist() == [3] * NUM_EXPERTS


def test_unknown_values_are_not_written_to_known_ones(values: RealIntegers) -> None:
    counts = torch.zeros(3, dtype=torch.int64)
    assert counts[1:].tolist() == [0, 0]
    with pytest.raises(ConfigError, match="become unknown"):
        counts.add_(torch.empty(3).to(torch.int64))


def test_random_integers_are_unknown(values: RealIntegers) -> None:
    with pytest.raises(DynamicOutputShapeException):
        torch.randint(2, (4,)).nonzero()


def test_a_number_that_is_not_known_is_one(values: RealIntegers) -> None:
    assert torch.empty(()).item() == 1
    assert torch.randint(5, ()).item() == 1
    assert torch.arange(4)[3].item() == 3


def test_more_experts_than_choices_are_refused(values: RealIntegers) -> None:
    with pytest.raises(ConfigError, match="choose 2 experts in a step, but there are 4"):
        torch.empty(1, NUM_EXPERTS).topk(NUM_CHOICES)
