"""Tiny models whose blocks have their last layers in other modules, and what they compute."""

from typing import Any

import torch
import torch.distributed as dist
from gyre_trainer.rotate import RotationPolicy
from torch import Tensor, nn

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
    "recompute": RotationPolicy(recompute="block"),
    "layers": RotationPolicy(recompute="layer"),
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
