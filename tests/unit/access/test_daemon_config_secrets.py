"""What a configuration cannot be, and secrets that a message could repeat."""

import os
from pathlib import Path
from typing import Any

import pytest
from gyre_daemon.config import load, parse_dataset, parse_size
from gyre_daemon.config.load import misspelt_variables
from gyre_daemon.config.schema import hide, shown
from gyre_daemon.errors import ConfigError
from gyre_daemon.service.requests import to_ad_hoc
from gyre_protos.v1 import loader_pb2 as pb

SECRET = "wJalrXUtnFEMI-K7MDENG"


def written(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "gyre.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("num_io_threads = 1000000000", r"is 1000000000: expected `int` <= 1024"),
        ("num_copy_workers = 1000000000", r"expected `int` <= 1024"),
        ("max_requests = 1000000000000", r"expected `int` <= 1048576"),
        ("memory_budget = 1.5", r"memory_budget in .* is 1\.5: expected a number of bytes"),
        ("memory_budget = 1e9", r"expected a number of bytes"),
        ("memory_budget = '1.5'", r"expected a number of bytes"),
        ("memory_budget = '1.5 B'", r"expected a number of bytes"),
        ("memory_budget = inf", r"expected a number of bytes"),
        ("memory_budget = nan", r"expected a number of bytes"),
        ("cache_disk = '10000000TiB'", r"expected at most 1152921504606846976 bytes, an EiB"),
        ("read_deadline_s = nan", r"expected `float` > 0"),
        ("read_deadline_s = -1", r"expected `float` > 0"),
        ("[job_weights]\na = nan", r"expected `float` > 0"),
    ],
)
def test_what_cannot_be(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(written(tmp_path, text), {}, {})


def test_a_fraction_of_a_unit_is_a_size() -> None:
    assert parse_size("1.5KiB") == 1536


@pytest.mark.parametrize(
    "table",
    [
        f"[datasets.a]\nuri = 'x'\nformat = 'tokens'\nstorage = '{SECRET}'",
        f"[datasets.a]\nuri = 'x'\nformat = 'tokens'\ncache = '{SECRET}'",
        f"[datasets.a]\nuri = 'x'\nformat = ['{SECRET}']",
        f"[datasets.a]\nuri = {{ secret = '{SECRET}' }}\nformat = 'tokens'",
        f"datasets = '{SECRET}'",
        f"lease_s = '{SECRET}'",
        f"memory_budget = '{SECRET}'",
        f"log_level = '{SECRET}'",
        f"index_dir = ['{SECRET}']",
        f"[job_weights]\na = '{SECRET}'",
        f"[job_weights]\nsecret_access_key = '{SECRET}'",
        f"secret_access_key = '{SECRET}'",
        f"[datasets.a.storage]\nsecret_access_key = '{SECRET}'",
        f"[datasets.a]\nsecret = '{SECRET}' x",
    ],
)
def test_a_value_under_a_wrong_key_is_not_repeated(tmp_path: Path, table: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(written(tmp_path, table), {}, {})
    assert SECRET not in str(refused.value)


def test_a_value_in_the_environment_is_not_repeated() -> None:
    with pytest.raises(ConfigError, match="GYRE_LEASE_S is a text of 21 characters"):
        load(None, {"GYRE_LEASE_S": SECRET}, {})


def test_an_option_of_a_client_is_not_repeated() -> None:
    options = {"storage": pb.OptionValue(text=SECRET)}
    with pytest.raises(ConfigError, match="storage") as it:
        to_ad_hoc(pb.AdHocDataset(uri="x", format="tokens", options=options))
    assert SECRET not in str(it.value)


@pytest.mark.parametrize(
    ("value", "key", "text"),
    [
        ("loud", "log_level", "'loud'"),
        ("1 Mb", "memory_budget", "'1 Mb'"),
        (3, "x", "3"),
        ([1, "a"], "x", "[1, 'a']"),
        ({"a": SECRET}, "x", "a table"),
        (["a", SECRET], "x", "a list"),
        ("short", "datasets.x.storage", "a text of 5 characters"),
        (12345, "token", "a number"),
        (1.5, "job_weights.password in here", "a number"),
        (True, "secret", "a value of type bool"),
        (2, "token_dtype in here", "2"),
        (2, "format in /etc/secret/gyre.toml", "2"),
        (2, "datasets.tokens.format", "2"),
    ],
)
def test_what_a_message_shows(value: Any, key: str, text: str) -> None:
    assert shown(value, key) == text


STORED = (
    "[datasets.wiki]\nuri = 's3://b/x'\nformat = 'tokens'\n"
    f"[datasets.wiki.storage]\n{{}} = '{SECRET}'"
)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
@pytest.mark.parametrize("key", ["secret_access_key", "session_token", "password", "account_key"])
def test_secrets_that_others_may_read_are_a_warning(tmp_path: Path, mode: int, key: str) -> None:
    path = written(tmp_path, STORED.format(key), mode)
    (warning,) = load(path, {}, {}).warnings
    assert f"{path} holds secrets, such as those of dataset `wiki`, and " in warning
    assert f"may read it (mode {mode:04o}); `chmod 0600` it" in warning
    assert SECRET not in warning


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        (STORED.format("secret_access_key"), 0o600),
        (STORED.format("region"), 0o644),
        (STORED.format("access_key_id"), 0o644),
        ("[datasets.wiki]\nuri = '/x'\nformat = 'tokens'\ntoken_dtype = 'x'", 0o644),
    ],
)
def test_without_secrets_or_readers_there_is_no_warning(
    tmp_path: Path, text: str, mode: int
) -> None:
    assert load(written(tmp_path, text, mode), {}, {}).warnings == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("GYRE_MEMORY_BUGDET", "GYRE_MEMORY_BUDGET"),
        ("GYRE_MEMORY_BUDGETS", "GYRE_MEMORY_BUDGET"),
        ("GYRE_LOGLEVEL", "GYRE_LOG_LEVEL"),
        ("GYRE_INDEXDIR", "GYRE_INDEX_DIR"),
    ],
)
def test_a_misspelt_variable_is_a_warning(name: str, meant: str) -> None:
    (warning,) = load(None, {name: SECRET}, {}).warnings
    assert f"the environment has '{name}', which nothing reads; did you mean {meant}?" in warning
    assert SECRET not in warning


@pytest.mark.parametrize(
    "name",
    ["GYRE_MEMORY_BUDGET", "GYRE_ADDRESS", "GYRE_TOKEN_FILE", "GYRE_TLS_CA", "GYRE_TRAIN_LEVEL",
     "GYRE_TRACEBACK", "GYRE_DATA", "GYRE_SOMETHING_ELSE", "MEMORY_BUGDET", "HOME"],
)  # fmt: skip
def test_other_variables_are_none(name: str) -> None:
    assert misspelt_variables([name], ["GYRE_MEMORY_BUDGET", "GYRE_LISTEN"]) == []


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (os.mkfifo, "it is a pipe, a socket or a device. Name a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a pipe, a socket or a device"),
        (lambda path: path.write_bytes(b"#" * (4 << 20) + b"\n"), "is larger than 4 MiB"),
        (lambda path: path.write_bytes(b"x = '\xff" + SECRET.encode()), "byte 5 is not UTF-8"),
        (Path.mkdir, "Is a directory"),
    ],
)
def test_what_is_no_configuration_is_refused_at_once(
    tmp_path: Path, make: Any, sentence: str
) -> None:
    make(tmp_path / "gyre.toml")
    with pytest.raises(ConfigError, match=sentence) as refused:
        load(tmp_path / "gyre.toml", {}, {})
    assert SECRET not in str(refused.value)


def test_a_drivers_message_has_no_values_of_settings() -> None:
    settings = {"region": "x", "options": {"keys": [SECRET, 12345]}}
    text = f"Invalid {SECRET}/12345 in x"
    assert hide(text, settings) == "Invalid ***/*** in x"


@pytest.mark.parametrize(
    "table", [SECRET, [SECRET], {"uri": "x", "format": "x", "follow_links": SECRET}]
)
def test_a_dataset_that_is_none_is_not_repeated(table: object) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_dataset("a", table)
    assert SECRET not in str(refused.value)
