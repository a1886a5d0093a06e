"""Text that a daemon tokenises, beside what the tokenizer's own library says."""

import json
from pathlib import Path

import numpy as np
import pytest
from gyre_client import Loader
from gyre_client.errors import ConfigError
from tokenizers import Tokenizer

from tests.conftest import Daemon, to_toml
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


WRONG = """
class Tokenizer:
    @classmethod
    def from_json(cls, path):
        return cls()

    def encode(self, text, special_tokens):
        import tokenizers, types
        library = tokenizers.Tokenizer.from_file({path!r})
        ids = library.encode(text).ids
        return types.SimpleNamespace(ids=ids[:-1] if "number 41 " in text else ids)
"""


@pytest.mark.parametrize(
    ("is_wrong", "event"), [(False, "engine verified"), (True, "engine not used")]
)
def test_an_engine_is_used_if_it_makes_the_same_of_the_first_samples(
    tmp_path: Path, is_wrong: bool, event: str
) -> None:
    path = make_tokenizer(tmp_path / "tokenizer.json")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "packages").mkdir()
    if is_wrong:
        (tmp_path / "packages/tokie.py").write_text(WRONG.format(path=str(path)))
    tokenize = {"name": "tokenize", "field": "json", "key": "text", "tokenizer": str(path)}
    table = {"uri": str(tmp_path / "a.jsonl"), "transforms": [tokenize]}
    config, address = tmp_path / "gyre.toml", f"unix:{tmp_path}/run/gyre.sock"
    values = {"listen": [address], "index_dir": str(tmp_path / "index"), "drain_timeout_s": 3.0}
    config.write_text(to_toml({**values, "datasets": {"texts": table}}))
    environment = {"PYTHONPATH": str(tmp_path / "packages")}
    daemon = Daemon(config, address, tmp_path / "log", environment).start()
    library = Tokenizer.from_file(str(path))
    with Loader("texts", batch_size=12, address=address) as loader:
        for batch in loader:
            ends = batch["tokens.offsets"].tolist()
            for row, number in enumerate(batch["sample_id"].tolist()):
                ids = batch["tokens"][ends[row] : ends[row + 1]]
                assert ids.tolist() == library.encode(TEXTS[number]).ids
    daemon.stop()
    (chosen,) = (each for each in daemon.events() if each["event"].startswith("engine"))
    assert (chosen["event"], chosen["engine"]) == (event, "tokie")
    assert not is_wrong or "sample 41 of dataset `texts`" in chosen["reason"]
