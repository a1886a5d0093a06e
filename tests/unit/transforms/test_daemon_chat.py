"""Tokens of conversations, beside what `transformers` makes of them with the same templates."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_daemon.transforms.chat import Chat
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

    saved: Any = PreTrainedTokenizerFast(
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


@pytest.mark.parametrize("extra", [{}, {"tools": TOOLS}])
def test_conversations_may_have_the_names_of_sharegpt(tmp_path: Path, extra: Any) -> None:
    path, _ = save(tmp_path, MARKED)
    names = {"user": "human", "assistant": "gpt"}
    turns = [{"from": names[each["role"]], "value": each["content"]} for each in TALK]
    chat = Chat("text", path, key="conversations")
    found = transformed(chat, json.dumps({"conversations": turns, **extra}))
    wanted = transformed(Chat("text", path), json.dumps({"messages": TALK, **extra}))
    assert all(np.array_equal(found[name], wanted[name]) for name in ("tokens", "loss_mask"))
    same = [{"from": each["role"], "value": each["content"], "weight": 1} for each in TALK]
    found = transformed(chat, json.dumps({"conversations": same, **extra}))
    assert np.array_equal(found["tokens"], wanted["tokens"])


def test_the_system_prompt_of_sharegpt_may_stand_apart(tmp_path: Path) -> None:
    chat = Chat("text", write(tmp_path, TEMPLATE), key="conversations")
    turns = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]
    first = {"from": "system", "value": "Be brief."}

    def tokens(document: Any) -> Any:
        return transformed(chat, json.dumps(document))["tokens"].tolist()

    wanted = tokens({"conversations": [first, *turns]})
    assert tokens({"system": "Be brief.", "conversations": turns}) == wanted
    assert tokens({"system": "Another.", "conversations": [first, *turns]}) == wanted
    without = tokens({"conversations": turns})
    assert tokens({"system": "", "conversations": turns}) == without != wanted


@pytest.mark.parametrize("given", ["false, 2, [',', ':'], true", "separators=[',', ':'], indent=2"])
def test_tojson_takes_the_arguments_that_it_has_in_transformers(tmp_path: Path, given: str) -> None:
    path, library = save(tmp_path, "{{ tools | tojson(" + given + ") }}" + TEMPLATE)
    sample = transformed(Chat("text", path), json.dumps({"messages": TALK, "tools": TOOLS}))
    wanted = library.apply_chat_template(TALK, tools=TOOLS)
    assert sample["tokens"].tolist() == wanted


@pytest.mark.parametrize("given", ["default='{0}'.format", "cls=dict"])
def test_tojson_takes_no_code(tmp_path: Path, given: str) -> None:
    path = write(tmp_path, "{{ tools | tojson(" + given + ") }}")
    with pytest.raises(ValueError, match="unexpected keyword"):
        transformed(Chat("text", path), json.dumps({"messages": TALK, "tools": TOOLS}))


# Qwen3's way: what was thought before the last message of a user is left out, and what follows it
# begins with thoughts, be they empty.
REWRITING = (
    "{% set last = namespace(user=-1) %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>\n"
    "{% set content = message.content or '' %}{% if message.role == 'assistant' %}"
    "{% set thought = content.split('</think>')[0] if '</think>' in content else '' %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}"
    "{% if loop.index0 > last.user and (loop.last or thought) %}"
    "<think>\n{{ thought.split('<think>')[-1] }}</think>\n\n{% endif %}{% endif %}"
    "{{ content }}{% if message.tool_calls %}{% if content %}{{ '\\n' }}{% endif %}"
    "{{ message.tool_calls | tojson }}{% endif %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CALL = [{"name": "search"}]
THINKING = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "<think>\nhm the answer</think>\n\nthe answer"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "the answer", "tool_calls": CALL},
    {"role": "tool", "content": "the answer"},
    {"role": "assistant", "content": None, "tool_calls": CALL},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "<think>\nhm</think>\n\nno."},
]
CALLED = f"{json.dumps(CALL)}</s>\n"


@pytest.mark.parametrize(
    ("talk", "turns", "learnt"),
    [
        (TALK, "all", "the answer</s>\n<think>\n</think>\n\nno.</s>\n"),
        (TALK, "last", "<think>\n</think>\n\nno.</s>\n"),
        (
            THINKING,
            "all",
            f"the answer</s>\nthe answer\n{CALLED}{CALLED}<think>\n\nhm</think>\n\nno.</s>\n",
        ),
        (THINKING, "last", f"the answer\n{CALLED}{CALLED}<think>\n\nhm</think>\n\nno.</s>\n"),
        ([{"role": "assistant", "content": "x"}], "last", "<think>\n</think>\n\nx</s>\n"),
    ],
)
def test_a_template_may_render_earlier_turns_otherwise(
    tmp_path: Path, talk: Any, turns: Any, learnt: str
) -> None:
    """All tokens are those of the template, and what counts of an earlier turn is what is there."""
    path, library = save(tmp_path, REWRITING)
    sample = transformed(Chat("text", path, turns=turns), json.dumps({"messages": talk}))
    assert sample["tokens"].tolist() == library.apply_chat_template(talk)
    counted = sample["tokens"][sample["loss_mask"]].tolist()
    assert Tokenizer.from_file(path).decode(counted, skip_special_tokens=False) == learnt


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_only_the_last_turn_counts_where_that_is_asked_for(tmp_path: Path, template: str) -> None:
    path, _ = save(tmp_path, template)
    document = json.dumps({"messages": TALK})
    every = transformed(Chat("text", path), document)["loss_mask"]
    last = transformed(Chat("text", path, turns="last"), document)["loss_mask"]
    assert last.any()
    begin = int(np.flatnonzero(last)[0])
    assert np.array_equal(last[begin:], every[begin:])
    assert every[:begin].any()
    assert not last[:begin].any()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting"),
        ("[]", "no object with a list of messages"),
        ('{"messages": ["x"]}', "no object with a list of messages"),
        (
            '{"turns": [{"role": "user"}]}',
            "under 'messages'; set `key`: it has lists under 'turns'",
        ),
        ('{"messages": [{"content": "x"}]}', "message 0 has no `role`, and no `from`"),
        ('{"messages": [{"from": "bing", "value": "x"}]}', "from 'bing', and known are human, gpt"),
        ('{"messages": [{"from": "gpt", "value": null}]}', "message 0 has no text as its `value`"),
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
        (
            "{{ messages | length }}{{ messages[1].content if messages[1] }}" + TEMPLATE,
            'message 1 otherwise when others follow, .* Set turns = "last"',
        ),
        ("{{ raise_exception('no user') }}", "the chat template refuses it: no user"),
        ("{{ messages.append(1) }}", "the chat template refuses it"),
        ("{{ 1 + 'a' }}", "the chat template refuses it: unsupported operand"),
    ],
)
def test_conversations_that_a_template_refuses(tmp_path: Path, template: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        transformed(Chat("text", write(tmp_path, template)), json.dumps({"messages": TALK}))
