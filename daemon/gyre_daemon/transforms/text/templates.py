"""Chat templates: where a tokenizer has them, and how they render a conversation."""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gyre_daemon.transforms.text.libraries import read_file

_DEFAULT = "default"
_WITH_TOOLS = "tool_use"  # the name under which tokenizers have their template for tools
_MAX_REASON_CHARS = 300
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: the text to tokenise.
        spans: the half-open ranges of characters between `{% generation %}` and its end.
    """

    text: str
    spans: Sequence[Span]


class Templates:
    """The chat templates next to a `tokenizer.json`, by their names.

    Attributes:
        contents: of the files that they were read from.
    """

    def __init__(self, tokenizer: str, name: str, variables: Mapping[str, object]) -> None:
        """Read `chat_template.jinja` and others next to it, else from `tokenizer_config.json`.

        Args:
            tokenizer: the path of the `tokenizer.json`.
            name: of the template for all conversations; "" for `default`, or `tool_use` where there
                is one and a conversation has tools.
            variables: given to the templates, together with the conversation.

        Raises:
            ValueError: there is no template, none of this name, or one cannot be read.
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

    def of(self, conversation: Mapping[str, Any]) -> "Renderer":
        """A renderer of the messages of one conversation, with its `tools` and `documents`.

        Raises:
            ValueError: these are no lists of objects.
        """
        given = {key: _objects(conversation, key) for key in ("tools", "documents")}
        name = self._name or _DEFAULT
        if not self._name and given["tools"] is not None and _WITH_TOOLS in self._made:
            name = _WITH_TOOLS
        return Renderer(self._made[name], {**self._variables, **given})


@dataclass(frozen=True, slots=True)
class Renderer:
    """Renders beginnings of one conversation."""

    template: "_Template"
    variables: Mapping[str, Any]

    @property
    def marks(self) -> bool:
        """Whether the template itself marks the assistant's words."""
        return self.template.marks

    def __call__(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool) -> Rendered:
        """Render messages, with the beginning of an answer behind them if `prompt`.

        Raises:
            ValueError: the template refuses them.
        """
        return self.template.render(
            {**self.variables, "messages": messages, "add_generation_prompt": prompt}
        )


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

    def render(self, variables: Mapping[str, Any]) -> Rendered:
        try:
            text = self._template.render(variables)
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
        return Rendered("".join(parts), spans)


def _refuse(reason: str) -> NoReturn:
    raise jinja2.TemplateError(reason)


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # templates may give it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without escapes; jinja2's own filter escapes characters for HTML."""
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
    if not isinstance(found, list):
        return {}
    return {
        each["name"]: each["template"]
        for each in found
        if isinstance(each, dict)
        and isinstance(each.get("name"), str)
        and isinstance(each.get("template"), str)
    }


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
