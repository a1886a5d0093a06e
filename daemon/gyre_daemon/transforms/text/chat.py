"""Conversations: their tokens, and which of them count."""

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from gyre_daemon.transforms.text.libraries import (
    TOKEN,
    load_hugging_face,
    read_file,
    set_of,
    version_of,
)
from gyre_daemon.transforms.text.templates import Rendered, Renderer, Span, Templates
from gyre_daemon.transforms.text.tokens import MANY, OfText
from gyre_daemon.transforms.transform import Field, Sample

_ASSISTANT = "assistant"
_Message = dict[str, Any]
# The names of ShareGPT, and those of others that it keeps.
_ROLES = {
    "human": "user",
    "gpt": _ASSISTANT,
    **{each: each for each in ("system", "user", _ASSISTANT, "tool")},
}


@dataclass(frozen=True)
class Chat(OfText):
    """Turns conversations into token ids, and says which of them an assistant wrote.

    Attributes:
        field: JSON: an object whose key `key` has a list of messages with `role` and `content`, or
            with `from` and `value` as ShareGPT has them. Its keys `tools` and `documents`, lists of
            objects, are given to the template.
        tokenizer: the path of a `tokenizer.json`. Next to it is `tokenizer_config.json`, and the
            template is in this file or in `chat_template.jinja`.
        key: of the messages.
        to: the name of the ids, int32 [n].
        mask: the name of bool [n], true for tokens of the assistant's words.
        role: of those whose messages are learnt.
        turns: `all` of them, or those of the `last` turn: behind the last message of a user.
        template: the name of the template, where there are several.
        variables: given to the template, together with the conversation.
    """

    tokenizer: str
    key: str = "messages"
    to: str = "tokens"
    mask: str = "loss_mask"
    role: str = _ASSISTANT
    turns: Literal["all", "last"] = "all"
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
        first = _last_turn(messages) if self.turns == "last" else 0
        spans: Iterable[Span]
        if render.marks and self.role == _ASSISTANT:
            begin = len(_beginning(messages, first, render, whole)) if first else 0
            spans = [span for span in whole.spans if span[0] >= begin]
        else:
            spans = self._spans(messages, first, render, whole)
        encoded = loaded.encode(whole.text, add_special_tokens=False)
        begins = np.array([begin for begin, _ in encoded.offsets], np.int64)
        counts = np.zeros(len(begins), np.bool_)
        for begin, end in spans:
            counts |= (begins >= begin) & (begins < end)
        self.put(self.to, np.array(encoded.ids, TOKEN), sample, out)
        self.put(self.mask, counts, sample, out)

    def _spans(
        self, messages: list[_Message], first: int, render: Renderer, whole: Rendered
    ) -> Iterator[Span]:
        """Where the messages of the role are in the text, after the prompts that open them."""
        for number, message in enumerate(messages):
            if number < first or message["role"] != self.role:
                continue
            before = render(messages[:number], prompt=True).text
            after = render(messages[: number + 1], prompt=False).text
            if whole.text.startswith(after) and after.startswith(before):
                yield len(before), len(after)
            else:
                yield _span_inside(messages, number, render, whole.text)


def _span_inside(messages: list[_Message], number: int, render: Renderer, whole: str) -> Span:
    """Where a message is that its template renders otherwise once others follow.

    Such templates leave out the thoughts of earlier turns. With another content, the text
    differs in the content alone; the text behind it in the template shows in the beginning of the
    conversation that ends with the message.

    Raises:
        ValueError: the text differs elsewhere, too.
    """
    mark = f"\ufdd0{secrets.token_hex(8)}"
    marked = {**messages[number], "content": mark}
    text = render([*messages[:number], marked, *messages[number + 1 :]], prompt=False).text
    alone = render([*messages[:number], marked], prompt=False).text
    before, _, behind = text.partition(mark)
    _, _, own = alone.partition(mark)
    following = behind[len(own) :]
    end = len(whole) - len(following)
    is_exact = (
        text.count(mark) == alone.count(mark) == 1
        and behind.startswith(own)
        and whole.startswith(before)
        and whole.endswith(following)
        and len(before) <= end
    )
    if not is_exact:
        raise ValueError(
            f"the chat template renders message {number} otherwise when others follow, and which "
            'of its tokens count cannot be told. Set turns = "last", or put {% generation %} and '
            "{% endgeneration %} around what counts in the template."
        )
    return len(before), end


def _last_turn(messages: list[_Message]) -> int:
    """The number of the message after the last one of a user; 0 without one."""
    users = [number for number, each in enumerate(messages) if each["role"] == "user"]
    return users[-1] + 1 if users else 0


def _beginning(messages: list[_Message], num: int, render: Renderer, whole: Rendered) -> str:
    """The text of the first messages.

    Raises:
        ValueError: the template renders them otherwise when others follow.
    """
    text = render(messages[:num], prompt=False).text
    if not whole.text.startswith(text):
        raise ValueError(
            "the chat template renders the messages before the last turn otherwise when it "
            'follows, so that `turns = "last"` cannot be told. Leave it out.'
        )
    return text


def _messages(document: object, key: str) -> list[_Message]:
    found = document.get(key) if isinstance(document, dict) else None
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        reason = f"its JSON is no object with a list of messages under {key!r:.100}"
        if isinstance(document, dict):
            lists = [name for name, value in document.items() if isinstance(value, list) and value]
            keys = ", ".join(map(repr, lists or document))
            reason += f"; set `key`: it has {'lists under ' if lists else ''}{keys:.200}"
        raise ValueError(reason)
    messages = [_message(number, each) for number, each in enumerate(found)]
    prompt = document.get("system") if isinstance(document, dict) else None
    is_apart = isinstance(prompt, str) and prompt and all("from" in each for each in found)
    if is_apart and not any(each["role"] == "system" for each in messages):
        messages.insert(0, {"role": "system", "content": prompt})  # as tools of ShareGPT's are
    return messages


def _message(number: int, found: _Message) -> _Message:
    """A message with its role; one of ShareGPT with the names that templates know.

    Raises:
        ValueError: it has no role, or an unknown one.
    """
    if isinstance(found.get("role"), str):
        return found
    source = found.get("from")
    if not isinstance(source, str):
        raise ValueError(f"message {number} has no `role`, and no `from` as ShareGPT has it")
    if source not in _ROLES:
        raise ValueError(
            f"message {number} is from {source!r:.100}, and known are {', '.join(_ROLES)}; write "
            "it with `role` and `content`"
        )
    text = found.get("value")
    if not isinstance(text, str):
        raise ValueError(f"message {number} has no text as its `value` (got {text!r:.100})")
    rest = {name: value for name, value in found.items() if name not in ("from", "value")}
    return {**rest, "role": _ROLES[source], "content": text}
