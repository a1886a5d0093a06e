"""Text that a daemon tokenises, beside what the tokenizer's own library says."""

import json
from pathlib import Path

import numpy as np
import pytest
from gyre_client import Loader
from gyre_client.errors import ConfigError
from tokenizers import Tokenizer

from tests.tokenizers import make_tokenizer

LENGTH = 16
TEXTS = [f"the cat number {number} sat on {'the ' * (number % 9)}mat" for number in range(60)]


def test_batches_have_the_ids_of_the_tokenizer_as_it_is_when_a_job_begins(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / "a.jsonl").write_text(lines)
    path = tmp_path / "tokenizer.json"
    crop = {"name": "crop_or_pad", "field": "tokens", "length": LENGTH, "value": 1}
    tokenize = {"name": "tokenize", "field": "json", "key": "text", "tokenizer": str(path)}
    seen = []
    for size in (320, 262):
        library = Tokenizer.from_file(str(make_tokenizer(path, size)))
        with Loader(tmp_path / "a.jsonl", batch_size=12, transform=[tokenize, crop]) as loader:
            batch = next(loader)
        for number, ids in zip(batch["sample_id"].tolist(), batch["tokens"], strict=True):
            wanted = library.encode(TEXTS[number]).ids[:LENGTH]
            assert ids.tolist() == wanted + [1] * (LENGTH - len(wanted))
        seen.append(batch["tokens"].numpy())
    assert not np.array_equal(seen[0], seen[1])
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        Loader(tmp_path / "a.jsonl", batch_size=12, transform=[tokenize, crop])
