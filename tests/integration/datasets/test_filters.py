"""Filters of a real daemon: samples are dropped from the order, for every kind of format."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gyre_client import Loader
from gyre_client.batches.batch import objects, texts
from gyre_client.errors import ConfigError, CursorRejected

from tests.conftest import StartDaemon

WORDS = ["x" * (each * 7 % 31) for each in range(100)]  # the texts of all samples
LONG = [each for each, word in enumerate(WORDS) if len(word) >= 12]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    for name in ("lines", "rows", "files/cat", "files/dog"):
        (folder / name).mkdir(parents=True)
    for shard in range(4):
        ids = range(25 * shard, 25 * shard + 25)
        lines = [json.dumps({"id": each, "text": WORDS[each]}) for each in ids]
        (folder / "lines" / f"{shard}.jsonl").write_text("\n".join(lines) + "\n")
        rows = pa.table({"id": list(ids), "text": [WORDS[each] for each in ids]})
        pq.write_table(rows, folder / "rows" / f"{shard}.parquet", row_group_size=3)
    (folder / "broken").mkdir()
    bad = [*lines[:5], "{", *lines[5:9], '{"id": [}', lines[9]]
    (folder / "broken" / "0.jsonl").write_text("\n".join(bad) + "\n")
    for each in range(10):
        kind = "cat" if each % 3 else "dog"
        (folder / "files" / kind / f"{each}.jpg").write_text(f"{kind} {each}")
    return folder


def test_what_is_left_is_read_once_an_epoch(gyred: StartDaemon, folder: Path) -> None:
    tables: dict[str, dict[str, Any]] = {
        "lines": {"format": "jsonl", "filter": "length(json) >= 12 + 20"},
        "rows": {"format": "parquet", "filter": "length(text) >= 12", "append": True},
        "broken": {
            "format": "jsonl",
            "filter": "length(json) > 1",
            "on_corrupt": "replace",
            "max_corrupt": 2,
        },
        "files": {"format": "files", "filter": 'value("class") == "cat"'},
    }
    config = {name: {"uri": str(folder / name), **table} for name, table in tables.items()}
    daemon = gyred({"datasets": config})

    def batches(name: str, num_epochs: int = 1, **arguments: Any) -> Iterator[dict[str, Any]]:
        with Loader(name, batch_size=4, address=daemon.address, tail="pad", **arguments) as loader:
            for _ in range(num_epochs):
                yield from loader

    for order in ("full", "block"):
        rows: list[int] = []
        for batch in batches("rows", 2, order=order):
            kept = batch["mask"].tolist()
            rows += [
                each for each, counts in zip(batch["id"].tolist(), kept, strict=True) if counts
            ]
            assert texts(batch, "text") == [WORDS[each] for each in batch["id"].tolist()]
        assert sorted(rows[: len(LONG)]) == sorted(rows[len(LONG) :]) == LONG
    lines = [
        each["id"]
        for batch in batches("lines")
        for each, counts in zip(objects(batch, "json"), batch["mask"].tolist(), strict=True)
        if counts
    ]
    longer = [
        each for each, word in enumerate(WORDS) if len(json.dumps({"id": each, "text": word})) >= 32
    ]
    assert sorted(lines) == longer
    mended = [each["id"] for batch in batches("broken") for each in objects(batch, "json")]
    assert len(set(mended)) == 10, "of eleven samples that are left, one stands in for another"
    found = {word for batch in batches("files") for word in texts(batch, "file")}
    assert found == {f"cat {each}" for each in range(10) if each % 3}

    # a filtered dataset grows too, and another filter is another dataset
    with Loader("rows", batch_size=4, address=daemon.address) as loader:
        next(loader)
        state = loader.state_dict()
    pq.write_table(
        pa.table({"id": [100, 101], "text": ["y" * 40, "short"]}), folder / "rows/9.parquet"
    )
    text = daemon.config_path.read_text()
    daemon.stop()
    daemon.restart()
    with Loader("rows", batch_size=4, address=daemon.address) as loader:
        loader.load_state_dict(state)
        assert loader.num_samples == len(LONG) + 1
    assert daemon.reconfigure(text.replace("length(text) >= 12", "length(text) >= 13"))["changed"]
    other = Loader("rows", batch_size=4, address=daemon.address)
    with other, pytest.raises(CursorRejected, match="other contents or other options"):
        other.load_state_dict(state)


def test_a_filter_that_does_not_fit_names_what_there_is(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"values of `it`; it has lengths, and the values of: no f"
    ):
        Loader(folder / "rows", options={"filter": "it > 3"}, batch_size=4)
