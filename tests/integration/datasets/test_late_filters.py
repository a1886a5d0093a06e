"""Filters over values that only the shards have, and over lengths that transforms make."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from gyre_client import Loader
from gyre_client.command.cli import main
from gyre_client.errors import ConfigError, CorruptSample
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection
from gyre_protos.v1 import loader_pb2 as pb

from tests.batches import take
from tests.conftest import StartDaemon, to_toml

N = 60
LANGUAGES = ["en", "de", "", "é"]
TEXTS = ["wörd " * (each % 9) for each in range(N)]
ROWS: list[dict[str, Any]] = [
    {"id": each, "score": each / 7, "lang": LANGUAGES[each % 4], "text": TEXTS[each]}
    for each in range(N)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("parquet", "arrow", "jsonl", "csv"):
        (tmp_path / name).mkdir()
    for shard in range(2):
        rows = ROWS[shard * N // 2 : (shard + 1) * N // 2]
        table = pa.Table.from_pylist(rows)
        pq.write_table(table, tmp_path / "parquet" / f"{shard}.parquet", row_group_size=7)
        feather.write_feather(
            table, str(tmp_path / "arrow" / f"{shard}.arrow"), compression="uncompressed"
        )
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "jsonl" / f"{shard}.jsonl").write_text(lines)
        cells = "".join(f"{row['id']},{row['lang']}\n" for row in rows)
        (tmp_path / "csv" / f"{shard}.csv").write_text("id,lang\n" + cells)
    return tmp_path


def ids(address: str, name: str, **keys: Any) -> list[int]:
    """The ids of all samples of an epoch, in rising order."""
    with Loader(name, batch_size=1, address=address, **keys) as loader:
        return sorted(int(batch["id"][0]) for batch in take(loader, loader.num_samples))


def test_columns_are_compared_and_read_once(
    gyred: StartDaemon, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = 'score >= 2 and lang in ["en", "é"] and length(text) > 6'
    expected = [
        row["id"]
        for row in ROWS
        if row["score"] >= 2 and row["lang"] in ("en", "é") and len(row["text"].encode()) > 6
    ]
    columns = {"columns": ["id", "score", "lang", "text"]}
    config: dict[str, Any] = {
        "datasets": {
            "parquet": {"uri": str(folder / "parquet"), "filter": text},
            "arrow": {"uri": str(folder / "arrow"), "filter": text, "rename": {"score": "mark"}},
            "jsonl": {"uri": str(folder / "jsonl"), "filter": text, **columns},
            "csv": {
                "uri": str(folder / "csv"),
                "filter": 'lang == "de" or id < 3',
                "types": {"id": "int64"},
            },
        }
    }
    config["datasets"]["arrow"]["filter"] = text.replace("score", "mark")
    config["mixtures"] = {"both": {"weights": {"parquet": 1, "arrow": 1}, "block": 4}}
    daemon = gyred(config)
    for name in ("parquet", "arrow", "jsonl"):
        assert ids(daemon.address, name) == expected, name
    assert ids(daemon.address, "csv") == [each for each in range(N) if each % 4 == 1 or each < 3]
    assert set(ids(daemon.address, "both")) == set(expected)
    with Loader("parquet", batch_size=4, seed=3, address=daemon.address) as loader:
        next(loader)
        state = loader.state_dict()
        following = next(loader)["id"].tolist()
    assert main(["describe", "parquet", "--address", daemon.address, "--num", "1"]) == 0
    assert f"{N - len(expected)} out" in capsys.readouterr().out
    (folder / "cursor").write_bytes(state["cursor"])
    rewind = ["rewind", str(folder / "cursor"), "--dataset", "parquet", "--step", "1", "--json"]
    assert main([*rewind, "--address", daemon.address]) == 0
    (step,) = json.loads(capsys.readouterr().out)["steps"]
    half = N // 2
    assert [
        row["samples"][0]["row"] + half * int(step["shards"][row["samples"][0]["shard"]][0])
        for row in step["rows"]
    ] == following

    def num_read() -> int:
        return sum(each["event"] == "column read" for each in daemon.events())

    read = num_read()
    assert read == 2 * 2 * 4  # two columns of two shards of four datasets
    daemon.stop()
    daemon.restart()
    with Loader("parquet", batch_size=4, seed=3, address=daemon.address) as loader:
        loader.load_state_dict(state)
        assert next(loader)["id"].tolist() == following
    assert num_read() == read  # the columns were in their sidecars
    wrong = {
        'lang == "fr"': "is no class of `lang`; its classes are: , de, en, é",
        "text > 3": "`text` is text; compare it with text in quotes",
        "score > 1000": "leaves none of 60 samples",
        "append": "`append` is filtered by its index alone",
    }
    for number, (filter_, message) in enumerate(wrong.items()):
        its: dict[str, Any] = {"uri": str(folder / "parquet"), "filter": filter_}
        if filter_ == "append":
            its |= {"filter": "score > 2", "append": True}
        tables = {**config["datasets"], f"wrong{number}": its}
        daemon.reconfigure(to_toml({"listen": [daemon.address], **config, "datasets": tables}))
        with pytest.raises(ConfigError, match=message):
            Loader(f"wrong{number}", batch_size=1, address=daemon.address)


def test_index_reads_columns_and_says_how_far_it_is(
    gyred: StartDaemon, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    its: dict[str, Any] = {"uri": str(folder / "parquet")}
    tokenize = {"name": "tokenize", "field": "text", "tokenizer": "bytes"}
    filter_ = 'score >= 2 and lang == "en"'
    both = {"transforms": [tokenize], "filter": f"{filter_} and length(tokens) > 6"}
    datasets: dict[str, Any] = {
        "plain": {**its, "filter": filter_},
        "made": {**its, "uri": str(folder / "arrow"), **both},
        "none": {**its, "filter": "score > 1000"},
        "grows": {**its, "filter": "score > 1", "append": True},
    }
    daemon = gyred({"num_transform_workers": 1, "datasets": datasets})

    def index(name: str, *flags: str) -> tuple[int, str]:
        status = main(["index", name, "--address", daemon.address, *flags])
        found = capsys.readouterr()
        return status, found.out + found.err

    def events(name: str) -> int:
        return sum(each["event"] == name for each in daemon.events())

    status, text = index("plain", "--json")
    assert status == 0, text
    read = {"num_shards": 2, "num_reused": 0}
    assert json.loads(text)["columns"] == {"lang": read, "score": read}
    assert events("column read") == 4
    assert len(ids(daemon.address, "plain")) == N // 4 - 4  # nothing is read twice
    assert events("column read") == 4
    half = pa.Table.from_pylist(ROWS[N // 2 :])
    pq.write_table(half, folder / "new", row_group_size=5)
    (folder / "new").replace(folder / "parquet" / "1.parquet")
    status, text = index("plain")
    assert status == 0, text
    assert "column       lang of 2 shards, 1 of them read before" in text
    assert "column       score of 2 shards, 1 of them read before" in text
    assert events("column read") == 6
    with Connection(parse_address(daemon.address)) as connection:
        messages = list(connection.index(pb.DatasetRef(name="made")))
    told = [each.column.name or ("measured" * each.HasField("measured")) for each in messages]
    assert [name for name, _ in groupby(told)] == ["", "lang", "score", "measured"]
    last = dict(zip(told, messages, strict=True))
    assert all(last[name].column.shards_done == 2 for name in ("lang", "score"))
    assert last["measured"].measured.shards_done == 2
    assert (events("column read"), events("shard measured")) == (10, 2)
    expected = [each for each in range(14, N) if each % 4 == 0 and len(TEXTS[each].encode()) > 6]
    assert ids(daemon.address, "made") == expected
    assert (events("column read"), events("shard measured")) == (10, 2)
    assert index("none") == (2, "gyre: the filter 'score > 1000' leaves none of 60 samples\n")
    status, text = index("grows")
    assert (status, "is filtered by its index alone" in text) == (2, True), text


def test_lengths_that_transforms_make_are_compared(gyred: StartDaemon, folder: Path) -> None:
    tokenize = {"name": "tokenize", "field": "text", "tokenizer": "bytes", "end": 256}
    dataset = {
        "uri": str(folder / "parquet"),
        "transforms": [tokenize],
        "filter": "10 < length(tokens) <= 40 and id != 4",
    }
    daemon = gyred({"datasets": {"made": dataset}})
    expected = [each for each in range(N) if 10 < len(TEXTS[each].encode()) + 1 <= 40 and each != 4]
    assert ids(daemon.address, "made") == expected
    assert ids(daemon.address, "made", transform=[]) == expected  # also as they are stored
    measured = [each for each in daemon.events() if each["event"] == "shard measured"]
    assert len(measured) == 2  # once, and not again for what is left
    pack = {"field": "tokens", "length": 64}
    with Loader("made", batch_size=2, address=daemon.address, pack=pack) as loader:
        found = [batch["tokens"] for batch in loader]
    assert sum(int((each == 256).sum()) for each in found) == len(expected)


def test_a_corrupt_value_that_a_filter_compares_is_never_replaced(
    gyred: StartDaemon, tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text("id,n\n0,7\n1,seven\n2,70\n3,700\n")
    with (tmp_path / "a.jsonl").open("w") as file:
        for each in range(4000):
            file.write(json.dumps({"id": each, "n": 7, "text": "x" * 40}) + "\n")
            file.write('{"id": 1, "n": 7, "text": "x\n' * (each == 2000))
    pq.write_table(
        pa.table({"id": range(4), "n": [7, 700, 70, 7], "text": ["a", "b", "c", "d"]}),
        tmp_path / "a.parquet",
        row_group_size=2,
    )
    keys: dict[str, dict[str, Any]] = {
        "csv": {"types": {"id": "int64", "n": "int64"}},
        "jsonl": {"columns": ["id", "n", "text"]},
        "parquet": {"cast": {"n": "uint8"}},
    }
    datasets = {
        f"{name}-{way}": {
            "uri": str(tmp_path / f"a.{name}"),
            "on_corrupt": "replace",
            "max_corrupt": 0.5,
            "filter": text,
            **its,
        }
        for name, its in keys.items()
        for way, text in (("column", "n < 71"), ("index", "1 == 1"))
    }
    daemon = gyred({"datasets": datasets})
    for name, place in (("csv", "sample 1"), ("jsonl", "line"), ("parquet", "sample 1")):
        remedy = rf"{place}.*A filter compares 'n', .*on_corrupt = \"replace\".*gyre lint"
        with pytest.raises(CorruptSample, match=remedy):
            Loader(f"{name}-column", batch_size=1, address=daemon.address)
        assert ids(daemon.address, f"{name}-index")


def test_columns_under_one_name_are_filtered_apart(gyred: StartDaemon, folder: Path) -> None:
    """Decoded rows of either lie alike."""
    pq.write_table(
        pa.table({"id": range(9), "up": range(9), "down": range(8, -1, -1)}),
        folder / "scores.parquet",
    )
    datasets = {
        column: {
            "uri": str(folder / "scores.parquet"),
            "columns": ["id", f"score={column}"],
            "filter": "score >= 7",
        }
        for column in ("up", "down")
    }
    daemon = gyred({"datasets": datasets})
    assert ids(daemon.address, "up") == [7, 8]
    assert ids(daemon.address, "down") == [0, 1]
