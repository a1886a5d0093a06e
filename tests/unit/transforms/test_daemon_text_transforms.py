"""Tokens of text, beside what the tokenizer's own library says."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tiktoken
from gyre_daemon.errors import NotAllowed
from gyre_daemon.transforms import tokenizer
from gyre_daemon.transforms.recipes import to_steps
from gyre_daemon.transforms.tokenizer import Encode, Tokenize
from tokenizers import Tokenizer

from tests.tokenizers import make_tokenizer, transformed


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def test_ids_are_those_of_the_tokenizers_library(path: Path) -> None:
    text = "the cat sat on the wörld"
    library = Tokenizer.from_file(str(path))
    ids = transformed(Tokenize("text", str(path), end=1), text)["tokens"]
    assert ids.dtype == np.int32
    assert ids.tolist() == [*library.encode(text).ids, 1]
    json_text = json.dumps({"body": text, "n": 1})
    assert transformed(Tokenize("text", str(path), key="body"), json_text)["tokens"].tolist() == (
        library.encode(text).ids
    )
    assert transformed(Tokenize("text", "bytes"), "ä")["tokens"].tolist() == [195, 164]


def test_ids_of_sentencepiece_are_those_of_its_library(tmp_path: Path) -> None:
    texts = [f"the cat number {number} sat on the mat, wörld" for number in range(200)]
    with (tmp_path / "small.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=file,
            vocab_size=60,
            minloglevel=9,
            hard_vocab_limit=False,
        )
    path = str(tmp_path / "small.model")
    library = sentencepiece.SentencePieceProcessor(model_file=path)
    for text in (*texts[:3], "", "unknown: ü"):
        assert transformed(Tokenize("text", path), text)["tokens"].tolist() == library.encode(text)
    (tmp_path / "other.model").write_bytes(b"no model")
    with pytest.raises(ValueError, match="is no SentencePiece model"):
        Tokenize("text", str(tmp_path / "other.model"))


def test_ids_of_ranks_are_those_of_tiktoken(tmp_path: Path) -> None:
    pattern = r"\w+|\s+|[^\w\s]+"
    tokens = [*(bytes([byte]) for byte in range(256)), b"th", b"the", b" c", b"ca", b"cat"]
    path = tmp_path / "small.tiktoken"
    path.write_bytes(
        b"".join(b"%s %d\n" % (base64.b64encode(each), rank) for rank, each in enumerate(tokens))
    )
    ranks = {each: rank for rank, each in enumerate(tokens)}
    library = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    for text in ("the cat sat on the mat", "", "wörld <|endoftext|>"):
        ids = transformed(Tokenize("text", str(path), pattern=pattern), text)["tokens"]
        assert ids.tolist() == library.encode_ordinary(text)
    with pytest.raises(ValueError, match="give the regular expression of its encoding"):
        Tokenize("text", str(path))
    path.write_text("no ranks")
    with pytest.raises(ValueError, match="has no ranks of tokens"):
        Tokenize("text", str(path), pattern=pattern)


def test_an_engine_makes_the_ids_of_the_library(path: Path) -> None:
    plain = Tokenize("text", str(path), end=1)
    fast = plain.with_engine("tokie")
    assert (plain.cost, fast.cost) == ("heavy", "light")
    for number in range(200):
        text = f"the cat {number} <|user|> wörld " * (number % 5) + "\n\t  x"
        assert (
            transformed(fast, text)["tokens"].tolist()
            == transformed(plain, text)["tokens"].tolist()
        )


def test_an_engine_is_compared_for_as_long_as_it_is_used(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object) -> Encode:
        return lambda text: np.zeros(1, np.int32)

    monkeypatch.setitem(tokenizer._LOADERS, "tokie", wrong)
    fast = Tokenize("text", str(path)).with_engine("tokie")
    with pytest.raises(ValueError, match=r'tokie makes other ids .* set engine = "library"'):
        for number in range(1000):
            transformed(fast, f"text {number}")
    assert not Tokenize("text", str(path), engine="library").engines
    assert not Tokenize("text", "bytes").engines


def test_the_contents_of_the_file_are_part_of_the_version(path: Path, tmp_path: Path) -> None:
    other = make_tokenizer(tmp_path / "other.json", size=262)
    first, second = Tokenize("text", str(path)), Tokenize("text", str(other))
    other.write_bytes(path.read_bytes())
    assert first.version != second.version
    assert first.version == Tokenize("text", str(other)).version


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        ("tokenizer.json", "must be an absolute path"),
        ("/nowhere/tokenizer.json", "cannot be read: No such file"),
        ("/", "is a folder; name the file in it, such as tokenizer.json"),
        ("/etc/hostname", "is no tokenizer"),
    ],
)
def test_files_that_are_no_tokenizer_are_refused(tokenizer: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Tokenize("text", tokenizer)


def test_clients_of_a_shared_daemon_name_no_files() -> None:
    declared: list[dict[str, Any]] = [{"name": "tokenize", "field": "x", "tokenizer": "/etc/x"}]
    keys: dict[str, Any] = {"installed": [], "allow_modules": False}
    with pytest.raises(NotAllowed, match="opens no files that clients name"):
        to_steps(declared, **keys, allow_files=False)
    assert to_steps(declared, **keys, allow_files=True)
    declared[0]["tokenizer"] = "bytes"
    assert to_steps(declared, **keys, allow_files=False)
