"""A small tokenizer, as a file of Hugging Face's tokenizers, and what a transform makes of text."""

from pathlib import Path

import numpy as np
from gyre_daemon.transforms.recipes import Field, Sample, Transform
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
_TEXTS = ["the cat sat on the mat", "hello world, the answer is no", "and now for the world"]


def make_tokenizer(path: Path, size: int = 320) -> Path:
    """Writes a byte-level BPE of `size` ids, the special ones first; returns the path."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS * 20, trainer)
    tokenizer.save(str(path))
    return path


def transformed(transform: Transform, text: str) -> Sample:
    """What a transform makes of a sample whose field `text` this is."""
    sample: Sample = {"text": np.frombuffer(text.encode(), np.uint8)}
    transform.outputs({"text": Field(np.dtype(np.uint8), (None,))})
    transform.apply(sample, np.random.default_rng(), {})
    return sample
