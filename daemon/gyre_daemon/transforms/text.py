"""Transforms of text: tokens, and conversations with the tokens that count."""

import hashlib
import importlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from gyre_daemon.transforms.transform import Field, Sample, Transform

BYTES = "bytes"  # in place of a tokenizer's file: each byte is a token
_TOKEN, _MANY = np.dtype("<i4"), (None,)
_MAX_FILE_BYTES = 256 << 20
_Render = Callable[[Sequence[Mapping[str, Any]], bool], str]


@dataclass(frozen=True)
class Tokenize(Transform):
    """Turns text into token ids.

    Attributes:
        field: UTF-8.
        tokenizer: the path of a `tokenizer.json` of Hugging Face's tokenizers; or `bytes`, where
            each byte is its own id.
        key: where the field has JSON objects, the key of the text; empty for the text itself.
        to: the name of the ids, int32 [n].
        special_tokens: whether the tokenizer adds those that its file says.
        end: an id that is appended to each document; -1 for none.
    """

    field: str
    tokenizer: str
    key: str = ""
    to: str = "tokens"
    special_tokens: bool = True
    end: int = -1

    def __post_init__(self) -> None:
        """Read the file, whose contents are part of the version."""
        if self.tokenizer != BYTES:
            contents = _read(self.tokenizer)
            _set(self, version=_version(contents), _loaded=_tokenizer(self.tokenizer, contents))

    @property
    def inputs(self) -> Sequence[str]:
        """See `Transform.inputs`."""
        return [self.field]

    @property
    def drops(self) -> Sequence[str]:
        """See `Transform.drops`."""
        return [self.field]

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """See `Transform.outputs`."""
        _check_text(self.field, fields)
        return {self.to: Field(_TOKEN, _MANY)}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""
        text = sample[self.field].tobytes()
        if self.key:
            text = _text_of(json.loads(text), self.key).encode()
        if self.tokenizer == BYTES:
            ids = np.frombuffer(text, np.uint8).astype(_TOKEN)
        else:
            loaded: Any = self._loaded  # type: ignore[attr-defined]
            # the same ids for a quarter less time, because nobody asks where they are in the text
            (encoded,) = loaded.encode_batch_fast(
                [text.decode()], add_special_tokens=self.special_tokens
            )
            ids = np.array(encoded.ids, _TOKEN)
        if self.end >= 0:
            ids = np.append(ids, _TOKEN.type(self.end))
        self.put(self.to, ids, sample, out)


@dataclass(frozen=True)
class Chat(Transform):
    """Turns conversations into token ids, and says which of them an assistant wrote.

    Attributes:
        field: JSON: an object whose key `key` has a list of messages with `role` and `content`.
        tokenizer: the path of a `tokenizer.json`, beside which `tokenizer_config.json` has the
            `chat_template`.
        key: of the messages.
        to: the name of the ids, int32 [n].
        mask: the name of bool [n], true for tokens of what the assistant says.
        role: of those whose messages are learnt.
    """

    field: str
    tokenizer: str
    key: str = "messages"
    to: str = "tokens"
    mask: str = "loss_mask"
    role: str = "assistant"

    def __post_init__(self) -> None:
        """Read the two files, whose contents are part of the version."""
        beside = str(Path(self.tokenizer).with_name("tokenizer_config.json"))
        contents, config = _read(self.tokenizer), _read(beside)
        _set(
            self,
            version=_version(contents, config),
            _loaded=_tokenizer(self.tokenizer, contents),
            _render=_template(beside, config),
        )

    @property
    def inputs(self) -> Sequence[str]:
        """See `Transform.inputs`."""
        return [self.field]

    @property
    def drops(self) -> Sequence[str]:
        """See `Transform.drops`."""
        return [self.field]

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """See `Transform.outputs`."""
        _check_text(self.field, fields)
        return {self.to: Field(_TOKEN, _MANY), self.mask: Field(np.dtype(np.bool_), _MANY)}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""
        render: _Render = self._render  # type: ignore[attr-defined]
        loaded: Any = self._loaded  # type: ignore[attr-defined]
        messages = _messages(json.loads(sample[self.field].tobytes()), self.key)
        text = render(messages, False)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == self.role:
                before = render(messages[:number], True)
                after = render(messages[: number + 1], False)
                if not (text.startswith(after) and after.startswith(before)):
                    raise ValueError(
                        f"the chat template renders message {number} otherwise when others follow, "
                        "so that nobody can say which tokens are its own"
                    )
                spans.append((len(before), len(after)))
        encoded = loaded.encode(text, add_special_tokens=False)
        begins = np.array([begin for begin, _ in encoded.offsets], np.int64)
        counts = np.zeros(len(begins), np.bool_)
        for begin, end in spans:
            counts |= (begins >= begin) & (begins < end)
        self.put(self.to, np.array(encoded.ids, _TOKEN), sample, out)
        self.put(self.mask, counts, sample, out)


def _check_text(name: str, fields: Mapping[str, Field]) -> None:
    before = fields[name]
    if before.dtype != np.uint8 or before.shape != _MANY:
        raise ValueError(f"{name!r:.100} is no text, which is bytes in UTF-8")


def _text_of(document: object, key: str) -> str:
    text = document.get(key) if isinstance(document, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"its JSON is no object with text under the key {key!r:.100}")
    return text


def _messages(document: object, key: str) -> list[dict[str, Any]]:
    found = document.get(key) if isinstance(document, dict) else None
    if not isinstance(found, list) or not all(
        isinstance(each, dict) and isinstance(each.get("role"), str) for each in found
    ):
        raise ValueError(f"its JSON is no object with a list of messages under {key!r:.100}")
    return found


def _set(transform: Transform, **values: object) -> None:
    for name, value in values.items():
        object.__setattr__(transform, name, value)  # it is frozen


def _read(path: str) -> bytes:
    if not Path(path).is_absolute():
        raise ValueError(f"{path!r:.200} must be an absolute path, or {BYTES!r}")
    try:
        with Path(path).open("rb") as file:
            contents = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path!r:.200} cannot be read: {error.strerror}") from error
    if len(contents) > _MAX_FILE_BYTES:
        raise ValueError(f"{path!r:.200} has more than {_MAX_FILE_BYTES} bytes")
    return contents


def _version(*contents: bytes) -> int:
    """A number that tells the contents of files from others."""
    digest = hashlib.blake2b(digest_size=7)
    for each in contents:
        digest.update(hashlib.blake2b(each, digest_size=16).digest())
    return int.from_bytes(digest.digest(), "big")


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{name} is not installed; pip install 'gyre-ml[text]'") from error


def _tokenizer(path: str, contents: bytes) -> Any:
    """A `tokenizers.Tokenizer`."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core
    library = _module("tokenizers")
    try:
        loaded = library.Tokenizer.from_str(contents.decode())
    except Exception as error:  # the library raises no class of its own
        raise ValueError(f"{path!r:.200} is no tokenizer: {error!s:.300}") from error
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def _template(path: str, contents: bytes) -> _Render:
    """Renders messages, with the beginning of an answer at their end if that is asked for."""
    jinja2, sandbox = _module("jinja2"), _module("jinja2.sandbox")
    config = json.loads(contents)
    source = config.get("chat_template") if isinstance(config, dict) else None
    if not isinstance(source, str):
        raise ValueError(f"{path!r:.200} has no chat_template")

    def refuse(reason: str) -> NoReturn:
        raise jinja2.TemplateError(reason)

    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    template = environment.from_string(source)
    special = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token") and isinstance(value, dict | str)
    }

    def render(messages: Sequence[Mapping[str, Any]], prompt: bool) -> str:
        try:
            return str(template.render(messages=messages, add_generation_prompt=prompt, **special))
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses it: {error!s:.300}") from error

    return render
