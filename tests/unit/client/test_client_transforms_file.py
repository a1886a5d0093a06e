"""The file of `--transforms`: what it may hold, and what is said of any other."""

import argparse
import json
from pathlib import Path

import pytest
from gyre_client.command.options import add_transforms_argument, transforms_of
from gyre_client.errors import InvalidRequest
from gyre_client.transport.arguments import transform_list
from gyre_protos.v1 import loader_pb2 as pb

CHAIN = [
    {"name": "tokenize", "field": "text", "tokenizer": "bytes", "end": 256},
    {"name": "rescale", "by": 0.5, "sizes": [1, 2], "rule": {"exact": True}},
]
TOML = """
[[transforms]]
name = "tokenize"
field = "text"
tokenizer = "bytes"
end = 256

[[transforms]]
name = "rescale"
by = 0.5
sizes = [1, 2]
rule = { exact = true }
"""


def read(path: Path | None) -> pb.TransformList | None:
    parser = argparse.ArgumentParser()
    add_transforms_argument(parser)
    return transforms_of(parser.parse_args([] if path is None else ["--transforms", str(path)]))


def test_both_formats_hold_what_a_loader_takes(tmp_path: Path) -> None:
    for name, text in (("a.json", json.dumps(CHAIN)), ("a", json.dumps(CHAIN)), ("a.toml", TOML)):
        (tmp_path / name).write_text(text)
        assert read(tmp_path / name) == transform_list(CHAIN)
    (tmp_path / "none.json").write_text("[]")
    assert read(tmp_path / "none.json") == pb.TransformList()  # as they are stored
    assert read(None) is None


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.json", b"", "is no JSON"),
        ("a.json", b"[[transforms]]", "TOML in a file that ends in .toml"),
        ("a.json", b"[" * 200_000, "is no JSON"),
        ("a.json", b"\xff\xfe\x00", "is no JSON"),
        ("a.json", b" " * ((1 << 20) + 1), "more than 1048576 bytes"),
        ("a.json", b"{}", "must be a list of dicts"),
        ("a.json", b'"tokenize"', "must be a list of dicts"),
        ("a.json", b"null", "must be a list of dicts"),
        ("a.json", b'["tokenize"]', r"transform\[0\] is 'tokenize'"),
        ("a.json", b'[{"field": "text"}]', r"transform\[0\] has no name"),
        ("a.json", b'[{"name": "cast", "dtype": null}]', "is None, which is neither"),
        ("a.toml", b"transforms = [", "is no TOML"),
        ("a.toml", b"\xff", "is no TOML"),
        ("a.toml", b"", "and has none"),
        ("a.toml", b'transforms = []\npack = { field = "x" }', "has 'transforms', 'pack'"),
        ("a.toml", b"transforms = 3", "must be a list of dicts"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InvalidRequest, match=message) as caught:
        read(tmp_path / name)
    assert name in str(caught.value)
