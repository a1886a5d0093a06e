"""Tokens of conversations, beside what `transformers` makes of them with the same templates."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_daemon.transforms.text.chat import Chat
from tokenizers import Tokenizer

from tests.tokenizers import make_tokenizer, transformed

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# It marks what an assistant wrote, stops at an empty message, and shows tools as JSON.
MARKED = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{% if not message.content %}{% break %}{% endif %}<|{{ message.role }}|>\n"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}</s>{% endgeneration %}\n"
    "{% else %}{{ message.content }}</s>\n{% endif %}{% endfor %}"
)
TALK = [
    {"role": "user", "content": "hello wörld"},
    {"role": "assistant", "content": "the answer"},
    {"role": "user", "content": "and now?"},
    {"role": "assistant", "content": "no."},
]
TOOLS = [{"type": "function", "function": {"name": "search", "description": "a<b & 'c' ü"}}]


def save(folder: Path, template: Any) -> tuple[str, Any]:
    """A tokenizer as `transformers` saves it: the path of its file, and the library's own."""
    from transformers import PreTrainedTokenizerFast  # seconds, for this alone

    saved: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(make_tokenizer(folder / "made.json")), bos_token="<s>", eos_token="</s>"
    )
    saved.chat_template = template
    saved.save_pretrained(folder)
    return str(folder / "tokenizer.json"), saved


def write(folder: Path, template: object) -> str:
    """A tokenizer whose template is in its configuration, as the library saved it before."""
    config = {"chat_template": template, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(make_tokenizer(folder / "tokenizer.json"))


def test_what_an_assistant_says_counts(tmp_path: Path) -> None:
    path, library = save(tmp_path, TEMPLATE)
    assert (tmp_path / "chat_template.jinja").exists()
    assert "chat_template" not in json.loads((tmp_path / "tokenizer_config.json").read_text())
    sample = transformed(Chat("text", path), json.dumps({"messages": TALK}))
    assert sample["tokens"].tolist() == library.apply_chat_template(TALK)
    learnt = Tokenizer.from_file(path).decode(
        sample["tokens"][sample["loss_mask"]].tolist(), skip_special_tokens=False
    )
    assert learnt == "the answer</s>\nno.</s>\n"


def test_a_configuration_may_have_the_template(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    path, _ = save(tmp_path, TEMPLATE)
    old = write(tmp_path / "old", TEMPLATE)
    text = json.dumps({"messages": TALK})
    made = [transformed(Chat("text", each), text) for each in (path, old)]
    assert all(np.array_equal(made[0][name], made[1][name]) for name in ("tokens", "loss_mask"))


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_template_may_mark_what_counts(tmp_path: Path, tools: Any) -> None:
    path, library = save(tmp_path, MARKED)
    talk = [*TALK, {"role": "assistant", "content": ""}]
    sample = transformed(Chat("text", path), json.dumps({"messages": talk, "tools": tools}))
    wanted = library.apply_chat_template(
        talk, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    assert sample["tokens"].tolist() == wanted["input_ids"]
    assert sample["loss_mask"].tolist() == [bool(each) for each in wanted["assistant_masks"]]
    assert sample["loss_mask"].any()
    of_users = transformed(Chat("text", path, role="user"), json.dumps({"messages": TALK[:3]}))
    assert not of_users["loss_mask"][sample["loss_mask"][: len(of_users["loss_mask"])]].any()


def test_one_of_several_templates_is_chosen(tmp_path: Path) -> None:
    named = {"default": TEMPLATE, "tool_use": MARKED, "short": "{{ messages[0].content }}"}
    path, library = save(tmp_path, named)
    assert (tmp_path / "additional_chat_templates" / "short.jinja").exists()
    for name, tools in (("", None), ("", TOOLS), ("short", TOOLS)):
        document = json.dumps({"messages": TALK, "tools": tools})
        sample = transformed(Chat("text", path, template=name), document)
        wanted = library.apply_chat_template(TALK, tools=tools, chat_template=name or None)
        assert sample["tokens"].tolist() == wanted
    with pytest.raises(ValueError, match=r"no chat template 'long'; .* default, short, tool_use"):
        Chat("text", path, template="long")
    listed = [{"name": name, "template": text} for name, text in named.items()]
    (tmp_path / "listed").mkdir()
    from_list = transformed(
        Chat("text", write(tmp_path / "listed", listed), template="short"), document
    )
    assert np.array_equal(from_list["tokens"], sample["tokens"])


def test_a_template_gets_variables_and_not_the_time(tmp_path: Path) -> None:
    dated = "{{ day if day is defined else strftime_now('%d') }}" + TEMPLATE
    path, library = save(tmp_path, dated)
    document = json.dumps({"messages": TALK})
    with pytest.raises(ValueError, match=r"strftime_now.* the date would make .* `variables`"):
        transformed(Chat("text", path), document)
    sample = transformed(Chat("text", path, variables={"day": "07"}), document)
    assert sample["tokens"].tolist() == library.apply_chat_template(TALK, day="07")


def test_a_changed_template_is_another_version(tmp_path: Path) -> None:
    path, _ = save(tmp_path, TEMPLATE)
    first = Chat("text", path).version
    (tmp_path / "chat_template.jinja").write_text(MARKED)
    assert Chat("text", path).version != first


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting"),
        ("[]", "no object with a list of messages"),
        ('{"messages": [{"content": "x"}]}', "no object with a list of messages"),
        ('{"messages": [], "tools": "search"}', "'tools' is no list of objects"),
    ],
)
def test_conversations_that_are_none_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        transformed(Chat("text", write(tmp_path, TEMPLATE)), text)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% if %}", "chat template 'default' cannot be read: line 1: Expected an expression"),
        ("{% generation %}", "cannot be read: line 1"),
        (None, "no chat_template.jinja, and no chat_template in its"),
        (7, "no chat_template.jinja, and no chat_template in its"),
    ],
)
def test_templates_that_are_none_are_refused(tmp_path: Path, template: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Chat("text", write(tmp_path, template))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages | length }}" + TEMPLATE, "message 1 otherwise when others follow"),
        ("{{ raise_exception('no user') }}", "the chat template refuses it: no user"),
        ("{{ messages.append(1) }}", "the chat template refuses it"),
        ("{{ 1 + 'a' }}", "the chat template refuses it: unsupported operand"),
    ],
)
def test_conversations_that_a_template_refuses(tmp_path: Path, template: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        transformed(Chat("text", write(tmp_path, template)), json.dumps({"messages": TALK}))
