"""Chains whose fields have limits: a job begins without a pass over its samples."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_client import Loader
from numpy.testing import assert_array_equal
from tokenizers import Tokenizer

from tests.conftest import Daemon, to_toml
from tests.tokenizers import make_tokenizer

MOST, NUM = 18, 60
OPTIONS: Mapping[str, Mapping[str, object]] = {
    "texts": {},
    "large": {"length": 1 << 20},
    "random": {"start": "random"},
}
TEXTS = [f"the cat number {number} sat on {'the ' * (number % 9)}mat" for number in range(NUM)]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon that serves texts as `texts`."""
    lines = "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in TEXTS)
    (tmp_path / "a.jsonl").write_text(lines)
    make_tokenizer(tmp_path / "tokenizer.json")
    address, config = f"unix:{tmp_path}/run/gyre.sock", tmp_path / "gyre.toml"
    values = {
        "listen": [address],
        "index_dir": str(tmp_path / "index"),
        "num_transform_workers": 2,
        "drain_timeout_s": 3.0,
        "datasets": {
            name: {"uri": str(tmp_path / "a.jsonl"), "transforms": chain(tmp_path, **options)}
            for name, options in OPTIONS.items()
        },
    }
    config.write_text(to_toml(values))
    started = Daemon(config, address, tmp_path / "log", {})
    started.start()
    yield started
    started.stop()


def chain(folder: Path, **truncate: object) -> list[dict[str, object]]:
    path = str(folder / "tokenizer.json")
    return [
        {"name": "tokenize", "field": "json", "key": "text", "tokenizer": path},
        {"name": "truncate", "field": "tokens", "length": MOST, **truncate},
    ]


def measured_files(folder: Path) -> list[Path]:
    return [*(folder / "index").rglob("*.gyre-lengths")]


def read(daemon: Daemon, name: str, **arguments: Any) -> list[dict[str, np.ndarray[Any, Any]]]:
    with Loader(name, batch_size=7, seed=3, address=daemon.address, **arguments) as loader:
        return [{key: each.numpy().copy() for key, each in batch.items()} for batch in loader]


def test_a_job_with_limits_measures_nothing_and_gets_the_same(
    daemon: Daemon, tmp_path: Path
) -> None:
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    limited = read(daemon, "texts")
    assert not measured_files(tmp_path)
    assert {len(library.encode(text).ids) > MOST for text in TEXTS} == {True, False}
    for batch in limited:
        offsets = batch["tokens.offsets"]
        assert offsets[-1] == len(batch["tokens"])
        for row, number in enumerate(batch["sample_id"].tolist()):
            ids = batch["tokens"][offsets[row] : offsets[row + 1]].tolist()
            assert ids == library.encode(TEXTS[number]).ids[:MOST]
    measured = read(daemon, "texts", balance={"linear": 1.0, "field": "tokens"})
    assert measured_files(tmp_path)
    for batch, other in zip(limited, measured, strict=True):
        assert batch.keys() == other.keys()
        for name in batch:
            assert_array_equal(batch[name], other[name])


def test_large_limits_are_measured(daemon: Daemon, tmp_path: Path) -> None:
    read(daemon, "large")
    assert measured_files(tmp_path)


def test_lengths_within_limits_may_depend_on_chance(daemon: Daemon) -> None:
    first, again = (read(daemon, "random") for _ in range(2))
    for batch, other in zip(first, again, strict=True):
        assert_array_equal(batch["tokens"], other["tokens"])
