"""The transform `chat`: tokens of conversations, which of them count, and the chat templates."""

import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import jinja2
import jinja2.ext
import numpy as np
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gyre_daemon.transforms.recipes import Field, OfField, Sample, set_of
from gyre_daemon.transforms.tokenizer import (
    MANY,
    TOKEN,
    load_hugging_face,
    read_file,
    version_of,
)

_ASSISTANT = "assistant"
_Message = dict[str, Any]
# The names of ShareGPT, and those of others that it keeps.
_ROLES = {
    "human": "user",
    "gpt": _ASSISTANT,
    **{each: each for each in ("system", "user", _ASSISTANT, "tool")},
}
_DEFAULT = "default"
_WITH_TOOLS = "tool_use"  # the name under which tokenizers have their template for tools
_MAX_REASON_CHARS = 300
Span = tuple[int, int]
Render = Callable[..., "_Rendered"]  # takes messages and `prompt`, see `_Template.render`


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A conversation as text.

    Attributes:
        text: the text to tokenise.
        spans: the half-open ranges of characters between `{% generation %}` and its end.
    """

    text: str
    spans: Sequence[Span]


class _Templates:
    """The chat templates next to a `tokenizer.json`, by their names.

    Attributes:
        contents: of the files that they were read from.
    """

    def __init__(self, tokenizer: str, name: str, variables: Mapping[str, object]) -> None:
        """Read `chat_template.jinja` and others next to it, else from `tokenizer_config.json`.

        Without a name the template is `default`, or `tool_use` where there is one and a
        conversation has tools.
        """
        beside = Path(tokenizer).with_name("tokenizer_config.json")
        config_bytes = read_file(str(beside))
        config = json.loads(config_bytes)
        if not isinstance(config, dict):
            raise ValueError(f"{str(beside)!r:.200} has no JSON object")
        files = _files(beside.parent)
        sources = {each: read_file(str(path)) for each, path in sorted(files.items())}
        self.contents = [config_bytes, *sources.values()]
        texts = {each: source.decode() for each, source in sources.items()} or _listed(config)
        if not texts:
            raise ValueError(
                f"{str(beside.parent)!r:.200} has no chat_template.jinja, and no "
                "chat_template in its tokenizer_config.json"
            )
        self._variables = {**_special_tokens(config), **variables}
        self._name = name
        self._made = {each: _Template(each, text) for each, text in texts.items()}
        wanted = name or _DEFAULT
        if wanted not in self._made:
            known = ", ".join(sorted(self._made))
            raise ValueError(
                f"there is no chat template {wanted!r:.100}; `template` can be: {known}"
            )

    def of(self, conversation: Mapping[str, Any]) -> "tuple[_Template, Render]":
        """The template of one conversation, which is rendered with its `tools` and `documents`."""
        given = {key: _objects(conversation, key) for key in ("tools", "documents")}
        name = self._name or _DEFAULT
        if not self._name and given["tools"] is not None and _WITH_TOOLS in self._made:
            name = _WITH_TOOLS
        template = self._made[name]
        return template, partial(template.render, {**self._variables, **given})


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which encloses the assistant's words."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so
    used: bool
    mark: str

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.used = False
        # no rendered text can contain it
        self.mark = f"\ufdd0{secrets.token_hex(8)}"

    def parse(self, parser: Parser) -> nodes.Node:
        """See `jinja2.ext.Extension.parse`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.used = True
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{self.mark}{caller()}{self.mark}"


class _Template:
    """One template, as the library `transformers` renders it, but for the time of day."""

    def __init__(self, name: str, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _to_json
        generation = environment.extensions[_Generation.identifier]
        assert isinstance(generation, _Generation)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template {name!r:.100} cannot be read: line {error.lineno}: "
                f"{error.message!s:.{_MAX_REASON_CHARS}}"
            ) from error
        self.marks = generation.used
        self._mark = generation.mark

    def render(
        self, variables: Mapping[str, Any], messages: Sequence[_Message], *, prompt: bool
    ) -> _Rendered:
        """Render messages, with the beginning of an answer behind them if `prompt`.

        Raises:
            ValueError: the template refuses them.
        """
        try:
            text = self._template.render(
                {**variables, "messages": messages, "add_generation_prompt": prompt}
            )
        except (jinja2.TemplateError, TypeError) as error:
            reason = f"the chat template refuses it: {error!s:.{_MAX_REASON_CHARS}}"
            if "strftime_now" in str(error):
                reason += (
                    "; the date would make samples depend on the day, so give the template the "
                    "variable that it reads instead, in `variables`"
                )
            raise ValueError(reason) from error
        parts = text.split(self._mark) if self.marks else [text]
        ends, spans = 0, []
        for number, part in enumerate(parts):
            if number % 2:
                spans.append((ends, ends + len(part)))
            ends += len(part)
        return _Rendered("".join(parts), spans)


def _refuse(reason: str) -> NoReturn:
    raise jinja2.TemplateError(reason)


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # templates may give it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without escapes; jinja2's own filter escapes characters for HTML.

    A template may not name other arguments of `json.dumps`: `default` would call what it gives.
    """
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _files(folder: Path) -> dict[str, Path]:
    """The files of templates in a tokenizer's folder, by the names of the templates."""
    found = {each.stem: each for each in (folder / "additional_chat_templates").glob("*.jinja")}
    default = folder / "chat_template.jinja"
    return {_DEFAULT: default, **found} if default.exists() else found


def _listed(config: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a `tokenizer_config.json`: one, or a list of named ones."""
    found = config.get("chat_template")
    if isinstance(found, str):
        return {_DEFAULT: found}
    objects = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else ()
    pairs = [(each.get("name"), each.get("template")) for each in objects]
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token") and isinstance(value, dict | str)
    }


def _objects(conversation: Mapping[str, Any], key: str) -> list[dict[str, Any]] | None:
    found = conversation.get(key)
    if found is None:
        return None
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ValueError(f"its {key!r} is no list of objects")
    return found


@dataclass(frozen=True)
class Chat(OfField):
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
        templates = _Templates(self.tokenizer, self.template, self.variables)
        set_of(
            self,
            version=version_of(contents, *templates.contents),
            _loaded=load_hugging_face(self.tokenizer, contents),
            _templates=templates,
        )

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        self.require_bytes(fields)
        return {self.to: Field(TOKEN, MANY), self.mask: Field(np.dtype(np.bool_), MANY)}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        templates: _Templates = self._templates  # type: ignore[attr-defined]
        loaded: Any = self._loaded  # type: ignore[attr-defined]
        conversation = json.loads(sample[self.field].tobytes())
        messages = _messages(conversation, self.key)
        template, render = templates.of(conversation)
        whole = render(messages, prompt=False)
        first = _last_turn(messages) if self.turns == "last" else 0
        spans: Iterable[Span]
        if template.marks and self.role == _ASSISTANT:
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
        self, messages: list[_Message], first: int, render: Render, whole: _Rendered
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


def _span_inside(messages: list[_Message], number: int, render: Render, whole: str) -> Span:
    """Where a message is that its template renders otherwise once others follow.

    Such templates leave out the thoughts of earlier turns. With another content, the text
    differs in the content alone; the text behind it in the template shows in the beginning of the
    conversation that ends with the message.
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


def _beginning(messages: list[_Message], num: int, render: Render, whole: _Rendered) -> str:
    """The text of the first messages."""
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
    """A message with its role; one of ShareGPT with the names that templates know."""
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
