"""Daemons that serve the same texts."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cached_texts import (
    CACHE,
    TEMPLATE,
    Served,
    start,
    tables,
    tokenize,
    write,
)
from tests.preloaded.interpreter import Interpreter
from tests.tokenizers import make_tokenizer


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the texts, and a tokenizer."""
    folder = tmp_path_factory.mktemp("texts")
    write(folder)
    make_tokenizer(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def served_texts(
    text_folder: Path, tmp_path_factory: pytest.TempPathFactory, interpreter: Interpreter
) -> Iterator[Served]:
    """A daemon with a cache on disk; it may have a faster engine for the tokenizer."""
    folder = tmp_path_factory.mktemp("served")
    long = tables(text_folder)["lines"] | {
        "filter": "length(tokens) >= 200",
        "transforms": [tokenize(text_folder), CACHE],
    }
    datasets = {**tables(text_folder), "long": long}
    config = {"cache_dir": str(folder / "cache"), "datasets": datasets}
    found = start(folder / "run", config, interpreter)
    yield found
    found.daemon.stop()


@pytest.fixture
def serve_texts(
    tmp_path: Path, interpreter: Interpreter
) -> Iterator[Callable[[Mapping[str, Any]], Served]]:
    """`serve_texts({"datasets": {...}})` starts another daemon."""
    started: list[Served] = []

    def begin(config: Mapping[str, Any]) -> Served:
        started.append(start(tmp_path / f"daemon-{len(started)}", config, interpreter))
        return started[-1]

    yield begin
    for each in started:
        each.daemon.stop()
