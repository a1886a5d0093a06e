"""Tiny models of the families of `transformers`, and how far a rotated one is from one process."""

from importlib import import_module, metadata
from typing import Any

import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.layers.experts import ExpertsRule
from gyre_trainer.layers.linear import EmbeddingRule
from gyre_trainer.rotate import RotationPolicy, rotate_all
from torch import Tensor, nn

from tests.distributed.comparing import apart
from tests.distributed.training import whole

VOCABULARY = 31
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 10, "num_experts": 4}
# The class of the model, without what all causal ones have in common, and its configuration.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("ForCausalLM", SIZES),
    "Qwen2": ("ForCausalLM", SIZES),
    "Qwen3": ("ForCausalLM", SIZES | {"head_dim": 6}),
    "Gemma2": ("ForCausalLM", SIZES | {"head_dim": 6}),
    "Gemma3": ("ForCausalLM", SIZES | {"head_dim": 6}),
    "Phi3": ("ForCausalLM", SIZES),
    "GPTNeoX": ("ForCausalLM", SIZES),
    "Mamba": ("ForCausalLM", SIZES | {"state_size": 4}),
    "Mixtral": ("ForCausalLM", SIZES | {"num_local_experts": 4}),
    "Qwen3Moe": ("ForCausalLM", SIZES | _EXPERTS | {"head_dim": 6}),
    "Olmoe": ("ForCausalLM", SIZES | {"num_experts": 4, "num_experts_per_tok": 1}),
    "GptOss": (
        "ForCausalLM",
        SIZES | {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 6},
    ),
    "GPT2": (
        "LMHeadModel",
        {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 16}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False},
    ),
    "Bert": (
        "ForMaskedLM",
        SIZES
        | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        | {"max_position_embeddings": 16},
    ),
    "T5": (
        "ForConditionalGeneration",
        {"d_model": 16, "d_kv": 4, "d_ff": 20, "num_layers": 1, "num_heads": 4, "use_cache": False}
        | {"vocab_size": VOCABULARY, "dropout_rate": 0.0, "decoder_start_token_id": 0},
    ),
}
RULES: dict[str, Any] = {"Gemma3": {"*.embed_tokens": EmbeddingRule(VOCABULARY, padding_idx=0)}}
if metadata.version("transformers").startswith("4.57."):  # others call experts in another way
    RULES["GptOss"] = {
        "*.experts": ExpertsRule(
            weights=("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"),
            chosen="router_indices",
            scores="routing_weights",
            last=("down_proj", "down_proj_bias"),
        )
    }


def made(family: str, **sizes: Any) -> Any:
    """A tiny model in float64, with biases that are not zero."""
    library: Any = import_module("transformers")  # seconds, for these tests alone
    kind, configured = FAMILIES[family]
    torch.manual_seed(0)
    of = "Text" if family == "Gemma3" else ""  # it also has models that see images
    config = getattr(library, f"{family}{of}Config")(**configured | sizes)
    config._experts_implementation = "eager"  # torch's grouped products refuse float64
    model = getattr(library, family + kind)(config)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model.double()


def _outcome(model: Any, rows: Tensor) -> dict[str, Tensor]:
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def compared(
    families: list[str], *, find_blocks: bool = True, recompute: bool = False, **sizes: Any
) -> dict[str, tuple[float, float, float]]:
    """By family: the share of parameters that rotate, and the distances of loss and gradients."""
    found = {}
    mesh = make_mesh("cpu")
    rows = torch.randint(1, VOCABULARY, (12, 5), generator=torch.Generator().manual_seed(1))
    for family in families:
        expected = _outcome(made(family, **sizes), rows)
        model = made(family, **sizes)
        plan = rotate_all(
            model,
            mesh=mesh,
            rules=None if find_blocks else RULES.get(family),
            find_blocks=find_blocks,
            policy=RotationPolicy(recompute="block" if recompute else "none"),
        )
        rotating = sum(entry.numel for entry in plan.entries if entry.how == "rotated")
        total = sum(entry.numel for entry in plan.entries if entry.how != "local")
        parts = _outcome(model, rows.chunk(mesh.size())[dist.get_rank()])
        dist.all_reduce(parts["loss"])
        parts["loss"] /= mesh.size()
        assert parts.keys() == expected.keys(), family
        errors = {name: apart(parts[name], expected[name]) for name in expected}
        found[family] = rotating / total, errors.pop("loss"), max(errors.values())
    return found
