"""Which URIs a dataset may have, and which are refused before anything connects."""

import socket
from typing import NoReturn

import pytest
from gyre_daemon.errors import InvalidRequest
from gyre_daemon.storage.location import (
    Location,
    parse_location,
    redact,
    relative_names,
    shown_uri,
)

PASSWORD = "hunter2"


@pytest.fixture(autouse=True)
def no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise AssertionError("a URI was connected to while it was parsed")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize(
    ("uri", "scheme", "paths"),
    [
        ("/data/train.bin", "file", ("/data/train.bin",)),
        ("train", "file", ("train",)),
        ("../data", "file", ("../data",)),
        ("file:///data/x.bin", "file", ("/data/x.bin",)),
        ("FILE:///data/x.bin", "file", ("/data/x.bin",)),
        ("local:///data/x.bin", "file", ("/data/x.bin",)),
        # percent signs are ordinary characters: nothing decodes them
        ("/data/%2e%2e/x", "file", ("/data/%2e%2e/x",)),
        ("/data/x-{00..02}.tar", "file", ("/data/x-00.tar", "/data/x-01.tar", "/data/x-02.tar")),
        ("s3://bucket/{b,a}/*.tar", "s3", ("s3://bucket/b/*.tar", "s3://bucket/a/*.tar")),
        ("S3://Bucket/Key", "s3", ("s3://Bucket/Key",)),
        ("s3://bucket/a#b?c", "s3", ("s3://bucket/a#b?c",)),
        ("gs://bucket/x", "gs", ("gs://bucket/x",)),
        (
            "abfs://container@account.dfs.core.windows.net/x",
            "abfs",
            ("abfs://container@account.dfs.core.windows.net/x",),
        ),
        ("sftp://me@host:22/a.bin", "sftp", ("sftp://me@host:22/a.bin",)),
        # the node cache does what these do
        ("simplecache::s3://bucket/x", "s3", ("s3://bucket/x",)),
        ("blockcache://::filecache::/data/{0,1}", "file", ("/data/0", "/data/1")),
        ("zip::/data/x.zip", "zip", ("zip://%2Fdata%2Fx.zip/",)),
        (
            "zip://{a,b}/*.bin::sftp://me@host/x.zip",
            "zip",
            tuple(f"zip://sftp%3A%2F%2Fme%40host%2Fx.zip/{each}/*.bin" for each in "ab"),
        ),
        (
            "tar:///a::http://[::1]:80/x.tar",
            "tar",
            ("tar://http%3A%2F%2F%5B%3A%3A1%5D%3A80%2Fx.tar/a",),
        ),
        ("http://127.0.0.1:80/x.tar", "http", ("http://127.0.0.1:80/x.tar",)),
    ],
)
def test_locations(uri: str, scheme: str, paths: tuple[str, ...]) -> None:
    location = parse_location(uri)
    assert (location.scheme, location.paths) == (scheme, paths)


@pytest.mark.parametrize(
    ("uri", "sentence"),
    [
        ("", "must have 1 to 4096 characters"),
        ("x" * (1 << 20), "but has 1048576"),
        ("/data/\0", "control characters"),
        ("/data/x\nINFO forged log line", "control characters"),
        ("/data/\x1b[2J", "control characters"),
        ("/data/\x9b2J", "control characters"),
        ("/data/\u2028", "control characters"),
        ("/data/\udcff", "broken Unicode"),
        ("s3://bucket/x::s3://bucket/y", "chained"),
        ("memory://x/y", "is the memory of one process.*Write the files to a folder"),
        ("pipe:cat /etc/passwd", "pipes are not served"),
        ("pipe:curl http://x/y::z", "pipes are not served"),
        ("gopher://x/y", r"unknown scheme `gopher://`"),
        ("javascript://x", "unknown scheme"),
        ("zip:///data/x.zip", "not served by itself"),
        ("reference://x", "not served by itself"),
        ("reference::file:///data/x.json", "chained URLs"),
        ("zip://a.tar::file:///data/{a,b}.zip", "must be one file"),
        ("zip://a.tar::file:///data/*.zip", "must be one file"),
        ("zip://a.tar::file:///data/", "must be one file"),
        ("zip://a.tar::zip://b.zip::file:///c.zip", "an archive in an archive"),
        ("zip://a.tar::data/x.zip", "needs an absolute path"),
        ("zip://../a.tar::file:///data/x.zip", "must not leave its root"),
        (f"zip://a.tar::sftp://me:{PASSWORD}@host/x.zip", "must not contain a password"),
        (f"simplecache::s3://key:{PASSWORD}@bucket/x", "must not contain a password"),
        ("tar://a::gopher://x/y", r"unknown scheme `gopher://`"),
        ("made_up+by.some-1://x", "needs an entry point in the group `fsspec.specs`"),
        ("simplecache://x", "not served by itself"),
        ("file://host/data", "needs an absolute path"),
        ("file://data/x.bin", "needs an absolute path"),
        ("file://", "needs an absolute path"),
        (f"s3://key:{PASSWORD}@bucket/x", "must not contain a password"),
        (f"s3://key:{PASSWORD}@more@bucket/x", "must not contain a password"),
        (f"http://user:{PASSWORD}@127.0.0.1/x", "must not contain a password"),
        ("s3://bucket/../other/x", "must not leave its root"),
        ("s3://bucket/a/..", "must not leave its root"),
        ("https://host/x.tar?signature=hunter2", "must not have a query"),
        ("https://host/x.tar#part", "must not have a query"),
        ("/data/{1..1000000000000}.bin", "more than 1000000 shards"),
        ("/data/" + "{a,b}" * 30, "more than 1000000 shards"),
        ("/" + "y" * 4000 + "{1..100000}", "shards"),
        ("/data/{a,b", "not balanced"),
        ("/data/" + "{" * 1000 + "}" * 1000, "nested"),
    ],
)
def test_hostile_uris(uri: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence) as caught:
        parse_location(uri)
    assert PASSWORD not in str(caught.value)
    assert len(str(caught.value)) < 5000
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("s3://bucket/x", "s3://bucket/x"),
        ("http://user:hunter2@host/x", "http://***@host/x"),
        ("http://user:hun@ter2@host/x", "http://***@host/x"),
        ("GET https://host/x?sig=hunter2&b=1 failed", "GET https://host/x?... failed"),
        ("abfs://c@account/x", "abfs://***@account/x"),
        ("mail a@b", "mail a@b"),
    ],
)
def test_redaction(text: str, redacted: str) -> None:
    assert redact(text) == redacted


def test_the_text_of_a_location_is_redacted() -> None:
    assert parse_location("sftp://user@host/x") == Location(
        "sftp", ("sftp://user@host/x",), "sftp://***@host/x"
    )


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/data/a.bin"], ["a.bin"]),
        (["/data/a.bin", "/data/b.bin"], ["a.bin", "b.bin"]),
        (["/data/x/a.bin", "/data/y/a.bin"], ["x/a.bin", "y/a.bin"]),
        (["/data/a.bin", "/data/x/a.bin"], ["a.bin", "x/a.bin"]),
        (["s3://bucket/data/a.bin", "s3://bucket/data/b.bin"], ["a.bin", "b.bin"]),
        (["s3://one/a.bin", "s3://two/a.bin"], ["one/a.bin", "two/a.bin"]),
        (["s3://bucket/a#1.bin", "s3://bucket/a#2.bin"], ["a#1.bin", "a#2.bin"]),
        (["/data/a.bin", "/data/a.bin"], ["a.bin", "a.bin"]),
        (["a.bin"], ["a.bin"]),
    ],
)
def test_names_are_relative_to_the_common_folder(paths: list[str], names: list[str]) -> None:
    assert relative_names(paths) == names


@pytest.mark.parametrize(
    "uri",
    [
        "/data/x#y?z",
        "train-{0..3}.bin",
        "FILE:///data/a@b.bin",
        "S3://user@bucket/{a,b}",
        "s3://b/c?d",
        "simplecache::s3://me@b/c",
        "zip://a::sftp://me@host/x.zip",
        "zip::/data/a.zip",
    ],
)
def test_a_uri_is_shown_as_its_location_has_it(uri: str) -> None:
    assert shown_uri(uri) == parse_location(uri).text


def test_a_brace_list_is_shown_without_being_expanded() -> None:
    uri = "s3://key@bucket/{0..999999999}-{0..999999999}.tar"
    with pytest.raises(InvalidRequest):
        parse_location(uri)
    assert shown_uri(uri) == "s3://***@bucket/{0..999999999}-{0..999999999}.tar"
