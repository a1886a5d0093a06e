"""Transformers' models that are built on `meta` get the values of their own `_init_weights`."""

from typing import Any

import pytest
import torch
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.rotate import materialize, rotate_all
from torch import Tensor, nn

from tests.distributed.conftest import StartRanks
from tests.distributed.training import whole_parameters

SEED = 5


def made(family: str, *, tied: bool = True) -> Any:
    """A tiny model; GPT-2's attention gives its output layer values after that layer's own."""
    import transformers  # seconds, for these tests alone

    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    llama: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2}
    gpt2: dict[str, Any] = {"n_embd": 20, "n_layer": 2, "n_head": 4, "n_positions": 16}
    sizes = llama | heads if family == "Llama" else gpt2
    config = getattr(transformers, f"{family}Config")(
        vocab_size=61, tie_word_embeddings=tied, use_cache=False, **sizes
    )
    name = "LlamaForCausalLM" if family == "Llama" else "GPT2LMHeadModel"
    return getattr(transformers, name)(config)


def by_the_library(family: str) -> Any:
    """The model in one process, with the values of the library's own initialisation."""
    model = made(family, tied=False)
    for module in model.modules():
        module._is_hf_initialized = False  # so that the library does it again
    torch.manual_seed(SEED)
    model.init_weights()
    return model


def materialized(family: str) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Whole parameters, buffers and logits of the rotated model."""
    with torch.device("meta"):
        model = made(family)
    rotate_all(model, mesh=make_mesh("cpu"))
    state = torch.get_rng_state()
    materialize(model, seed=SEED)
    assert torch.equal(torch.get_rng_state(), state)
    logits = model.eval()(torch.arange(12)[None]).logits.detach()
    return whole_parameters(model), dict(model.named_buffers()), logits


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_parameters_and_buffers_are_the_librarys(ranks: StartRanks, family: str) -> None:
    expected = by_the_library(family)
    head = expected.lm_head.weight
    expected.lm_head.weight = expected.get_input_embeddings().weight  # tied as the other one is
    for parameters, buffers, logits in ranks(3).run(materialized, family):
        assert parameters.keys() == dict(expected.named_parameters()).keys()
        for name, parameter in expected.named_parameters():
            assert torch.equal(parameters[name], parameter), name
        assert buffers.keys() == dict(expected.named_buffers()).keys()
        for name, buffer in expected.named_buffers():
            assert torch.equal(buffers[name], buffer), name
        assert not torch.equal(head, expected.lm_head.weight)
        with torch.no_grad():
            found = expected.eval()(torch.arange(12)[None]).logits
        torch.testing.assert_close(logits, found, rtol=1e-4, atol=1e-5)


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
