"""Lists that all have one length, as `padding="max_length"` makes them, arrive as arrays."""

from collections.abc import Mapping
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from gyre_client import Loader, padded
from gyre_client.command.cli import main
from gyre_client.errors import ConfigError, CorruptSample

from tests.conftest import Daemon, StartDaemon

ROWS, LENGTH = 48, 12
IDS = np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH)
COLUMNS: dict[str, list[Any]] = {
    "input_ids": IDS.tolist(),
    "weights": (IDS / 4).tolist(),
    "words": [[row] * (row % 3) for row in range(ROWS)],
    "label": list(range(ROWS)),
    "text": ["four"] * ROWS,
}
SHAPES = {"input_ids": (8, LENGTH), "weights": (8, LENGTH), "label": (8,)}
TRUNCATE = {"name": "truncate", "field": "input_ids", "length": 5}
CACHE = {"name": "cache"}


def store(folder: Path, name: str) -> str:
    """Two shards of a format, by its own writer; returns where they lie."""
    folder = folder / name
    folder.mkdir(parents=True)
    if name == "saved":
        Dataset.from_dict(COLUMNS).save_to_disk(folder, num_shards=2)
        return str(folder)
    table, half = pa.table(COLUMNS), ROWS // 2
    for shard, part in enumerate((table.slice(0, half), table.slice(half))):
        if name == "parquet":
            Dataset(part).to_parquet(folder / f"{shard}.parquet", batch_size=7)
        elif name == "compressed":
            path = str(folder / f"{shard}.arrow")
            feather.write_feather(part, path, compression="zstd", chunksize=7)
        else:
            Dataset(part).to_json(folder / f"{shard}.jsonl")
    return str(folder)


def check(batch: Mapping[str, Any]) -> list[int]:
    """Compare a batch of arrays with the rows; returns their numbers."""
    rows = [int(each) for each in batch["sample_id"]]
    np.testing.assert_array_equal(batch["input_ids"].numpy(), IDS[rows])
    np.testing.assert_array_equal(batch["label"].numpy(), rows)
    bounds = batch["words.offsets"].tolist()
    words = [batch["words"][bounds[k] : bounds[k + 1]].tolist() for k in range(len(rows))]
    assert words == [COLUMNS["words"][row] for row in rows]
    return rows


@pytest.fixture
def served(gyred: StartDaemon, tmp_path: Path) -> Daemon:
    names = ("saved", "parquet", "compressed", "json")
    tables: dict[str, Any] = {name: {"uri": store(tmp_path / "sets", name)} for name in names}
    tables["json"]["columns"] = ["*"]
    for name in names:
        tables[f"{name}-ragged"] = {**tables[name], "lengths": {"input_ids": 0}}
    saved = tables["saved"]
    tables |= {
        "renamed": {
            **saved,
            "columns": ["ids=input_ids", "weights", "label"],
            "rename": {"weights": "w"},
            "cast": {"w": "float16", "ids": "int32"},
            "lengths": {"weights": 0},
        },
        "grows": {**saved, "append": True},
        "declared": {**tables["parquet"], "append": True, "lengths": {"input_ids": LENGTH}},
        "filtered": {**saved, "filter": "length(input_ids) == 12 and length(words) == 2"},
        "late": {**saved, "filter": "length(input_ids) == 12 and label < 20"},
        "packed": {**saved, "pack": {"field": "input_ids", "length": 2 * LENGTH}},
        "shortened": {
            **saved,
            "transforms": [TRUNCATE],
            "pack": {"field": "input_ids", "length": 10},
        },
        "cached": {**tables["parquet"], "transforms": [{**TRUNCATE, "field": "words"}, CACHE]},
    }
    sizes = {"alike": LENGTH, "other": LENGTH + 1}
    for name, length in sizes.items():
        (tmp_path / name).mkdir()
        table = pa.table({"input_ids": pa.array([[1] * length] * 8, pa.list_(pa.int32()))})
        pq.write_table(table, tmp_path / name / "0.parquet")
        tables[name] = {"uri": str(tmp_path / name)}
    mixtures = {name: {"weights": {"saved": 1, name: 1}, "block": 8} for name in ("alike", "other")}
    return gyred(
        {
            "num_transform_workers": 1,
            "datasets": tables,
            "mixtures": {f"with-{name}": each for name, each in mixtures.items()},
        }
    )


def loader(daemon: Daemon, dataset: str, **keys: Any) -> Loader:
    keys = {"batch_size": 8, "tail": "pad", "seed": 3, **keys}
    return Loader(dataset, address=daemon.address, **keys)


def shapes(batch: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in batch.items()}


def ragged(batch: Mapping[str, Any], name: str) -> list[list[int]]:
    bounds = batch[f"{name}.offsets"].tolist()
    return [batch[name][a:b].tolist() for a, b in pairwise(bounds)]


def test_lists_of_one_length_are_arrays_unless_the_option_says_otherwise(
    served: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("saved", "parquet", "compressed", "json"):
        with loader(served, name) as reading:
            batches = list(reading)
            fingerprint = reading.fingerprint
            state = reading.state_dict()
        assert sorted(row for batch in batches for row in check(batch)) == list(range(ROWS))
        assert SHAPES.items() <= shapes(batches[0]).items()
        assert {"text.offsets", "words.offsets"} <= batches[0].keys()
        assert not {"input_ids.offsets", "weights.offsets"} & batches[0].keys()
        found, mask = padded(batches[0], "input_ids")
        assert found.equal(batches[0]["input_ids"])
        assert mask.all()
        assert mask.shape == found.shape
        with loader(served, f"{name}-ragged") as reading:
            assert reading.fingerprint == fingerprint
            reading.load_state_dict(state)  # which is of the same samples in the same order
            batch = next(iter(reading))
        rows = batch["sample_id"].tolist()
        assert ragged(batch, "input_ids") == IDS[rows].tolist()
        assert shapes(batch)["weights"] == (8, LENGTH)
    assert main(["describe", "saved", "--address", served.address]) == 0
    assert f"input_ids int32 [{LENGTH}]" in " ".join(capsys.readouterr().out.split())
    with loader(served, "renamed") as reading:
        batch = next(iter(reading))
    assert batch["ids"].numpy().dtype == np.int32
    np.testing.assert_array_equal(batch["ids"].numpy(), IDS[batch["sample_id"].tolist()])
    assert shapes(batch)["w"] == (8 * LENGTH,)


def test_a_dataset_that_may_grow_has_arrays_only_where_they_are_declared(served: Daemon) -> None:
    with loader(served, "grows") as reading:
        batch = next(iter(reading))
    assert ragged(batch, "input_ids") == IDS[batch["sample_id"].tolist()].tolist()
    with loader(served, "declared") as reading:
        check(next(iter(reading)))


def test_what_looks_at_lengths_goes_on_working(served: Daemon) -> None:
    for keys in (
        {"balance": {"field": "input_ids", "linear": 1.0}},
        {"bucket": {"field": "input_ids", "window_batches": 3}},
    ):
        with loader(served, "saved", **keys) as reading:
            assert sorted(row for batch in reading for row in check(batch)) == list(range(ROWS))
    for name, wanted in (("filtered", range(2, ROWS, 3)), ("late", range(20))):
        with loader(served, name) as reading:
            labels = {
                int(label)
                for batch in reading
                for label in batch["label"][batch["mask"]]
                if batch["input_ids"].shape == (8, LENGTH)
            }
        assert labels == set(wanted)
    with loader(served, "packed") as reading:
        packed = np.concatenate([batch["input_ids"][batch["mask"]].numpy() for batch in reading])
    assert packed.shape == (ROWS // 2, 2 * LENGTH)
    assert sorted(packed.reshape(-1).tolist()) == IDS.reshape(-1).tolist()


def test_transforms_see_lists_and_what_passes_them_is_an_array(served: Daemon) -> None:
    with loader(served, "saved", transform=[TRUNCATE]) as reading:
        batch = next(iter(reading))
    rows = batch["sample_id"].tolist()
    assert ragged(batch, "input_ids") == IDS[rows, :5].tolist()
    np.testing.assert_array_equal(batch["weights"].numpy(), IDS[rows] / 4)
    with loader(served, "shortened") as reading:
        packed = np.concatenate([batch["input_ids"][batch["mask"]].numpy() for batch in reading])
    assert sorted(packed.reshape(-1).tolist()) == sorted(IDS[:, :5].reshape(-1).tolist())
    with loader(served, "cached") as reading:
        assert sorted(row for batch in reading for row in check(batch)) == list(range(ROWS))


def test_sources_of_a_mixture_with_other_lengths_are_ragged(served: Daemon) -> None:
    with loader(served, "with-alike", tail="wrap") as reading:
        assert next(iter(reading))["input_ids"].shape == (8, LENGTH)
    with loader(served, "with-other", tail="wrap") as reading:
        for batch in islice(reading, 4):
            sizes = batch["input_ids.offsets"].diff().tolist()
            names = batch["source"].tolist()
            assert sizes == [(LENGTH, LENGTH + 1)[name] for name in names]


def test_lists_of_other_lengths_and_of_bytes_stay_ragged(
    tmp_path: Path, private_daemon: None
) -> None:
    numbers = pa.list_(pa.int32())
    bytes_ = pa.list_(pa.uint8())
    first = pa.table(
        {
            "one": pa.array([[1, 2], [3, 4]], numbers),
            "null": pa.array([[1, 2], None], numbers),
            "none": pa.array([[], []], numbers),
            "bytes": pa.array([[1, 2], [3, 4]], bytes_),
            "pairs": pa.array([[[1, 2]], [[3, 4]]], pa.list_(pa.list_(pa.int32(), 2))),
            "ids": [[1, 2], [3, 4]],
        }
    )
    pq.write_table(first, tmp_path / "0.parquet")
    last = first.slice(0, 1).set_column(0, "one", pa.array([[1, 2, 3]], numbers))
    pq.write_table(last, tmp_path / "1.parquet")
    with Loader(str(tmp_path), batch_size=3) as reading:
        batch = next(iter(reading))
    is_ragged = {name for name in first.column_names if f"{name}.offsets" in batch}
    assert is_ragged == {"one", "null", "none", "bytes"}
    assert shapes(batch)["pairs"] == (3, 1, 2)
    with Loader(str(tmp_path / "1.parquet"), batch_size=1) as reading:
        assert shapes(next(iter(reading)))["one"] == (1, 3)
    for options, reason in (
        ({"lengths": {"two": 0}}, "`lengths` has 'two', and there is no such field; there are one"),
        ({"lengths": {"one": -1}}, "expected `int` >= 0"),
        ({"lengths": {"one": 2}}, "a list of 3 elements, and 2 are declared"),
    ):
        with pytest.raises((ConfigError, CorruptSample), match=reason):
            Loader(str(tmp_path), batch_size=1, options=options)
