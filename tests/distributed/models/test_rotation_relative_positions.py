"""Attention with positions of each head, as DeBERTa-v2's and Swin's, rotates exactly."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.rotate import RotationPolicy, rotate_all
from gyre_trainer.rotation.rule import Rule
from torch import Tensor, nn

from tests.distributed.comparing import apart
from tests.distributed.conftest import StartRanks
from tests.distributed.training import whole

KEPT, RECOMPUTED = RotationPolicy(), RotationPolicy(recompute="block")
OF_TEXT: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 20,
    "relative_attention": True,
    "position_buckets": 4,
    "pos_att_type": ["c2p", "p2c"],
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
# Every second layer has its windows shifted, and gets a mask for each window.
OF_IMAGES: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 24,
    "depths": [2, 2],
    "num_heads": [6, 6],
    "window_size": 4,
    "drop_path_rate": 0.0,
    "num_labels": 5,
}
# The class, and what its configuration has.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "DeBERTa-v2": ("DebertaV2ForMaskedLM", OF_TEXT | {"share_att_key": True}),
    "DeBERTa-v2, own keys": ("DebertaV2ForMaskedLM", OF_TEXT | {"share_att_key": False}),
    "Swin": ("SwinForImageClassification", OF_IMAGES),
}


def made(family: str, **sizes: Any) -> Any:
    """A tiny model in float64, whose biases are not zero."""
    import transformers  # seconds, for these tests alone

    kind, keys = FAMILIES[family]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # DeBERTa's module has scripts
        build: Any = getattr(transformers, kind)
    torch.manual_seed(0)
    model = build(build.config_class(**keys | sizes)).double()
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model


def inputs_of(model: Any) -> dict[str, Tensor]:
    """Twelve samples, with padding where the model takes it."""
    generator = torch.Generator().manual_seed(1)
    if hasattr(model.config, "image_size"):
        pixels = torch.randn(12, 3, 16, 16, dtype=torch.float64, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(5, (12,), generator=generator)}
    rows = torch.randint(1, 31, (12, 6), generator=generator)
    mask = torch.ones_like(rows)
    mask[::2, 4:] = 0
    return {"input_ids": rows, "attention_mask": mask, "labels": rows}


def outcome(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Losses and gradients of two steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    found = {}
    for step in range(2):
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        found |= {
            f"{step} {name}": whole(each.grad)
            for name, each in model.named_parameters()
            if each.grad is not None
        }
        optimizer.step()
    return found


def off(family: str, policy: RotationPolicy, num_heads: int) -> float:
    """How far from one process's all is."""
    is_image = family == "Swin"
    heads = {"num_heads": [num_heads] * 2} if is_image else {"num_attention_heads": num_heads}
    expected = outcome(made(family, **heads), inputs_of(made(family, **heads)))
    model = made(family, **heads)
    # the encoder reads this embedding's weight, and never calls it
    rules: dict[type[nn.Module] | str, Rule | None] = {}
    if not is_image:
        rules["*.rel_embeddings"] = None
    rotate_all(model, mesh=make_mesh("cpu"), policy=policy, rules=rules)
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = outcome(model, {k: v.chunk(size)[rank] for k, v in inputs_of(model).items()})
    for name in ("loss 0", "loss 1"):
        dist.all_reduce(parts[name])
        parts[name] /= size
    # labels of padding count as much, so each rank's mean has the same weight
    assert parts.keys() == expected.keys()
    return max(apart(parts[name], expected[name]) for name in expected)


def require_exact(ranks: Any, family: str, policy: RotationPolicy, num_heads: int = 6) -> None:
    for distance in ranks.run(off, family, policy, num_heads):
        assert distance <= 1e-10


@pytest.mark.parametrize(
    ("num_ranks", "policy", "family"),
    [
        (2, KEPT, "DeBERTa-v2"),
        (2, KEPT, "Swin"),
        (3, RECOMPUTED, "DeBERTa-v2, own keys"),
        pytest.param(3, RECOMPUTED, "Swin", marks=pytest.mark.models),
    ],
)
def test_families_train_exactly(
    ranks: StartRanks, num_ranks: int, policy: RotationPolicy, family: str
) -> None:
    require_exact(ranks(num_ranks), family, policy)
