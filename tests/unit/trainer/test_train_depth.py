"""What a deep model's step costs follows from a few of its layers."""

from typing import Any

import pytest
import torch
from gyre_trainer.accounting.baselines import Strategy
from gyre_trainer.accounting.counters import Category
from gyre_trainer.accounting.plan import modules_of
from gyre_trainer.accounting.step_cost import (
    StepCost,
    dry_run,
    layer_kinds,
    step_costs,
)
from gyre_trainer.errors import ConfigError
from gyre_trainer.training.build import plain
from gyre_trainer.training.config import TrainConfig, build

GPT = {
    "vocab_size": 128,
    "num_layers": 6,
    "dim": 32,
    "num_heads": 2,
    "num_kv_heads": 2,
    "hidden_dim": 64,
    "max_seq_len": 16,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 128,
    "num_hidden_layers": 6,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def config(model: dict[str, Any], *, recompute: str = "none") -> TrainConfig:
    sections = {
        "run": {"out": "nowhere", "steps": 9},
        "data": {"dataset": "none", "batch_size": 4, "sequence_length": 16},
        "model": model,
        "memory": {"recompute": recompute, "min_numel": 0},
    }
    return build(TrainConfig, sections, "")


def told(settings: TrainConfig, strategy: Strategy, num_ranks: int) -> StepCost:
    """The cost of a step, from a few layers."""
    (cost,) = step_costs([(settings, strategy, num_ranks)])
    return cost


def kinds_of(settings: TrainConfig) -> tuple[int, int]:
    with torch.device("meta"):
        return layer_kinds(plain(settings.model))


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize(
    "settings",
    [config(GPT), config({"config": LLAMA}, recompute="block")],
    ids=["a GPT", "of transformers, recomputing"],
)
def test_few_layers_tell_what_six_cost(settings: TrainConfig, strategy: Strategy) -> None:
    of_few, counted = told(settings, strategy, 2), dry_run(settings, strategy, 2)
    assert of_few.sent_bytes == counted.sent_bytes
    assert of_few.operations == counted.operations
    assert of_few.num_operators == counted.num_operators
    assert of_few.peak_bytes == counted.peak_bytes


def test_a_step_has_six_operations_for_each_token_and_weight_of_a_matrix() -> None:
    (alone,) = {told(config(GPT), each, 1).operations for each in Strategy}
    matrices = 6 * (4 * 32 * 32 + 3 * 32 * 64)
    head_again = 128 * 32  # computes its logits again in backward
    scores = 6 * 7 * 2 * 16 * 32  # of each token; queries with keys, and their gradients
    per_token = 6 * (matrices + 128 * 32) + 2 * head_again + scores
    assert alone == per_token * 4 * 16


def test_frozen_weights_have_no_gradients_and_no_states() -> None:
    adapted = config({"config": LLAMA, "lora": {"rank": 2}})
    of_few, counted = told(adapted, Strategy.GYRE, 2), dry_run(adapted, Strategy.GYRE, 2)
    at_peak = of_few.timeline.peak()
    assert (at_peak, of_few.sent_bytes) == (counted.timeline.peak(), counted.sent_bytes)
    num_matrices = 6 * 2 * 2  # A and B, of queries and values
    numel = num_matrices * 2 * 32
    assert at_peak[Category.OPTIMIZER] == 8 * numel + 4 * num_matrices  # and steps
    assert at_peak[Category.GRADIENTS] <= 4 * numel
    plan, _ = modules_of(adapted, 2)
    of_queries = [each for each in plan.entries if "q_proj.lora_A" in each.path]
    assert [each.how for each in of_queries] == ["replicated"] * 6


def test_layers_that_differ_are_not_alike() -> None:
    mixed = LLAMA | {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [0],
        "head_dim": 16,
    }
    assert kinds_of(config({"config": LLAMA})) == (0, 6)
    assert kinds_of(config({"config": mixed})) == (1, 5)
    mixed["mlp_only_layers"] = [0, 2, 4]
    assert kinds_of(config({"config": mixed})) == (5, 1)


def test_a_model_whose_shapes_depend_on_unknown_values_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experts = LLAMA | {"model_type": "mixtral", "num_local_experts": 2, "num_hidden_layers": 1}
    same = "gyre_trainer.accounting.step_cost._even_choices"
    monkeypatch.setattr(same, lambda chosen, *_: chosen)  # not known
    with pytest.raises(ConfigError, match="which experts they choose, so it cannot be planned"):
        dry_run(config({"config": experts}), Strategy.GYRE, 2)


def test_the_first_step_that_fails_says_why() -> None:
    odd = [(config(GPT), Strategy.DDP, num_ranks) for num_ranks in (3, 5)]
    with pytest.raises(ConfigError, match="multiple of 3"):
        step_costs(odd)


TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
# Next to a tower of images with as many layers.
TOWER = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 5, "image_size": 28}
NESTED = {"text_config": TEXT | {"head_dim": 8}, "vision_config": TOWER}


def test_a_configuration_of_several_parts_is_planned() -> None:
    settings = config({"config": {"model_type": "gemma3"} | NESTED})
    assert kinds_of(settings) == (0, 5)
    assert told(settings, Strategy.GYRE, 2).sent_bytes > 0


def test_scaled_rotary_positions_are_planned() -> None:
    """Their factors are made by `torch.tensor`, while the model is made on `meta`."""
    factors = [1.0] * 8  # one for each pair of channels of a head
    scaling = {"type": "longrope", "short_factor": factors, "long_factor": factors}
    keys = {"num_hidden_layers": 1, "pad_token_id": 0, "rope_scaling": scaling}
    model = {"model_type": "phi3", "original_max_position_embeddings": 8, **TEXT, **keys}
    assert dry_run(config({"config": model}), Strategy.GYRE, 2).sent_bytes > 0


def test_a_model_that_fails_by_itself_is_no_error_of_the_plan() -> None:
    model = {"config": LLAMA | {"num_attention_heads": 4, "num_key_value_heads": 3}}
    with pytest.raises(
        ConfigError, match=r"LlamaForCausalLM of this configuration fails by itself"
    ):
        told(config(model), Strategy.DDP, 2)


def test_an_unknown_family_is_named_without_all_others() -> None:
    with pytest.raises(ConfigError, match=r"transformers [\d.]+ has no `model_type` 'llama5'$"):
        kinds_of(config({"config": {"model_type": "llama5"}}))
