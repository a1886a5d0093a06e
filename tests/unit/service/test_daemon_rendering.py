"""`gyred check-config` prints each value in force, as TOML that says the same again."""

import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from gyre_daemon.config import (
    DaemonConfig,
    DatasetConfig,
    MixtureConfig,
    PackConfig,
    load,
)
from gyre_daemon.config.load import rendered
from gyre_daemon.config.schema import UserLimits
from gyre_daemon.storage.location import redact
from gyre_protos.text import MAX_KEY_PARTS, parse_toml
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import to_toml

PACK = {
    "field": "tokens",
    "length": 16,
    "overlong": "split",
    "padding_id": 3,
    "window": 2048,
    "seed": 5,
}
# Each key of a dataset, with another value than its default; `columns` is a format's.
DATASET: dict[str, Any] = {
    "uri": "/data/{a,b}",
    "format": "jsonl",
    "columns": ["a b", "c"],
    "cache": False,
    "allow": ["uid:0"],
    "follow_links": True,
    "rename": {"a b": "d"},
    "cast": {"c": "float32"},
    "on_corrupt": "replace",
    "max_corrupt": 3,
    "filter": 'length(c) > 3 and x == "y"',
    "append": True,
    "pack": PACK,
    "transforms": [{"name": "tokenize", "field": "c", "deep": {"x": [1.5, True]}}],
}
MIXTURE: dict[str, Any] = {
    "weights": {"x": 0.25, "plain": 1e-7},
    "block": 2048,
    "schedule": [{"step": 5, "weights": {"x": 1.0}}],
    "allow": ["uid:0"],
    "transforms": [{"name": "cache"}],
    "pack": PACK,
}
FILE: dict[str, Any] = {
    "limits": {
        "user": {"memory": 0.5, "sessions": 3, "connections": 4, "requests_per_s": 5.0},
        "users": {"uid:1*": {"sessions": 8}},
    },
    "job_weights": {"prod-*": 4.0},
    "tokens": {"ci": "/etc/ci.token"},
    "datasets": {"x": {**DATASET, "pack": None}, "plain": {"uri": "/data"}},
}
del FILE["datasets"]["x"]["pack"]


def loaded(folder: Path, text: str) -> DaemonConfig:
    path = folder / "gyre.toml"
    path.write_text(text)
    return load(path, {}, {}).config


def printed(folder: Path, table: dict[str, Any]) -> str:
    path = folder / "gyre.toml"
    path.write_text(to_toml(table))
    return rendered(load(path, {}, {}), redact)


@pytest.mark.parametrize(
    "table",
    [
        {},
        FILE,
        {**FILE, "mixtures": {"m": MIXTURE}},
        {"datasets": {"x": DATASET}},
        {"datasets": {"x": {"uri": "/data"}}, "mixtures": {"m": {"epochs": {"x": 2.0}}}},
        {
            "datasets": {"x": {"uri": "/data"}},
            "mixtures": {"m": {"temperature": 2.0, "sources": ["x"]}},
        },
    ],
)
def test_what_is_printed_says_the_same_again(tmp_path: Path, table: dict[str, Any]) -> None:
    text = printed(tmp_path, table)
    assert loaded(tmp_path, text) == loaded(tmp_path, to_toml(table))


def test_each_key_and_its_origin_are_printed(tmp_path: Path) -> None:
    table = {**FILE, "datasets": {"x": DATASET, "plain": {"uri": "/"}}}
    table["mixtures"] = {"m": {"weights": {"plain": 1.0}, "pack": PACK}}
    lines = printed(tmp_path, table).splitlines()
    starts: dict[str, list[str]] = {"": []}
    title = ""
    for line in lines:
        if line.startswith("["):
            title = line.strip("[]")
            starts[title] = []
        starts[title].append(line)

    def has(table: str, key: str) -> bool:
        return any(line.startswith((f"{key} = ", f"# {key} is not")) for line in starts[table])

    scalars = {each.name for each in fields(DaemonConfig)} - {
        "tokens",
        "datasets",
        "job_weights",
        "limits",
    }
    assert {key for key in scalars if not has("", key)} == set()
    declared = {
        "limits.user": UserLimits,
        "datasets.x.pack": PackConfig,
        "mixtures.m.pack": PackConfig,
        "mixtures.m": MixtureConfig,
        "datasets.x": DatasetConfig,
        "datasets.plain": DatasetConfig,
    }
    for name, kind in declared.items():
        assert is_dataclass(kind)
        keys = {each.name for each in fields(kind)} - {"options", "storage", "mixture"}
        keys -= {"pack"} if name == "datasets.x" else set()
        assert {key for key in keys if not has(name, key)} == set(), name
    assert 'on_corrupt = "replace"  # file' in starts["datasets.x"]
    assert 'on_corrupt = "fail"  # default' in starts["datasets.plain"]
    assert "# allow is not set" in starts["datasets.plain"]
    assert "connections = 4  # limits.user" in starts['limits.users."uid:1*"']


def test_secrets_are_not_printed(tmp_path: Path) -> None:
    secret = "hunter2hunter2"
    dataset = {
        "uri": f"s3://bucket/x?sig={secret}",
        "storage": {"secret_access_key": secret, "endpoint": "http://x"},
        "transforms": [{"name": "x", "api_key": secret}],
        "password": secret,
    }
    text = printed(tmp_path, {"datasets": {"x": dataset}})
    assert secret not in text
    assert "# storage = { endpoint, secret_access_key }, values not shown" in text


@given(st.text(max_size=20), st.text(max_size=20))
def test_any_name_and_any_text_is_printed_as_toml(
    tmp_path_factory: pytest.TempPathFactory, name: str, text: str
) -> None:
    folder = tmp_path_factory.getbasetemp()
    try:
        table = {"datasets": {name: {"uri": "/", "note": text}}}
        (folder / "any.toml").write_text(to_toml(table))
        effective = load(folder / "any.toml", {}, {})
    except (UnicodeEncodeError, ValueError):
        return  # half a character, which TOML cannot hold
    printed = rendered(effective, redact)
    assert all(each.isprintable() or each == "\n" for each in printed)
    assert tomllib.loads(printed)["datasets"][name]["note"] == text


@pytest.mark.parametrize(
    "text",
    [
        ".".join("a" * MAX_KEY_PARTS) + " = 1",
        '"' + ". " * 100 + '" = 1 # ' + "a." * 100,
        "a = '''\n" + "b." * 100 + "\n'''",
        'a = """\\""" ' + "b." * 100 + '\n"""',
        "a = [" + "1.5, " * 100 + "]",
    ],
)
def test_dots_that_are_no_deep_key_are_fine(text: str) -> None:
    assert parse_toml(text) == tomllib.loads(text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("\n" + ".".join("a" * (MAX_KEY_PARTS + 1)) + " = 1", 2),
        ("[[" + " . ".join(["'a'"] * (MAX_KEY_PARTS + 1)) + "]]", 1),
        ('x = """\n\n"""\ny = {' + ".".join(["b-c"] * 1000) + " = 1}", 4),
        ("a" * (1 << 20) + "." + ".".join("a" * 100_000), 1),
    ],
)
def test_a_key_with_many_parts_is_refused_at_once(text: str, line: int) -> None:
    with pytest.raises(tomllib.TOMLDecodeError, match=f"more than 32 parts .at line {line}."):
        parse_toml(text)
