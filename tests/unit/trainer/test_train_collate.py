import numpy as np
import pytest
import torch
from gyre_client.errors import InvalidRequest
from gyre_client.integrations.micro_batches import next_tokens
from gyre_trainer.errors import DataRejected
from gyre_trainer.training.collate import END_OF_TEXT, Collator, Examples, window
from gyre_trainer.training.config import DataConfig
from torch import Tensor

LENGTH = 8
TOKENS = DataConfig(dataset="words", batch_size=4, sequence_length=LENGTH)
TEXT = DataConfig(dataset="letters", batch_size=4, sequence_length=LENGTH, field="txt", seed=5)


def text_batch(*documents: bytes) -> dict[str, Tensor]:
    return {
        "txt": torch.tensor(list(b"".join(documents)), dtype=torch.uint8),
        "txt.offsets": torch.tensor(np.cumsum([0, *map(len, documents)])),
        "sample_id": torch.arange(100, 100 + len(documents)),
    }


def collate(data: DataConfig, batch: dict[str, Tensor], step: int = 0) -> Examples:
    batch.setdefault("sample_id", torch.arange(len(next(iter(batch.values())))))
    return Collator(data, vocab_size=257).collate(batch, step)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32, torch.int64])
def test_windows_are_inputs_and_the_tokens_after_them(dtype: torch.dtype) -> None:
    tokens = torch.arange(4 * (LENGTH + 1)).reshape(4, LENGTH + 1)
    batch = {"tokens": tokens.to(dtype), "sample_id": torch.arange(4)}
    examples = collate(TOKENS, batch)
    assert torch.equal(examples.inputs, tokens[:, :-1])
    assert torch.equal(examples.targets, tokens[:, 1:])
    assert examples.counts is None
    assert examples.num_targets() == 4 * LENGTH


def test_windows_that_say_nothing_of_documents_are_not_attended_inside_them() -> None:
    batch = {"tokens": torch.zeros(3, LENGTH + 1, dtype=torch.uint8), "sample_id": torch.arange(3)}
    collator = Collator(TOKENS, vocab_size=257, inside_documents=True)
    with pytest.raises(DataRejected, match=r"`model.inside_documents` needs packed rows"):
        collator.collate(batch, 0)
    batch["position"] = torch.arange(3 * (LENGTH + 1), dtype=torch.int32).reshape(3, -1) % 3
    assert collator.collate(batch, 0).positions is not None


def test_weights_of_targets_are_refused() -> None:
    """The number of targets that count would be the integer below the sum of the weights."""
    tokens, mask = torch.zeros(2, LENGTH + 1, dtype=torch.uint8), torch.ones(2, LENGTH + 1)
    mask[0, 3] = 0
    counts = collate(TOKENS, {"tokens": tokens, "loss_mask": mask}).counts
    assert counts is not None
    assert torch.equal(counts, mask[:, 1:].bool())
    mask[0, 3] = 0.25
    with pytest.raises(DataRejected, match="`loss_mask` of 'words' has other values than 0 and 1"):
        collate(TOKENS, {"tokens": tokens, "loss_mask": mask})
    with pytest.raises(InvalidRequest, match="loss_mask: tokens count or do not"):
        next_tokens({"tokens": tokens, "loss_mask": mask}, LENGTH)


def test_padding_rows_count_nothing() -> None:
    batch = {
        "tokens": torch.zeros(3, LENGTH + 1, dtype=torch.uint8),
        "mask": torch.tensor([True, False, True]),
    }
    examples = collate(TOKENS, batch)
    assert examples.counts is not None
    assert examples.counts.all(1).tolist() == [True, False, True]
    assert examples.num_targets() == 2 * LENGTH


def test_a_short_document_ends_with_end_of_text_and_its_padding_counts_nothing() -> None:
    examples = collate(TEXT, text_batch(b"abc", b"", b"abcdefgh"))
    assert examples.counts is not None
    assert examples.counts.sum(1).tolist() == [3, 0, 8]
    assert examples.inputs[0, :3].tolist() == list(b"abc")
    assert examples.targets[0, :3].tolist() == [*b"bc", END_OF_TEXT]
    assert examples.targets[2].tolist() == [*b"bcdefgh", END_OF_TEXT]
    assert examples.inputs.shape == examples.targets.shape == (3, LENGTH)


def test_a_long_document_is_cut_to_a_window_that_moves_with_the_step_and_repeats_with_it() -> None:
    document = bytes(range(200))
    rows = [collate(TEXT, text_batch(document), step).inputs[0].tolist() for step in (3, 3, 4, 5)]
    assert rows[0] == rows[1]
    assert len({tuple(row) for row in rows}) == 3
    for row in rows:
        assert row == list(range(row[0], row[0] + LENGTH))


def test_every_window_of_a_document_is_drawn() -> None:
    document = np.arange(21)
    starts = {int(window(document, 9, [0, step, 1])[0]) for step in range(300)}
    assert starts == set(range(13))


def test_the_parts_of_examples_concatenate_to_the_whole() -> None:
    examples = collate(TEXT, text_batch(b"ab", b"abc", b"abcd", b"abcde"))
    parts = examples.split(2)
    assert [part.num_targets() for part in parts] == [5, 9]
    assert torch.equal(torch.cat([part.inputs for part in parts]), examples.inputs)


@pytest.mark.parametrize(
    ("data", "batch", "words"),
    [
        (TEXT, {"tokens": torch.zeros(1, 9)}, "'txt', but 'letters' delivers sample_id, tokens"),
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
        (TOKENS, {"tokens": torch.full((2, 9), -1)}, "outside the vocabulary"),
        (
            TEXT,
            {
                "txt": torch.zeros(3),
                "txt.offsets": torch.tensor([0, 3]),
                "sample_id": torch.tensor([0]),
            },
            "must come as bytes",
        ),
        (
            TOKENS,
            {
                "tokens": torch.zeros(3, dtype=torch.int32),
                "tokens.offsets": torch.tensor([0, 3]),
                "sample_id": torch.tensor([0]),
            },
            r'must be packed into sequences, by pack = {field = "tokens", length = 9}',
        ),
    ],
)
def test_batches_that_do_not_fit_are_refused_in_one_sentence(
    data: DataConfig, batch: dict[str, Tensor], words: str
) -> None:
    with pytest.raises(DataRejected, match=words):
        collate(data, batch)


def test_text_needs_a_vocabulary_with_end_of_text() -> None:
    with pytest.raises(DataRejected, match="token 256"):
        Collator(TEXT, vocab_size=256).collate(text_batch(b"abc"), 0)
