"""A head that computes for the targets that count alone has the same loss and gradients."""

import pytest
import torch
import transformers
from gyre_trainer.accounting.counters import Counters
from gyre_trainer.layers.causal_loss import causal_loss
from gyre_trainer.training.build import loss_of, plain
from gyre_trainer.training.gpt import GPTConfig
from gyre_trainer.training.library import LibraryConfig
from gyre_trainer.training.losses import places_of_counted, weighted_cross_entropy
from torch import Tensor, nn
from torch.nn import functional as F

NUM_ROWS, LENGTH, WIDTH, NUM_CLASSES = 3, 11, 5, 7


def outcome(loss: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, tensors)]


@pytest.mark.parametrize("num_counted", [1, 2, 5, 30, 33])
def test_targets_without_a_weight_are_left_out(num_counted: int) -> None:
    torch.manual_seed(num_counted)
    head = nn.Linear(WIDTH, NUM_CLASSES).double()
    x = torch.randn(NUM_ROWS, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(NUM_CLASSES, (NUM_ROWS, LENGTH))
    weights = torch.zeros(NUM_ROWS * LENGTH, dtype=torch.float64)
    weights[torch.randperm(len(weights))[:num_counted]] = 0.5 + torch.rand(num_counted).double()
    weights = weights.view(NUM_ROWS, LENGTH)
    losses = F.cross_entropy(head(x).flatten(0, 1), targets.flatten(), reduction="none")
    loss = (losses * weights.flatten()).sum() / weights.sum()
    expected = outcome(loss, x, head.weight, head.bias)
    found = outcome(weighted_cross_entropy(head, x, targets, weights), x, head.weight, head.bias)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)

    places = places_of_counted(weights.flatten())
    assert len(places) == min(33, -(-num_counted // 3) * 3), "sixteenths of 33 have 3 targets"
    assert len(set(places.tolist())) == len(places)
    assert weights.flatten()[places].count_nonzero() == num_counted


MODELS: dict[str, GPTConfig | LibraryConfig] = {
    "gpt": GPTConfig(
        vocab_size=50,
        num_layers=1,
        dim=8,
        num_heads=1,
        num_kv_heads=1,
        hidden_dim=8,
        max_seq_len=16,
    ),
    "bert": LibraryConfig(
        config={"model_type": "bert", "vocab_size": 50, "hidden_size": 8, "intermediate_size": 8}
        | {"is_decoder": True}
        | {"num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 16}
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_head_computes_for_the_targets_that_count(name: str) -> None:
    loss = loss_of(plain(MODELS[name]))
    tokens = torch.randint(50, (2, 16))
    counts = torch.zeros(2, 16, dtype=torch.bool)
    counts[1, 3:6] = True
    loss(tokens, tokens, counts)  # compared with the library's loss once
    with Counters() as of_few:
        loss(tokens, tokens, counts)
    with Counters() as of_all:
        loss(tokens, tokens, torch.ones_like(counts))
    spared = of_all.operations - of_few.operations
    assert spared == 2 * 8 * 50 * (32 - 4), "three, and one to make it even"


def test_labels_that_are_shifted_already_are_taken_as_the_library_takes_them() -> None:
    llama = {"model_type": "llama", "vocab_size": 50, "hidden_size": 8, "intermediate_size": 8}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 1}
    model = plain(LibraryConfig(config=llama | layers))
    tokens = torch.randint(50, (2, 16))
    batch = {"input_ids": tokens, "labels": tokens, "shift_labels": tokens.flip(1)}
    torch.testing.assert_close(causal_loss(model, batch), model(**batch).loss)


def test_padding_has_no_loss_where_the_library_gives_it_none() -> None:
    """Gemma 3 with images leaves out what `attention_mask` hides, and Llama does not."""
    sizes = {"vocab_size": 50, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    tower = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "image_size": 28}
    tower |= {"num_attention_heads": 1, "patch_size": 14}
    gemma = transformers.Gemma3Config(text_config=sizes, vision_config=tower, mm_tokens_per_image=4)
    models = [
        transformers.Gemma3ForConditionalGeneration(gemma),
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)),
    ]
    tokens = torch.randint(1, 40, (2, 10), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, 6:] = 0
    for model in models:
        batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
        model.eval()
        torch.testing.assert_close(causal_loss(model, batch), model(**batch).loss)
