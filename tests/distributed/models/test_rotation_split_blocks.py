"""Blocks whose last layer lies in another module, as BERT's: found, exact, guarded."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gyre_trainer import pretrained
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.layers.attention import AttentionRule
from gyre_trainer.layers.found.finder import block_rules
from gyre_trainer.layers.found.split import find_split_rule
from gyre_trainer.layers.mlp import MLPRule
from gyre_trainer.rotate import RotationPolicy, rotate, rotate_all
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from tests.distributed.comparing import apart
from tests.distributed.conftest import StartEither, StartRanks
from tests.distributed.training import whole

SIZES = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 20,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
}
IMAGES = {"image_size": 8, "patch_size": 4, "num_labels": 5}
# The class, and what its configuration has beside `SIZES`.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("ForMaskedLM", {}),
    "Roberta": ("ForMaskedLM", {}),
    "ViT": ("ForImageClassification", IMAGES),
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "Electra": ("ForMaskedLM", {"embedding_size": 24}),
    "Camembert": ("ForMaskedLM", {}),
    "XLMRoberta": ("ForMaskedLM", {}),
    "RobertaPreLayerNorm": ("ForMaskedLM", {}),
    "Data2VecText": ("ForMaskedLM", {}),
    "Ernie": ("ForMaskedLM", {}),
    "DeiT": ("ForImageClassification", IMAGES),
    "Beit": ("ForImageClassification", IMAGES | {"drop_path_rate": 0.0}),
    "Dinov2": ("ForImageClassification", IMAGES | {"drop_path_rate": 0.0}),
}
BLOCKS = {"AttentionRule", "MLPRule"}
POLICIES = {
    "plain": RotationPolicy(),
    "recompute": RotationPolicy(recompute=True),
    "layers": RotationPolicy(recompute=True, recompute_layers=True),
}
NUM_STEPS = 3


def made(family: str, **sizes: Any) -> Any:
    """A tiny model in float64, without rotation."""
    import transformers  # seconds, for these tests alone

    library: Any = transformers
    kind, own = (MODELS | MORE)[family]
    torch.manual_seed(0)
    config = getattr(library, f"{family}Config")(**SIZES | own | sizes)
    model = getattr(library, family + kind)(config).double()
    for parameter in model.parameters():
        if not parameter.is_meta and not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model


def inputs_of(model: Any, step: int = 0) -> dict[str, Tensor]:
    """Twelve samples, with padding where the model takes it."""
    generator = torch.Generator().manual_seed(step)
    if hasattr(model.config, "image_size"):
        pixels = torch.randn(12, 3, 8, 8, dtype=torch.float64, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(5, (12,), generator=generator)}
    rows = torch.randint(1, 31, (12, 6), generator=generator)
    mask = torch.ones_like(rows)
    mask[::2, 4:] = 0
    return {"input_ids": rows, "attention_mask": mask, "labels": rows}


def trained(model: Any, *, rotates: bool) -> dict[str, Tensor]:
    """Parameters and the sum of losses after steps of AdamW, and an evaluation's outputs."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    total = torch.zeros((), dtype=torch.float64)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        inputs = inputs_of(model, step)
        if rotates:
            rank, size = dist.get_rank(), dist.get_world_size()
            inputs = {name: each.chunk(size)[rank] for name, each in inputs.items()}
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        total += loss.detach()
    found = {name: whole(each.detach()) for name, each in model.named_parameters()}
    if rotates:
        dist.all_reduce(total)
        total /= dist.get_world_size()
    model.eval()
    with torch.no_grad():
        found["logits"] = model(**inputs_of(model)).logits
    return found | {"loss": total}


def compared(family: str, policy: RotationPolicy, **sizes: Any) -> tuple[set[str], float]:
    """The rules of what has more than a weight and a bias; how far from one process it is."""
    expected = trained(made(family, **sizes), rotates=False)
    model = made(family, **sizes)
    plan = rotate_all(model, mesh=make_mesh("cpu"), policy=policy)
    found = trained(model, rotates=True)
    assert found.keys() == expected.keys()
    rules = {each.rule for each in plan.entries if len(each.names) > 2}
    return rules, max(apart(found[name], expected[name]) for name in expected)


def require_exact(ranks: Any, *args: Any) -> None:
    for rules, off in ranks.run(compared, *args):
        assert rules == BLOCKS
        assert off <= 1e-11


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", MODELS)
def test_models_train_exactly(ranks: StartRanks, family: str, policy: str) -> None:
    require_exact(ranks(2), family, POLICIES[policy])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_trains_exactly_on_three(ranks_both_ways: StartEither, policy: str) -> None:
    require_exact(ranks_both_ways(3), "Bert", POLICIES[policy])


@pytest.mark.models
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("family", MODELS | MORE)
def test_more_models_train_exactly(
    ranks_both_ways: StartEither, family: str, num_ranks: int
) -> None:
    for policy in POLICIES.values():
        require_exact(ranks_both_ways(num_ranks), family, policy)


# What changes how a block is called: chunks of tokens, returned scores, masks of heads.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chunks": ({"chunk_size_feed_forward": 2}, {}),
    "scores": ({"attn_implementation": "eager"}, {"output_attentions": True}),
    "heads": ({}, {"head_mask": torch.linspace(0.5, 1, 12, dtype=torch.float64).view(2, 6)}),
}


OF_ROWS = "logits", "scores"  # what each rank has for its own rows alone


def outcome(model: Any, part: Any, **arguments: Any) -> dict[str, Tensor]:
    inputs = {name: part(each) for name, each in inputs_of(model).items()}
    output = model(**inputs, **arguments)
    output.loss.backward()
    grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    scores = {
        f"scores {place}": each.detach()
        for place, each in enumerate(output.get("attentions") or ())
    }
    return grads | scores | {"logits": output.logits.detach()}


def as_is(tensor: Tensor) -> Tensor:
    return tensor


def mine(tensor: Tensor) -> Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


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


@pytest.mark.parametrize("policy", ["plain", "layers"])
def test_chunks_scores_and_masks_of_heads_are_exact(ranks: StartRanks, policy: str) -> None:
    for found in ranks(2).run(called_in_ways, POLICIES[policy]):
        assert found.keys() == WAYS.keys()
        assert all(off <= 1e-12 for off in found.values()), found


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


class First(nn.Module):
    """The core of an MLP."""

    def __init__(self, hidden: int = 12) -> None:
        super().__init__()
        self.up = nn.Linear(8, hidden)

    def forward(self, x: Tensor) -> Any:
        """The hidden width."""
        return self.up(x).relu()


class Second(nn.Module):
    """The last layer, and what comes after it."""

    def __init__(self, hidden: int = 12) -> None:
        super().__init__()
        self.down = nn.Linear(hidden, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, hidden: Tensor, x: Tensor) -> Any:
        """The output, with a residual."""
        return self.norm(self.down(hidden) + x)


class Layer(nn.Module):
    """A layer as BERT has it; the number of hidden features may be that of the input."""

    def __init__(self, hidden: int = 12) -> None:
        super().__init__()
        self.first, self.second = First(hidden), Second(hidden)
        self.scale = nn.Parameter(torch.ones(8))  # a small one of its own

    def forward(self, x: Tensor) -> Any:
        """The output."""
        return self.second(self.first(x), x) * self.scale


class Unfed(Layer):
    """The second module is given something else than the first one returns."""

    def forward(self, x: Tensor) -> Any:
        """The output."""
        return self.second(x, self.first(x))


class Between(Layer):
    """There is a function between the first module and the last layer."""

    def forward(self, x: Tensor) -> Any:
        """The output."""
        return self.second(self.first(x).exp(), x)


class Twice(Layer):
    """What the first module returns is used once more."""

    def forward(self, x: Tensor) -> Any:
        """The output."""
        hidden = self.first(x)
        return self.second(hidden, x) + hidden.mean()


class Returned(Layer):
    """What the first module returns is returned, too."""

    def forward(self, x: Tensor) -> Any:
        """The output, and the hidden activations."""
        hidden = self.first(x)
        return self.second(hidden, x), hidden


class InTraining(Layer):
    """The first module is used in training alone."""

    def forward(self, x: Tensor) -> Any:
        """The output."""
        return self.second(self.first(x) if self.training else x, x)


class Others(Layer):
    """The last layer is called with something else, too, and its weight is read."""

    def forward(self, x: Tensor) -> Any:
        """The output."""
        y = super().forward(x)
        other = self.second.down(y.repeat(1, 1, 2)[..., :12])
        return y + other * self.second.down.weight.square().mean()


def test_only_what_the_first_module_feeds_is_a_block() -> None:
    rule = MLPRule(ups=("first.up",), down="second.down", core="first")
    assert find_split_rule(Layer(), 2) == rule
    assert find_split_rule(Others(), 2) == rule
    for other in (Unfed(8), Between(), Twice(), Returned(), InTraining(8)):
        assert find_split_rule(other, 2) is None, type(other).__name__
    assert list(block_rules(nn.Sequential(Layer()), 2)) == ["0"]
    assert not block_rules(Layer(), 2)  # no item of a list: its parts may be called by others


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model(x).square().mean().backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def used_otherwise() -> tuple[float, list[str]]:
    """How far a model is off that uses its last layers otherwise, too; what is refused, and how."""
    x = torch.randn(6, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(Others(), Layer()).double())
    model: Any = models[0]
    plan = rotate_all(model, mesh=make_mesh("cpu"), policy=POLICIES["recompute"])
    assert [each.rule for each in plan.entries if each.rule] == ["MLPRule"] * 2
    off = gradients(model, mine(x)), gradients(models[1], x)
    told = []
    core: Any = model[0].first
    for use in (
        lambda _module, _args, output: output + 1,
        lambda _module, _args, output: 1 + output,
        lambda _module, _args, output: output.shape,
        lambda _module, _args, output: torch.relu(output),
    ):
        with core.register_forward_hook(use), pytest.raises(RotationError) as error:
            model(mine(x))
        told.append(str(error.value))
    return max(apart(each, off[1][name]) for name, each in off[0].items()), told


def test_a_last_layer_may_be_called_otherwise_but_a_core_may_not(ranks: StartRanks) -> None:
    for off, told in ranks(2).run(used_otherwise):
        assert off <= 1e-12
        assert all("the input of a block's last layer does not exist" in each for each in told)


def by_hand() -> float:
    """How far a model is off whose blocks are named."""
    expected = outcome(made("Bert"), as_is)
    model = made("Bert")
    names = ("self.query", "self.key", "self.value")
    counts = ("num_attention_heads", "all_head_size")
    attention = AttentionRule(6, names, "output.dense", counts=counts, core="self")
    mlp = MLPRule(ups=("intermediate.dense",), down="output.dense", core="intermediate")
    mesh = make_mesh("cpu")
    for layer in model.bert.encoder.layer:
        rotate(layer, mesh=mesh, rule=mlp)  # the attention inside may come afterwards
        rotate(layer.attention, mesh=mesh, rule=attention)
    rotate_all(model, mesh=mesh, find_blocks=False)
    found = outcome(model, mine)
    found["logits"], expected["logits"] = found["logits"], mine(expected["logits"])
    return max(apart(found[name], expected[name]) for name in expected)


def refused() -> list[str]:
    """Why rules are refused."""
    told = []
    for rule in (
        MLPRule(ups=("first.up",), down="second.down", core="third"),
        MLPRule(ups=("first.up",), down="second.norm", core="first"),
        MLPRule(ups=("first.up",), down="first.up", core="first"),
    ):
        with pytest.raises(RotationError) as error:
            rotate(Layer(), mesh=make_mesh("cpu"), rule=rule)
        told.append(str(error.value))
    return told


def test_rules_by_hand_name_a_core(ranks: StartRanks) -> None:
    for off in ranks(2).run(by_hand):
        assert off <= 1e-12
    for told in ranks(2).run(refused):
        assert "Layer has no module third" in told[0]
        assert "Layer.second.norm is LayerNorm, but the rule needs a Linear there" in told[1]
        assert "Layer.first.up is inside of the core first" in told[2]
