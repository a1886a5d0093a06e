import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gyre_daemon.config import (
    DaemonConfig,
    DatasetConfig,
    Size,
    load,
    parse_dataset,
    parse_options,
    parse_size,
)
from gyre_daemon.errors import ConfigError


def written(folder: Path, text: str) -> Path:
    path = folder / "gyre.toml"
    path.write_text(text)
    return path


@dataclass(frozen=True)
class Options:
    length: int
    share: float = 0.5
    name: str = "x"
    fields: tuple[str, ...] = ()
    memory: Size = Size(1)
    limit: int | None = None


def test_flags_override_the_environment_and_that_the_file(tmp_path: Path) -> None:
    path = written(
        tmp_path, 'lease_s = 11\nmax_requests = 12\nmemory_budget = "13MiB"\nindex_dir = "/a"'
    )
    environment = {
        "GYRE_MAX_REQUESTS": "22",
        "GYRE_MEMORY_BUDGET": "23MiB",
        "GYRE_NUM_IO_THREADS": "24",
        "HOME": "/root",
    }
    flags = {"memory_budget": "33MiB", "log_level": "debug", "index_dir": None, "listen": None}
    effective = load(path, environment, flags)
    config, origins = effective.config, effective.origins
    assert (config.lease_s, origins["lease_s"]) == (11.0, "file")
    assert (config.max_requests, origins["max_requests"]) == (22, "environment")
    assert (config.memory_budget, origins["memory_budget"]) == (33 << 20, "flag")
    assert (config.num_io_threads, origins["num_io_threads"]) == (24, "environment")
    assert (config.log_level, origins["log_level"]) == ("debug", "flag")
    assert (config.index_dir, origins["index_dir"]) == ("/a", "file")
    assert (config.drain_timeout_s, origins["drain_timeout_s"]) == (10.0, "default")
    assert isinstance(config.memory_budget, Size)


def test_without_a_file_all_values_are_defaults() -> None:
    effective = load(None, {}, {})
    assert effective.config == DaemonConfig()
    assert set(effective.origins.values()) == {"default"}
    assert "datasets" not in effective.origins


def test_relative_paths_in_a_file_count_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etc").mkdir()
    written(
        tmp_path / "etc",
        """
        listen = ["unix:gyre.sock", "tcp:127.0.0.1:0"]
        index_dir = "index"
        tls_certificate = "/keys/a.pem"
        tls_key = "keys/a.key"
        report_dir = ""
        [tokens]
        ci = "tokens/ci"
        [datasets.a]
        uri = "../data/{0..3}.bin/"
        [datasets.b]
        uri = "/data"
        [datasets.c]
        uri = "s3://bucket/c"
        storage = { ca_file = "root.pem", region = "x" }
        """,
    )
    monkeypatch.chdir(tmp_path)
    environment = {"GYRE_CACHE_DIR": "cache"}
    config = load(Path("etc/gyre.toml"), environment, {"unpack_dir": "unpacked"}).config
    etc = tmp_path / "etc"
    assert config.listen == (f"unix:{etc}/gyre.sock", "tcp:127.0.0.1:0")
    assert config.index_dir == f"{etc}/index"
    assert (config.tls_certificate, config.tls_key) == ("/keys/a.pem", f"{etc}/keys/a.key")
    assert config.tokens == {"ci": f"{etc}/tokens/ci"}
    uris = [dataset.uri for dataset in config.datasets.values()]
    assert uris == [f"{etc}/../data/{{0..3}}.bin/", "/data", "s3://bucket/c"]
    assert config.datasets["c"].storage == {"ca_file": f"{etc}/root.pem", "region": "x"}
    # those of the shell count from where it is
    assert (config.cache_dir, config.unpack_dir, config.report_dir) == ("cache", "unpacked", "")


def test_a_link_to_a_file_has_the_folder_of_the_link(tmp_path: Path) -> None:
    """As a volume of Kubernetes links to the version of a configuration."""
    (tmp_path / "..data").mkdir()
    written(tmp_path / "..data", 'index_dir = "index"')
    (tmp_path / "gyre.toml").symlink_to("..data/gyre.toml")
    assert load(tmp_path / "gyre.toml", {}, {}).config.index_dir == f"{tmp_path}/index"


def test_what_names_absolute_paths_does_not_count_from_the_folder(tmp_path: Path) -> None:
    uris = ["{/data/a,/data/b}/*.bin", "{{/a,/b},/c}.bin", "pipe:cat x", "s3://{a,b}/c"]
    lines = [f"[datasets.d{number}]\nuri = '{uri}'" for number, uri in enumerate(uris)]
    config = load(written(tmp_path, "\n".join(lines)), {}, {}).config
    assert [dataset.uri for dataset in config.datasets.values()] == uris


def test_the_files_of_a_storage_s_credentials_count_from_the_folder(tmp_path: Path) -> None:
    text = """
    [datasets.a]
    uri = "gs://bucket/a"
    storage = { service_account = "keys/a.json", token_file = "/keys/b" }
    """
    config = load(written(tmp_path, text), {}, {}).config
    wanted = {"service_account": f"{tmp_path}/keys/a.json", "token_file": "/keys/b"}
    assert config.datasets["a"].storage == wanted


def test_a_list_is_a_list_or_text_with_commas(tmp_path: Path) -> None:
    path = written(tmp_path, 'listen = ["unix:/a", "tcp:127.0.0.1:0"]')
    assert load(path, {}, {}).config.listen == ("unix:/a", "tcp:127.0.0.1:0")
    assert load(path, {"GYRE_LISTEN": "unix:/b, unix:/c"}, {}).config.listen == (
        "unix:/b",
        "unix:/c",
    )
    assert load(path, {}, {"listen": ["unix:/d"]}).config.listen == ("unix:/d",)


def test_a_dataset_s_table_is_split_into_common_keys_and_options(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        [datasets.wiki]
        uri = "s3://bucket/wiki"
        format = "tokens"
        sequence_length = 128
        [datasets.wiki.storage]
        secret_access_key = "hunter2"
        [datasets."odd name"]
        uri = "/data"
        format = "webdataset"
        cache = false
        """,
    )
    datasets = load(path, {}, {}).config.datasets
    assert datasets == {
        "wiki": DatasetConfig(
            "s3://bucket/wiki", "tokens", {"sequence_length": 128}, {"secret_access_key": "hunter2"}
        ),
        "odd name": DatasetConfig("/data", "webdataset", {}, {}, cache=False),
    }
    assert "hunter2" not in repr(datasets), "nothing that prints a configuration prints credentials"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lease = 3", r"unknown key `lease` in .*gyre\.toml; did you mean `lease_s`\?"),
        ("memory_buget = 3", r"did you mean `memory_budget`\?"),
        (
            "zzz = 1",
            r"unknown key `zzz` in .*; known are admin, archives, .*datasets, .*listen",
        ),
        ("[dataset.wiki]\nuri='x'", r"unknown key `dataset` in .*; did you mean `datasets`\?"),
        ("lease_s = 'soon'", r"lease_s in .*gyre\.toml is 'soon': expected `float`$"),
        ("lease_s = true", r"lease_s in .* is True: expected `float`"),
        ("max_requests = 1.5", r"max_requests in .* is 1\.5: expected `int`"),
        ("max_requests = true", r"max_requests in .* is True: expected `int`"),
        ("max_requests = []", r"max_requests in .* is \[\]: expected `int`"),
        ("index_dir = 3", r"index_dir in .* is 3: expected `str`"),
        ("listen = 3", r"listen in .* is 3: expected a list"),
        ("listen = [3]", r"listen in .* is \[3\]: expected `str`"),
        ("listen = []", r"listen is empty"),
        (
            "memory_budget = 'much'",
            r"memory_budget in .* is 'much': expected a number of bytes such as 10",
        ),
        ("memory_budget = -1", r"memory_budget in .* is -1: expected a number of bytes"),
        ("memory_budget = 0", r"memory_budget is 0: no batch fits"),
        ("session_memory = 0", r"session_memory is 0"),
        ("lease_s = 0", r"lease_s in .* is 0: expected `float` > 0\.0"),
        ("lease_s = nan", r"lease_s in .* is nan: expected `float` > 0\.0"),
        ("lease_s = inf", r"lease_s in .* is inf: expected `float` <= 1"),
        (
            "drain_timeout_s = -1",
            r"drain_timeout_s in .* is -1: expected `float` >= 0\.0",
        ),
        ("drain_timeout_s = nan", r"drain_timeout_s in .* is nan"),
        ("max_requests = 0", r"max_requests in .* is 0: expected `int` >= 1"),
        ("num_io_threads = 0", r"num_io_threads in .* is 0"),
        ("prefetch_batches = -1", r"prefetch_batches in .* is -1: expected `int` >= 0"),
        (
            "log_level = 'loud'",
            r"log_level in .* is 'loud': expected one of debug, info, warning, error",
        ),
        ("log_format = 'xml'", r"log_format in .* is 'xml': expected one of auto, text, json"),
        ("datasets = 3", r"datasets is 3: expected a table"),
        ("job_weights = 3", r"job_weights is 3: expected a table"),
        ('[job_weights]\n"prod-*" = 0', r"job_weights.prod-\* is 0: expected `float` > 0\.0"),
        ("[job_weights]\na = true", r"job_weights.a is True: expected `float`"),
        ("[datasets]\nwiki = 3", r"datasets\.wiki is 3: expected a table"),
        ("[datasets.wiki]", r"`uri` is missing in datasets\.wiki"),
        ("[datasets.wiki]\nuri = ''", r"datasets\.wiki\.uri is '': expected `str` of length >= 1"),
        ("[datasets.wiki]\nformat = 'text'", r"`uri` is missing in datasets\.wiki"),
        ("[datasets.wiki]\nuri = 'x'\nformat = 3", r"datasets\.wiki\.format is 3: expected `str`"),
        (
            "[datasets.wiki]\nuri = 'x'\nformat = 'tokens'\nstorage = 's3'",
            r"datasets\.wiki\.storage is a text of 2 characters: expected a table",
        ),
        (
            "[datasets.wiki]\nuri = 'x'\nformat = 'tokens'\ncache = 'yes'",
            r"datasets\.wiki\.cache is 'yes': expected `bool`",
        ),
        ("cache_memory = -1", r"cache_memory in .* is -1: expected a number of bytes"),
        ("cache_disk = 'all'", r"cache_disk in .* is 'all': expected a number of bytes"),
        (
            "cache_dir = '/x'\ncache_memory = 0",
            r"blocks reach the disk through memory; give it some",
        ),
        ("lease_s = ", r"gyre\.toml is not valid TOML: Invalid value"),
        ("lease_s = 1\nlease_s = 2", r"gyre\.toml is not valid TOML"),
        ("a = " + "[" * 5000, r"gyre\.toml is not valid TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(written(tmp_path, text), {}, {})


@pytest.mark.parametrize(
    ("environment", "flags", "sentence"),
    [
        ({"GYRE_LEASE_S": "soon"}, {}, r"GYRE_LEASE_S is 'soon': expected `float`"),
        ({"GYRE_MAX_REQUESTS": ""}, {}, r"GYRE_MAX_REQUESTS is '': expected `int`"),
        ({"GYRE_MAX_REQUESTS": "1.5"}, {}, r"GYRE_MAX_REQUESTS is '1\.5': expected `int`"),
        (
            {"GYRE_MEMORY_BUDGET": "1 Mb"},
            {},
            r"GYRE_MEMORY_BUDGET is '1 Mb': expected a number of bytes",
        ),
        (
            {"GYRE_CACHE_DISK": "1 terabyte"},
            {},
            r"GYRE_CACHE_DISK is '1 terabyte': expected a number of bytes such as 1073741824",
        ),
        ({}, {"memory_budget": "lots"}, r"--memory-budget is 'lots': expected a number of bytes"),
        ({}, {"num_io_threads": "x"}, r"--num-io-threads is 'x': expected `int`"),
    ],
)
def test_a_mistake_in_the_environment_or_a_flag_is_named(
    tmp_path: Path, environment: dict[str, str], flags: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(written(tmp_path, ""), environment, flags)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: None, "cannot read the configuration .*: No such file or directory"),
        (lambda path: path.mkdir(), "cannot read the configuration .*: Is a directory"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "is not valid TOML"),
        (lambda path: path.symlink_to(path), "cannot read the configuration .*: Too many levels"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, make: Any, sentence: str) -> None:
    make(tmp_path / "gyre.toml")
    with pytest.raises(ConfigError, match=sentence):
        load(tmp_path / "gyre.toml", {}, {})


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("1B", 1),
        ("1KiB", 1 << 10),
        (" 64 MiB ", 64 << 20),
        ("1.5GiB", 3 << 29),
        ("2TiB", 2 << 40),
        ("1GB", 10**9),
        ("1 kB", 1000),
        ("1 KB", 1000),
        ("0.7MB", 700_000),
        ("1.1 TB", 1_100_000_000_000),
        ("1.0000000001KiB", 1024),
        ((1 << 53) + 1, (1 << 53) + 1),
    ],
)
def test_a_size_has_decimal_and_binary_units(text: str | int, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("key", ["memory_budget", "session_memory", "cache_memory", "cache_disk"])
def test_a_size_means_the_same_in_file_environment_and_flag(tmp_path: Path, key: str) -> None:
    for text, num_bytes in {
        "1GB": 10**9,
        "512MiB": 512 << 20,
        "1.5 GiB": 3 << 29,
        "1073741824": 1 << 30,
    }.items():
        in_file = load(written(tmp_path, f'{key} = "{text}"'), {}, {})
        in_environment = load(None, {f"GYRE_{key.upper()}": text}, {})
        in_flag = load(None, {}, {key: text})
        assert [getattr(each.config, key) for each in (in_file, in_environment, in_flag)] == [
            num_bytes
        ] * 3


@pytest.mark.parametrize(
    "text",
    ["", "MiB", "-1", "1Mb", "1G", "1 mib", "0x10", "1e9", "1,5MiB", "nan", "1 MiB MiB", "9" * 400],
)
def test_other_text_is_not_a_size(text: str) -> None:
    with pytest.raises(ValueError, match="expected a number of bytes such as"):
        parse_size(text)


def test_options_have_their_annotated_types() -> None:
    table = {
        "length": 3,
        "share": 1,
        "name": "n",
        "fields": ["a", "b"],
        "memory": "1KiB",
        "limit": 7,
    }
    assert parse_options(Options, table, "here") == Options(3, 1.0, "n", ("a", "b"), Size(1024), 7)
    as_text = {"length": "3", "share": "0.25", "fields": "a,b", "limit": "7"}
    assert parse_options(Options, as_text, "here") == Options(3, 0.25, "x", ("a", "b"), Size(1), 7)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({}, "`length` is missing in here"),
        ({"length": None}, "length in here is None: expected `int`"),
        ({"length": 1, "lengthy": 2}, r"unknown key `lengthy` in here; did you mean `length`\?"),
        ({"length": {"a": 1}}, "length in here is {'a': 1}: expected `int`"),
        ({"length": 1, "fields": "a", "name": 2}, "name in here is 2: expected `str`"),
        (
            {"length": "9" * 5000},
            "length in here is a text of 5000 characters: integer",
        ),
    ],
)
def test_a_mistake_in_options_is_named(table: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        parse_options(Options, table, "here")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("where", ["dataset `{0,1,2}.jsonl`", "{}", "{0.x}", "}{", "%s {key!r}"])
def test_braces_in_names_are_no_places_for_keys(where: str) -> None:
    assert parse_options(Options, {"length": 3}, where).length == 3
    with pytest.raises(ConfigError, match=re.escape(f"length in {where} is 'a'")):
        parse_options(Options, {"length": "a"}, where)
    assert parse_dataset(where, {"uri": "x", "stride": 2}).options == {"stride": 2}
    with pytest.raises(ConfigError, match=re.escape(f"datasets.{where}.uri")):
        parse_dataset(where, {"uri": 3})


def test_parsing_a_dataset_leaves_its_table_unchanged() -> None:
    table = {"uri": "x", "format": "tokens", "storage": {"a": 1}, "stride": 2}
    before = json.dumps(table)
    parse_dataset("wiki", table)
    assert json.dumps(table) == before


def test_an_unknown_key_of_a_table_without_keys() -> None:
    @dataclass(frozen=True)
    class Nothing:
        pass

    with pytest.raises(ConfigError, match=r"unknown key `zzz` in dataset `set`; there are none$"):
        parse_options(Nothing, {"zzz": 1}, "dataset `set`")
