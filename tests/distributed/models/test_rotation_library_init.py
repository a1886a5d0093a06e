"""Transformers' models that are built on `meta` get the values of their own `_init_weights`."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.rotate import materialize, rotate_all
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.distributed.conftest import StartRanks
from tests.distributed.models.families import FAMILIES, VOCABULARY
from tests.distributed.training import default_dtype, whole_parameters

SEED = 5
_ENCODER = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "pad_token_id": 1}
_VIT = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "image_size": 8}
# Families whose embeddings keep no configuration, one that keeps tensors that are no buffers, one
# that replaces the data of parameters, and one that ties three embeddings in its constructor.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Roberta": ("ForMaskedLM", FAMILIES["Bert"][1] | {"pad_token_id": 1}),
    "DistilBert": (
        "ForMaskedLM",
        _ENCODER | {"dim": 16, "hidden_dim": 20, "n_layers": 1, "n_heads": 4},
    ),
    "CodeGen": (
        "ForCausalLM",
        {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 4, "rotary_dim": 4},
    ),
    "ViT": ("ForImageClassification", _VIT | {"patch_size": 4, "num_attention_heads": 4}),
}
ALL = FAMILIES | OTHERS


def made(family: str, *, half: bool = False) -> Any:
    """A tiny model as the library makes it, with its default layers' own values."""
    import transformers  # seconds, for these tests alone

    library: Any = transformers
    kind, sizes = ALL[family]
    of = "Text" if family == "Gemma3" else ""  # it also has models that see images
    config = getattr(library, f"{family}{of}Config")(**sizes)
    with default_dtype(torch.bfloat16 if half else torch.float32):
        return getattr(library, family + kind)(config)


def by_the_library(family: str, *, half: bool = False) -> Any:
    """The model in one process: the library initialises it, and then ties what is tied."""
    from transformers.modeling_utils import no_init_weights

    with no_init_weights():
        model = made(family, half=half)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    torch.manual_seed(SEED)
    model.init_weights()
    return model


def output_of(family: str, model: Any) -> Tensor:
    tokens = torch.arange(2, 12)[None]
    arguments: dict[str, Tensor] = {"input_ids": tokens}
    if family == "ViT":
        arguments = {"pixel_values": torch.linspace(-1, 1, 192).view(1, 3, 8, 8)}
    if family == "T5":
        arguments["decoder_input_ids"] = tokens
    with torch.no_grad():
        logits: Tensor = model.eval()(**arguments).logits
    return logits


Values = tuple[dict[str, Tensor], dict[str, Tensor], Tensor]


def materialized(sizes: range) -> dict[str, list[Values]]:
    """By family: parameters, buffers and logits, on the rings of the first ranks with this one."""
    found: dict[str, list[Values]] = {}
    for size in sizes:
        group = dist.new_group(range(size))
        if dist.get_rank() >= size:
            continue
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("rotate",))
        for family in ALL:
            with torch.device("meta"):
                model = made(family)
            rotate_all(model, mesh=mesh, independent=True)
            state = torch.get_rng_state()
            materialize(model, seed=SEED)
            assert torch.equal(torch.get_rng_state(), state)
            buffers = dict(model.named_buffers())
            values = whole_parameters(model), buffers, output_of(family, model)
            found.setdefault(family, []).append(values)
    return found


@pytest.mark.parametrize("smallest", [pytest.param(1, marks=pytest.mark.models), 2])
def test_parameters_and_buffers_are_the_librarys_on_rings_of_up_to_three(
    ranks: StartRanks, smallest: int
) -> None:
    outcomes = ranks(3).run(materialized, range(smallest, 4))
    num_rings = [4 - max(smallest, rank + 1) for rank in range(3)]
    assert [len(outcome["Bert"]) for outcome in outcomes] == num_rings
    for family in ALL:
        expected = by_the_library(family)
        for parameters, buffers, output in (each for rank in outcomes for each in rank[family]):
            require_equal(family, parameters, dict(expected.named_parameters()))
            require_equal(family, buffers, dict(expected.named_buffers()))
            torch.testing.assert_close(
                output, output_of(family, expected), rtol=1e-4, atol=1e-5, msg=family
            )


def require_equal(family: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys(), family
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"{family}: {name}"


class Draws(nn.Module):
    """Draws by functions of torch that do nothing to tensors on `meta`, or write to `out`."""

    def __init__(self) -> None:
        super().__init__()
        self.square, self.kernel = nn.Linear(4, 4), nn.Conv1d(4, 4, 3)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Conv1d):
            nn.init.dirac_(module.weight)
            assert module.bias is not None
            nn.init.trunc_normal_(module.bias)
        elif isinstance(module, nn.Linear):
            nn.init.eye_(module.weight)
            nn.init.zeros_(module.bias)
        else:
            nn.init.orthogonal_(self.square.weight)
