import pytest
import torch
from gyre_client.errors import InvalidRequest
from gyre_client.integrations.micro_batches import next_tokens
from gyre_trainer.errors import DataRejected
from gyre_trainer.training.collate import Examples
from gyre_trainer.training.collate import collate as collate_batch
from gyre_trainer.training.config import TrainConfig, build
from torch import Tensor

LENGTH = 8


def config(*, inside_documents: bool = False, field: str = "tokens") -> TrainConfig:
    sizes = {"vocab_size": 257, "num_layers": 1, "dim": 8, "hidden_dim": 8, "max_seq_len": LENGTH}
    heads = {"num_heads": 1, "num_kv_heads": 1, "inside_documents": inside_documents}
    return build(
        TrainConfig,
        {
            "run": {"out": "none", "steps": 1},
            "data": {
                "dataset": "words",
                "batch_size": 4,
                "sequence_length": LENGTH,
                "field": field,
            },
            "model": {**sizes, **heads},
        },
    )


TOKENS = config()


def collate(batch: dict[str, Tensor], of: TrainConfig) -> Examples:
    return collate_batch(batch, of, 257)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32, torch.int64])
def test_windows_are_inputs_and_the_tokens_after_them(dtype: torch.dtype) -> None:
    tokens = torch.arange(4 * (LENGTH + 1)).reshape(4, LENGTH + 1)
    batch = {"tokens": tokens.to(dtype), "sample_id": torch.arange(4)}
    examples = collate(batch, TOKENS)
    assert torch.equal(examples.inputs, tokens[:, :-1])
    assert torch.equal(examples.targets, tokens[:, 1:])
    assert examples.counts is None
    assert examples.num_targets() == 4 * LENGTH


def test_windows_that_say_nothing_of_documents_are_not_attended_inside_them() -> None:
    batch = {"tokens": torch.zeros(3, LENGTH + 1, dtype=torch.uint8), "sample_id": torch.arange(3)}
    inside = config(inside_documents=True)
    with pytest.raises(DataRejected, match=r"`model.inside_documents` needs packed rows"):
        collate(batch, inside)
    batch["position"] = torch.arange(3 * (LENGTH + 1), dtype=torch.int32).reshape(3, -1) % 3
    assert collate(batch, inside).positions is not None


def test_weights_of_targets_are_refused() -> None:
    """The number of targets that count would be the integer below the sum of the weights."""
    tokens, mask = torch.zeros(2, LENGTH + 1, dtype=torch.uint8), torch.ones(2, LENGTH + 1)
    mask[0, 3] = 0
    counts = collate({"tokens": tokens, "loss_mask": mask}, TOKENS).counts
    assert counts is not None
    assert torch.equal(counts, mask[:, 1:].bool())
    mask[0, 3] = 0.25
    with pytest.raises(DataRejected, match="`loss_mask` of 'words' has other values than 0 and 1"):
        collate({"tokens": tokens, "loss_mask": mask}, TOKENS)
    with pytest.raises(InvalidRequest, match="loss_mask: tokens count or do not"):
        next_tokens({"tokens": tokens, "loss_mask": mask}, LENGTH)


def test_padding_rows_count_nothing() -> None:
    batch = {
        "tokens": torch.zeros(3, LENGTH + 1, dtype=torch.uint8),
        "mask": torch.tensor([True, False, True]),
    }
    examples = collate(batch, TOKENS)
    assert examples.counts is not None
    assert examples.counts.all(1).tolist() == [True, False, True]
    assert examples.num_targets() == 2 * LENGTH


def test_the_parts_of_examples_concatenate_to_the_whole() -> None:
    lengths = torch.tensor([2, 3, 4, 5])
    tokens = torch.arange(4 * (LENGTH + 1)).reshape(4, LENGTH + 1)
    counts = torch.arange(LENGTH + 1) <= lengths[:, None]
    examples = collate({"tokens": tokens, "loss_mask": counts}, TOKENS)
    parts = examples.split(2)
    assert [part.num_targets() for part in parts] == [5, 9]
    assert torch.equal(torch.cat([part.inputs for part in parts]), examples.inputs)


@pytest.mark.parametrize(
    ("of", "batch", "words"),
    [
        (config(field="txt"), {"tokens": torch.zeros(1, 9)}, "'txt', but 'words' delivers tokens"),
        (
            TOKENS,
            {"tokens": torch.zeros(2, 9)},
            "must be whole numbers, but 'tokens' is torch.float32",
        ),
        (
            TOKENS,
            {"tokens": torch.zeros(2, 8, dtype=torch.uint8)},
            "needs samples of 9 tokens, but a sample of 'words' is 8",
        ),
        (TOKENS, {"tokens": torch.zeros(2, dtype=torch.uint8)}, "is a scalar"),
        (TOKENS, {"tokens": torch.full((2, 9), 257)}, "token 257 .* `model.vocab_size` is 257"),
        (TOKENS, {"tokens": torch.full((2, 9), -1)}, "token -1 .* outside the vocabulary"),
        (
            TOKENS,
            {
                "tokens": torch.zeros(3, dtype=torch.int32),
                "tokens.offsets": torch.tensor([0, 3]),
                "sample_id": torch.tensor([0]),
            },
            r'pack token ids by pack = {field = "tokens", length = 9}',
        ),
    ],
)
def test_batches_that_do_not_fit_are_refused_in_one_sentence(
    of: TrainConfig, batch: dict[str, Tensor], words: str
) -> None:
    with pytest.raises(DataRejected, match=words):
        collate(batch, of)
