"""Initial weights in one process: reproducible, of the right distribution, without seams."""

from math import sqrt
from types import SimpleNamespace
from typing import Any

import pytest
import scipy
import torch
from gyre_trainer.errors import ConfigError, RotationError
from gyre_trainer.shards.initialisation import Constant, Normal, Uniform, fill, materialize
from gyre_trainer.training.gpt import GPT, GPTConfig
from torch import Tensor, nn

CONFIG = GPTConfig(
    vocab_size=300, num_layers=2, dim=32, num_heads=4, num_kv_heads=2, hidden_dim=80, max_seq_len=8
)


def materialized(seed: int, *, tied: bool = False) -> GPT:
    with torch.device("meta"):
        config = CONFIG if not tied else GPTConfig(300, 2, 32, 4, 2, 80, 8, tie_embeddings=True)
        model = GPT(config)
    materialize(model, seed=seed)
    return model


def drawn(
    init: Normal | Uniform | Constant, shape: tuple[int, ...], *, seed: int = 0, name: str = "w"
) -> Tensor:
    tensor = torch.empty(shape, dtype=torch.float64)
    fill(tensor, init, seed=seed, name=name)
    return tensor


def test_the_same_seed_gives_the_same_weights_and_another_gives_others() -> None:
    one, same, other = (dict(materialized(seed).named_parameters()) for seed in (5, 5, 6))
    for name in one:
        assert torch.equal(one[name], same[name])
        assert ("norm" in name) == torch.equal(one[name], other[name])


def test_parameters_of_one_shape_begin_differently() -> None:
    assert not torch.equal(
        drawn(Normal(1.0), (8, 8), name="a"), drawn(Normal(1.0), (8, 8), name="b")
    )


def test_cells_of_one_parameter_are_independent() -> None:
    values = drawn(Normal(1.0), (600, 700))
    cells = [
        values[row : row + 88, column : column + 188].flatten()
        for row in (0, 256, 512)
        for column in (0, 256, 512)
    ]
    correlation = torch.corrcoef(torch.stack(cells)) - torch.eye(len(cells))
    assert correlation.abs().max() < 5 / sqrt(cells[0].numel())


def test_distributions_are_those_named() -> None:
    normal, uniform = (
        drawn(Normal(0.02), (300, 500)).flatten(),
        drawn(Uniform(0.3), (300, 500)).flatten(),
    )
    assert scipy.stats.kstest(normal.numpy(), "norm", args=(0, 0.02)).pvalue > 1e-4
    assert scipy.stats.kstest(uniform.numpy(), "uniform", args=(-0.3, 0.6)).pvalue > 1e-4
    assert drawn(Constant(1.5), (300,)).eq(1.5).all()


def test_layers_without_inits_begin_with_torchs_distributions() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(400, 100), nn.LayerNorm(100), nn.Linear(100, 300))
    materialize(model, seed=1)
    embedding, norm, linear = model
    assert isinstance(norm, nn.LayerNorm)
    assert isinstance(linear, nn.Linear)
    assert embedding.weight.std().item() == pytest.approx(1, rel=0.03)  # type: ignore[operator]
    assert norm.weight.eq(1).all()
    assert norm.bias.eq(0).all()
    assert 0.0999 < linear.weight.abs().max() <= 0.1
    assert 0.09 < linear.bias.abs().max() <= 0.1


def test_layers_that_end_on_the_residual_stream_begin_smaller() -> None:
    model = materialized(0)
    ends, others = model.blocks[0].mlp.down.weight, model.blocks[0].mlp.up.weight  # type: ignore[union-attr]
    assert ends.std().item() == pytest.approx(0.01, rel=0.05)  # type: ignore[operator]
    assert others.std().item() == pytest.approx(0.02, rel=0.05)  # type: ignore[operator]


def test_tied_parameters_stay_tied() -> None:
    model = materialized(0, tied=True)
    assert model.head.weight is model.embedding.weight
    assert not model.head.weight.is_meta


@pytest.mark.parametrize(("dim", "num_heads", "num_kv_heads"), [(36, 4, 4), (32, 4, 3)])
def test_an_impossible_shape_is_refused(dim: int, num_heads: int, num_kv_heads: int) -> None:
    with pytest.raises(ConfigError, match=r"model\.(dim|num_kv_heads)"):
        GPTConfig(10, 1, dim, num_heads, num_kv_heads, 8, 8)


class Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("table", torch.arange(3.0))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.mul_(2)


def test_values_that_nothing_can_make_are_refused_by_name() -> None:
    with torch.device("meta"):
        model = Doubles()
    with pytest.raises(RotationError, match="buffer table is on meta, and Doubles cannot be made"):
        materialize(model, seed=0)
    model.table = torch.arange(3.0)
    with pytest.raises(
        RotationError, match=r"changes layer\.weight, but not all of it, or by what"
    ):
        materialize(model, seed=0)


class Given(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


class Gives(nn.Module):
    """Registers a buffer with a module inside, whose constructor makes none."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.inside = config, Given(config)
        self.inside.register_buffer("scales", torch.arange(2.0), persistent=False)


def test_a_buffer_that_the_module_around_gives_is_made() -> None:
    with torch.device("meta"):
        model = Gives(SimpleNamespace())
    materialize(model, seed=0)
    assert torch.equal(model.inside.get_buffer("scales"), torch.arange(2.0))
