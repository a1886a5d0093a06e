"""Which blocks of the families of transformers rotate as one, and how much of each rotates."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gyre_trainer.accounting.step_cost import on_fake_ranks
from gyre_trainer.rotate import rotate_all
from torch import nn

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
NO_DROPOUT = dict.fromkeys(
    (
        "dropout",
        "attention_dropout",
        "hidden_dropout",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "residual_dropout",
        "embedding_dropout",
        "dropout_rate",
        "attn_pdrop",
        "resid_pdrop",
        "embd_pdrop",
    ),
    0.0,
)
OTHERS: dict[str, dict[str, Any]] = {
    "GPT2": {"n_embd": 32, "n_head": 4, "n_layer": 2},
    "CodeGen": {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 8},
    "T5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    "UMT5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    "SwitchTransformers": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    | {"num_experts": 2},
    "Pix2StructVision": {"d_kv": 8, "d_ff": 48, "patch_embed_hidden_size": 32},
    "Mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "OPT": {"word_embed_proj_dim": 32, "ffn_dim": 48, "max_position_embeddings": 16},
    "GPTNeo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "Esm": {"position_embedding_type": "rotary", "mask_token_id": 3, "token_dropout": False},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8},
    "Gemma3": {"head_dim": 8},
    "Qwen3": {"head_dim": 8},
    "Mixtral": {"num_local_experts": 4},
    "GptOss": {"num_local_experts": 4, "head_dim": 8},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8},
}
CLASSES = {
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "GPT2": ("GPT2Config", "GPT2LMHeadModel"),
    "Bert": ("BertConfig", "BertForMaskedLM"),
    "Esm": ("EsmConfig", "EsmForMaskedLM"),
    "T5": ("T5Config", "T5ForConditionalGeneration"),
    "UMT5": ("UMT5Config", "UMT5ForConditionalGeneration"),
    "SwitchTransformers": (
        "SwitchTransformersConfig",
        "SwitchTransformersForConditionalGeneration",
    ),
    "Pix2StructVision": ("Pix2StructVisionConfig", "Pix2StructVisionModel"),
}
A, M = "AttentionRule", "MLPRule"
BLOCKS = {A, M, "ExpertsRule", "EmbeddingRule"}
BOTH = {"self_attn": A, "mlp": M}
LISTED = dict.fromkeys("0123", M)  # experts
# What is found on two ranks.
FOUND: dict[str, dict[str, str]] = {
    **dict.fromkeys(
        [
            *("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Phi", "Starcoder2"),
            *("Granite", "Cohere", "StableLm", "Persimmon", "Olmo", "Nemotron"),
        ],
        BOTH,
    ),
    "Gemma3": BOTH | {"embed_tokens": "EmbeddingRule"},
    "GPTNeoX": {"attention": A, "mlp": M},
    "Mixtral": {"self_attn": A} | LISTED,
    "Qwen3Moe": {"self_attn": A} | LISTED,
    "GptOss": {"experts": "ExpertsRule"},
    "Phi3": {},
    "GPT2": {},
    "OPT": {"self_attn": A},
    "Olmo2": {"mlp": M},
    "CodeGen": {"mlp": M},
    "T5": {"SelfAttention": A, "EncDecAttention": A, "DenseReluDense": M},
    "UMT5": {"SelfAttention": A, "EncDecAttention": A, "DenseReluDense": M},
    "Bert": {},  # the last layer is in another module
    "Esm": {},
    "GPTNeo": {"attention": A, "mlp": M},
}
# Its embeddings of positions, of a class of their own, are a twentieth of a model as small as this.
FEW = {"OPT": 0.94}


def on_meta(family: str, dropout: float = 0.0) -> Any:
    import transformers  # seconds, for these tests alone

    library: Any = transformers
    names = CLASSES.get(family, (f"{family}Config", f"{family}ForCausalLM"))
    configure, build = (getattr(library, name) for name in names)
    rates = dict.fromkeys(NO_DROPOUT, dropout)
    config = configure(**SIZES | HEADS | rates | OTHERS.get(family, {}) | {"pad_token_id": 0})
    with torch.device("meta"):
        return build(config)


def blocks_of(family: str, num_ranks: int, dropout: float = 0.0) -> tuple[dict[str, str], float]:
    """The rules of blocks by the last parts of their paths, and the share that rotates."""
    model: nn.Module = on_meta(family, dropout)
    with on_fake_ranks(num_ranks) as mesh:
        plan = rotate_all(model, mesh=mesh, min_numel=0)
    rotates = [entry for entry in plan.entries if entry.how == "rotated"]
    rotating = sum(entry.numel for entry in rotates)
    total = sum(entry.numel for entry in plan.entries if entry.how != "local")
    blocks = {
        each.path.rpartition(".")[2]: each.rule
        for each in rotates
        if each.module_class != "Embedding"  # that of torch is no block
    }
    return {name: rule for name, rule in blocks.items() if rule in BLOCKS}, rotating / total


@pytest.mark.parametrize("family", FOUND)
def test_blocks_of_the_families_rotate_as_one(family: str) -> None:
    blocks, share = blocks_of(family, 2)
    assert blocks == FOUND[family]
    assert share > FEW.get(family, 0.97)


@pytest.mark.parametrize(("num_ranks", "dropout"), [(4, 0.0), (2, 0.1)])
def test_attention_that_slices_cannot_compute_rotates_layer_by_layer(
    num_ranks: int, dropout: float
) -> None:
    """Four ranks cannot share two key/value heads, and each slice would draw its own mask."""
    blocks, share = blocks_of("Llama", num_ranks, dropout)
    assert blocks == {"mlp": M}
    assert share > 0.97


def test_stacked_experts_with_another_kernel_do_not_rotate_as_one() -> None:
    model = on_meta("GptOss")
    model.model.layers[0].mlp.experts.config = SimpleNamespace(_experts_implementation="grouped_mm")
    with on_fake_ranks(2) as mesh:
        plan = rotate_all(model, mesh=mesh, min_numel=0)
    rules = {each.path: each.rule for each in plan.entries if each.path.endswith("experts")}
    assert rules["model.layers.0.mlp.experts"] != "ExpertsRule"
    assert rules["model.layers.1.mlp.experts"] == "ExpertsRule"
    assert "its experts kernel is grouped_mm" in str(plan)
