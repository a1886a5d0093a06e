"""Every family that generates text does so on a rotated model as on the plain one."""

from typing import Any

import pytest
import torch
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.rotate import register_forward_method, rotate_all
from torch import Tensor

from tests.distributed.conftest import StartRanks
from tests.distributed.models.families import FAMILIES, RULES, VOCABULARY, made

GENERATING = [family for family in FAMILIES if family != "Bert"]
# the longest prompt is as long as Mamba's convolution or longer
PROMPT = torch.randint(1, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(2))


def text(model: Any, *, use_cache: bool = True) -> Tensor:
    """The likeliest tokens."""
    tokens: Tensor = model.eval().generate(
        PROMPT, max_new_tokens=6, do_sample=False, use_cache=use_cache, pad_token_id=0
    )
    return tokens


def texts(family: str) -> dict[str, Tensor]:
    """What the rotated model writes: layer by layer with a cache, and in blocks without."""
    mesh, found = make_mesh("cpu"), {}
    for find_blocks in (False, True):
        model = made(family, use_cache=True)
        rules = None if find_blocks else RULES.get(family)
        rotate_all(model, mesh=mesh, rules=rules, find_blocks=find_blocks)
        found["blocks" if find_blocks else "layers"] = text(model, use_cache=not find_blocks)
    return found


def with_a_cache() -> None:
    model = made("Llama", use_cache=True)
    rotate_all(model, mesh=make_mesh("cpu"))
    assert model(input_ids=PROMPT).past_key_values is None  # as in training
    with pytest.raises(RotationError, match=r"called with a DynamicCache.*use_cache=False"):
        text(model)
    register_forward_method(model, "get_input_embeddings")  # which takes no use_cache
    assert model.get_input_embeddings() is model.model.embed_tokens


def test_blocks_make_no_cache_by_default_and_refuse_one(ranks: StartRanks) -> None:
    ranks(2).run(with_a_cache)


@pytest.mark.parametrize("family", GENERATING)
def test_a_family_generates_what_its_plain_model_does(ranks: StartRanks, family: str) -> None:
    expected = text(made(family, use_cache=True))
    assert expected.shape[1] > 1, "something was generated"
    for found in ranks(2).run(texts, family):
        for way, tokens in found.items():
            assert torch.equal(tokens, expected), way
