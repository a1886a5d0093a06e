"""Initial weights in one process: reproducible, and those of models' and layers' own methods."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gyre_trainer.errors import ConfigError, RotationError
from gyre_trainer.shards.initialisation import materialize
from gyre_trainer.training.gpt import GPT, GPTConfig
from torch import nn

CONFIG = GPTConfig(
    vocab_size=300, num_layers=2, dim=32, num_heads=4, num_kv_heads=2, hidden_dim=80, max_seq_len=8
)


def materialized(seed: int, *, tied: bool = False) -> GPT:
    with torch.device("meta"):
        config = CONFIG if not tied else GPTConfig(300, 2, 32, 4, 2, 80, 8, tie_embeddings=True)
        model = GPT(config)
    materialize(model, seed=seed)
    return model


def test_the_same_seed_gives_the_same_weights_and_another_gives_others() -> None:
    one, same, other = (dict(materialized(seed).named_parameters()) for seed in (5, 5, 6))
    for name in one:
        assert torch.equal(one[name], same[name])
        assert ("norm" in name) == torch.equal(one[name], other[name])


def layers() -> nn.Module:
    embedding, norm = nn.Embedding(40, 8, padding_idx=3), nn.LayerNorm(8)
    linear, attention = nn.Linear(8, 30), nn.MultiheadAttention(8, 2, add_bias_kv=True)
    return nn.Sequential(embedding, norm, linear, attention, nn.GRU(8, 4))


def test_layers_of_torch_begin_as_torch_initialises_them() -> None:
    with torch.device("meta"):
        model = layers()
    materialize(model, seed=1)
    torch.manual_seed(1)
    for (name, found), expected in zip(
        model.named_parameters(), layers().parameters(), strict=True
    ):
        assert torch.equal(found, expected), name


class Scaled(nn.Module):
    """A parameter of its own without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))


class Reset(Scaled):
    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 3)


def test_modules_reset_their_own_parameters() -> None:
    with torch.device("meta"):
        model, unnamed = nn.Sequential(nn.Linear(2, 2), Reset()), nn.Sequential(Scaled())
    materialize(model, seed=0)
    assert dict(model.named_parameters())["1.scale"].item() == 3
    with pytest.raises(RotationError, match=r"0\.scale .* give Scaled a method reset_parameters"):
        materialize(unnamed, seed=0)


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
