"""Conversations: their tokens, and which of them count."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gyre_daemon.transforms.text.files import read_file, set_of, version_of
from gyre_daemon.transforms.text.libraries import TOKEN, load_hugging_face
from gyre_daemon.transforms.text.templates import Rendered, Renderer, Span, Templates
from gyre_daemon.transforms.text.tokens import MANY, OfText
from gyre_daemon.transforms.transform import Field, Sample

_ASSISTANT = "assistant"


@dataclass(frozen=True)
class Chat(OfText):
    """Turns conversations into token ids, and says which of them an assistant wrote.

    Attributes:
        field: JSON: an object whose key `key` has a list of messages with `role` and `content`. Its
            keys `tools` and `documents`, lists of objects, are given to the template.
        tokenizer: the path of a `tokenizer.json`. Beside it is `tokenizer_config.json`, and the
            template is in this file or in `chat_template.jinja`.
        key: of the messages.
        to: the name of the ids, int32 [n].
        mask: the name of bool [n], true for tokens of what the assistant says.
        role: of those whose messages are learnt.
        template: the name of the template, where there are several.
        variables: what the template is given beside the conversation.
    """

    tokenizer: str
    key: str = "messages"
    to: str = "tokens"
    mask: str = "loss_mask"
    role: str = _ASSISTANT
    template: str = ""
    variables: dict[str, str | int | float | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read the files, whose contents are part of the version."""
        contents = read_file(self.tokenizer)
        templates = Templates(self.tokenizer, self.template, self.variables)
        set_of(
            self,
            version=version_of(contents, *templates.contents),
            _loaded=load_hugging_face(self.tokenizer, contents),
            _templates=templates,
        )

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """See `Transform.outputs`."""
        self.check_text(fields)
        return {self.to: Field(TOKEN, MANY), self.mask: Field(np.dtype(np.bool_), MANY)}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""
        templates: Templates = self._templates  # type: ignore[attr-defined]
        loaded: Any = self._loaded  # type: ignore[attr-defined]
        conversation = json.loads(sample[self.field].tobytes())
        messages = _messages(conversation, self.key)
        render = templates.of(conversation)
        whole = render(messages, prompt=False)
        by_template = render.marks and self.role == _ASSISTANT
        spans = whole.spans if by_template else self._spans(messages, render, whole)
        encoded = loaded.encode(whole.text, add_special_tokens=False)
        begins = np.array([begin for begin, _ in encoded.offsets], np.int64)
        counts = np.zeros(len(begins), np.bool_)
        for begin, end in spans:
            counts |= (begins >= begin) & (begins < end)
        self.put(self.to, np.array(encoded.ids, TOKEN), sample, out)
        self.put(self.mask, counts, sample, out)

    def _spans(
        self, messages: list[dict[str, Any]], render: Renderer, whole: Rendered
    ) -> Iterator[Span]:
        """Where the messages of the role are in the text, after the prompts that open them."""
        for number, message in enumerate(messages):
            if message["role"] != self.role:
                continue
            before = render(messages[:number], prompt=True).text
            after = render(messages[: number + 1], prompt=False).text
            if not (whole.text.startswith(after) and after.startswith(before)):
                raise ValueError(
                    f"the chat template renders message {number} otherwise when others follow, "
                    "so that nobody can say which tokens are its own; a template says it itself "
                    "with {% generation %}"
                )
            yield len(before), len(after)


def _messages(document: object, key: str) -> list[dict[str, Any]]:
    found = document.get(key) if isinstance(document, dict) else None
    if not isinstance(found, list) or not all(
        isinstance(each, dict) and isinstance(each.get("role"), str) for each in found
    ):
        raise ValueError(f"its JSON is no object with a list of messages under {key!r:.100}")
    return found
