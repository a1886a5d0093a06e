"""Conversations: their tokens, and which of them count."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from gyre_daemon.transforms.text.files import module_of, read_file, set_of, version_of
from gyre_daemon.transforms.text.libraries import TOKEN, load_hugging_face
from gyre_daemon.transforms.text.tokens import MANY, OfText
from gyre_daemon.transforms.transform import Field, Sample

_Render = Callable[[Sequence[Mapping[str, Any]], bool], str]


@dataclass(frozen=True)
class Chat(OfText):
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

    tokenizer: str
    key: str = "messages"
    to: str = "tokens"
    mask: str = "loss_mask"
    role: str = "assistant"

    def __post_init__(self) -> None:
        """Read the two files, whose contents are part of the version."""
        beside = str(Path(self.tokenizer).with_name("tokenizer_config.json"))
        contents, config = read_file(self.tokenizer), read_file(beside)
        set_of(
            self,
            version=version_of(contents, config),
            _loaded=load_hugging_face(self.tokenizer, contents),
            _render=_template(beside, config),
        )

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """See `Transform.outputs`."""
        self.check_text(fields)
        return {self.to: Field(TOKEN, MANY), self.mask: Field(np.dtype(np.bool_), MANY)}

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
        self.put(self.to, np.array(encoded.ids, TOKEN), sample, out)
        self.put(self.mask, counts, sample, out)


def _messages(document: object, key: str) -> list[dict[str, Any]]:
    found = document.get(key) if isinstance(document, dict) else None
    if not isinstance(found, list) or not all(
        isinstance(each, dict) and isinstance(each.get("role"), str) for each in found
    ):
        raise ValueError(f"its JSON is no object with a list of messages under {key!r:.100}")
    return found


def _template(path: str, contents: bytes) -> _Render:
    """Renders messages, with the beginning of an answer at their end if that is asked for."""
    jinja2, sandbox = module_of("jinja2", "text"), module_of("jinja2.sandbox", "text")
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
