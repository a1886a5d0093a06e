"""Blocks whose last layer lies in another module, as BERT's: models of them are exact."""

import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch.distributed as dist
import torch.nn.functional as F
from gyre_trainer import pretrained
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.rotate import RotationPolicy, rotate_all
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from tests.distributed.comparing import apart
from tests.distributed.conftest import StartRanks
from tests.distributed.models.split_models import (
    BLOCKS,
    MODELS,
    MORE,
    OF_ROWS,
    POLICIES,
    SIZES,
    as_is,
    inputs_of,
    made,
    mine,
    outcome,
    trained,
)
from tests.distributed.training import whole


def compared(family: str, policy: RotationPolicy, **sizes: Any) -> tuple[set[str], float]:
    """The rules of what has more than a weight and a bias; how far from one process it is."""
    expected = trained(made(family, **sizes), rotates=False)
    model = made(family, **sizes)
    plan = rotate_all(model, mesh=make_mesh("cpu"), policy=policy)
    found = trained(model, rotates=True)
    assert found.keys() == expected.keys()
    rules = {each.rule for each in plan.entries if each.rule and len(each.names) > 2}
    return rules, max(apart(found[name], expected[name]) for name in expected)


def require_exact(ranks: Any, family: str, policy: RotationPolicy) -> None:
    for rules, off in ranks.run(compared, family, policy):
        assert rules == BLOCKS
        assert off <= 1e-11


@pytest.mark.parametrize("family", MODELS)
def test_models_train_exactly(ranks: StartRanks, family: str) -> None:
    require_exact(ranks(2), family, POLICIES["recompute"])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_trains_exactly_on_three(ranks: StartRanks, policy: str) -> None:
    require_exact(ranks(3), "Bert", POLICIES[policy])


@pytest.mark.models
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("family", MODELS | MORE)
def test_more_models_train_exactly(ranks: StartRanks, family: str, num_ranks: int) -> None:
    for policy in POLICIES.values():
        require_exact(ranks(num_ranks), family, policy)


# What changes how a block is called: chunks of tokens, returned scores, masks of heads.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chunks": ({"chunk_size_feed_forward": 2}, {}),
    "scores": ({"attn_implementation": "eager"}, {"output_attentions": True}),
    "heads": ({}, {"head_mask": torch.linspace(0.5, 1, 12, dtype=torch.float64).view(2, 6)}),
}


def called_in_ways(policy: RotationPolicy) -> dict[str, float]:
    found: dict[str, float] = {}
    for way, (sizes, arguments) in WAYS.items():
        expected = outcome(made("Bert", **sizes), as_is, **arguments)
        model = made("Bert", **sizes)
        rotate_all(model, mesh=make_mesh("cpu"), policy=policy)
        for copied in (model, deepcopy(model)):
            parts = outcome(copied, mine, **arguments)
            assert parts.keys() == expected.keys()
            off = {
                name: apart(each, (mine if name.startswith(OF_ROWS) else as_is)(expected[name]))
                for name, each in parts.items()
            }
            found[way] = max(found.get(way, 0.0), *off.values())
    return found


@pytest.mark.parametrize("policy", [pytest.param("plain", marks=pytest.mark.models), "layers"])
def test_chunks_scores_and_masks_of_heads_are_exact(ranks: StartRanks, policy: str) -> None:
    for found in ranks(2).run(called_in_ways, POLICIES[policy]):
        assert found.keys() == WAYS.keys()
        assert all(off <= 1e-12 for off in found.values()), found


def compiled_slices() -> tuple[float, list[int]]:
    """How far a model whose slices are compiled is from one process's; graphs after each step."""
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    policy = RotationPolicy(compiler="aot_eager", recompute="block")
    expected = outcome(made("Bert"), as_is)
    model, num_graphs = made("Bert"), []
    rotate_all(model, mesh=make_mesh("cpu"), policy=policy)
    # else what has no room for another graph runs as it is
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for _ in range(2):
            model.zero_grad()
            found = outcome(model, mine)
            num_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        off = max(apart(found[name], expected[name]) for name in expected if "." in name)
        model.eval()
        outcome(model, mine)
    return off, num_graphs


def test_each_kind_of_split_block_has_graphs_of_its_own(ranks: StartRanks) -> None:
    for off, num_graphs in ranks(2).run(compiled_slices):
        assert off <= 1e-12
        assert num_graphs == [6, 6]  # attention, MLP and head, with gradients and without


def decoded() -> tuple[set[str], float, bool]:
    """The rules of a decoder that attends to a source; its gradients; whether texts are equal."""
    import transformers

    models: list[Any] = []
    library: Any = transformers
    sizes: dict[str, Any] = SIZES | {"is_decoder": True, "add_cross_attention": True}
    config = library.BertConfig(**sizes, bos_token_id=1, eos_token_id=2)
    for _ in range(2):
        torch.manual_seed(0)
        models.append(library.BertLMHeadModel(config).double())
    plan = rotate_all(models[0], mesh=make_mesh("cpu"), policy=POLICIES["recompute"])
    source = torch.randn(12, 3, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    results, texts = [], []
    for model, part in zip(models, (mine, as_is), strict=True):
        rows = part(inputs_of(model)["input_ids"])
        states: dict[str, Any] = {"encoder_hidden_states": part(source)}
        logits = model(input_ids=rows, use_cache=False, **states).logits
        loss: Any = F.cross_entropy(logits.flatten(0, 1), rows.flatten())
        loss.backward()
        results.append({name: whole(p.grad) for name, p in model.named_parameters()})
        model.eval()
        states = {"encoder_hidden_states": source[:2]}
        texts.append(model.generate(torch.full((2, 1), 1), max_new_tokens=6, **states).tolist())
    off = max(apart(each, results[1][name]) for name, each in results[0].items())
    paths = {each.path.rpartition(".")[2] for each in plan.entries if each.rule}
    return paths, off, texts[0] == texts[1]


def test_a_decoder_attends_to_a_source_and_generates(ranks: StartRanks) -> None:
    for paths, off, same in ranks(2).run(decoded):
        assert {"attention", "crossattention"} <= paths
        assert off <= 1e-12
        assert same


def passed_through(folder: str) -> set[str]:
    """Names of parameters whose values are others after files and other ranks."""
    mesh = make_mesh("cpu")
    model = made("Bert")
    expected = model.state_dict()
    rotate_all(model, mesh=mesh)
    pretrained.save_pretrained(model, folder)
    with torch.device("meta"):
        again = made("Bert")
    rotate_all(again, mesh=mesh)
    pretrained.load(again, folder)
    state: dict[str, Any] = get_model_state_dict(
        again, options=StateDictOptions(full_state_dict=True)
    )
    if dist.get_rank():
        return set()
    assert state.keys() == expected.keys()
    return {name for name, each in expected.items() if not torch.equal(each, state[name])}


def test_weights_are_written_and_read_bit_by_bit(ranks: StartRanks, tmp_path: Path) -> None:
    import transformers

    assert not any(ranks(2).run(passed_through, str(tmp_path)))
    read = transformers.BertForMaskedLM.from_pretrained(tmp_path, dtype=torch.float64).state_dict()
    expected = made("Bert").state_dict()
    assert all(torch.equal(each, read[name]) for name, each in expected.items())
