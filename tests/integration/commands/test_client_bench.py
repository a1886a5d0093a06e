"""`gyre bench` against a real daemon, and the loaders that it compares with."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from gyre_client import Loader
from gyre_client.bench import (
    GYRE,
    MAP,
    PIPELINE,
    STREAM,
    TABLE,
    batches_of,
    contenders_of,
    differing,
    find_files,
    task_of,
)
from gyre_client.command.cli import main
from gyre_client.errors import InvalidRequest
from gyre_protos.v1 import loader_pb2 as pb
from PIL import Image
from webdataset import TarWriter

NUM_SAMPLES = 40
ROWS: list[dict[str, Any]] = [
    {"number": row, "text": f"röw {row}" * (row % 5 + 1), "ids": list(range(row % 7))}
    for row in range(NUM_SAMPLES)
]


def write_tokens(folder: Path) -> None:
    np.arange(16 * NUM_SAMPLES, dtype=np.uint16).tofile(folder / "a.bin")


def write_npy(folder: Path) -> None:
    for part in range(2):
        np.save(folder / f"{part}.npy", np.arange(60, dtype=np.float32).reshape(20, 3) + part)


def write_tars(folder: Path) -> None:
    for shard in range(2):
        with TarWriter(str(folder / f"{shard:03}.tar")) as writer:
            for number in range(NUM_SAMPLES // 2):
                array = io.BytesIO()
                np.save(array, np.arange(6, dtype=np.float32).reshape(2, 3) + number)
                content = {"txt": "x" * number, "cls": str(number), "npy": array.getvalue()}
                writer.write({"__key__": f"{shard}{number:03}", **content})


def write_images(folder: Path) -> None:
    for number in range(NUM_SAMPLES):
        (folder / "ab"[number % 2]).mkdir(exist_ok=True)
        Image.new("RGB", (5, 4), (number, 0, 0)).save(folder / "ab"[number % 2] / f"{number}.png")


def write_json(folder: Path) -> None:
    for part in range(2):
        lines = "".join(json.dumps(row) + "\n" for row in ROWS[part::2])
        (folder / f"{part}.jsonl").write_text(lines)


def write_csv(folder: Path) -> None:
    with (folder / "a.csv").open("w", newline="") as file:
        rows = [["number", "text"], *([row["number"], row["text"]] for row in ROWS)]
        csv.writer(file).writerows(rows)


def write_text(folder: Path) -> None:
    (folder / "a.txt").write_text("".join(f"{row['text']}\n" for row in ROWS))


def write_parquet(folder: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "a.parquet", row_group_size=7)


def write_arrow(folder: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table)


def write_mds(folder: Path) -> None:
    streaming = pytest.importorskip("streaming")
    with streaming.MDSWriter(out=str(folder), columns={"number": "int"}) as writer:
        for row in ROWS:
            writer.write({"number": row["number"]})


CASES: list[tuple[Callable[[Path], None], dict[str, Any], list[str]]] = [
    (write_tokens, {"dtype": "uint16", "sequence_length": 16}, [MAP]),
    (write_npy, {}, [MAP]),
    (write_tars, {}, [MAP, PIPELINE, STREAM]),
    (write_images, {}, [MAP]),
    (write_json, {}, [TABLE, STREAM]),
    (write_csv, {}, [TABLE, STREAM]),
    (write_text, {}, [TABLE, STREAM]),
    (write_parquet, {}, [TABLE, STREAM]),
    (write_arrow, {}, [TABLE, STREAM]),
    (write_mds, {}, []),
]


# The libraries leave files to the collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("write", "options", "kinds"), CASES, ids=[each.__name__[6:] for each, _, _ in CASES]
)
def test_each_loader_of_a_format_gives_the_samples_of_the_daemon(
    private_daemon: None,
    write: Callable[[Path], None],
    options: dict[str, Any],
    kinds: list[str],
    tmp_path: Path,
) -> None:
    """Those that know samples by number, the same ones; the others, as many in a batch."""
    folder = tmp_path / "own"
    folder.mkdir()
    write(folder)
    with Loader(folder, batch_size=8, options=options, format="tokens" if options else None) as own:
        description = own._description
    found, missing = contenders_of(description.format)
    assert [each.kind for each in found if not each.num_workers] == [GYRE, *kinds]
    assert not missing
    task = {
        "dataset": str(folder),
        "is_location": True,
        "batch_size": 8,
        "seed": 1,
        "address": None,
        "daemon_user": None,
        **task_of(description, options, str(tmp_path / "cache")),
    }
    for kind in kinds:
        assert kind not in (MAP, TABLE) or differing(task, kind) == ""
        batch = next(batches_of(task, kind, 0))
        assert {len(values) for values in batch.values()} == {8}


@pytest.mark.usefixtures("private_daemon")
@pytest.mark.parametrize(
    ("write", "kinds"),
    [(write_tars, [MAP, PIPELINE, STREAM]), (write_mds, [])],
    ids=["tars", "mds"],
)
def test_loaders_are_measured_in_turns(
    write: Callable[[Path], None],
    kinds: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path)
    arguments = ["bench", str(tmp_path), "--batch-size", "8", "--seconds", "0.05", "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_samples"] == NUM_SAMPLES
    wanted = [(GYRE, 0), *((kind, workers) for kind in kinds for workers in (0, 2))]
    assert [(each["kind"], each["num_workers"]) for each in found["loaders"]] == wanted
    for each in found["loaders"]:
        assert min(each["samples_per_s"], each["bytes_per_s"], each["first_batch_s"]) > 0


@pytest.mark.usefixtures("private_daemon")
@pytest.mark.parametrize(
    ("header", "options"),
    [
        (np.array([20240520, 1, 3000, *[0] * 253], np.int32).tobytes(), []),
        (bytes(10), ["--option=header_bytes=10", "--option=stride=5"]),
    ],
    ids=["llm.c", "own"],
)
def test_files_of_tokens_behind_a_header(
    header: bytes, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.bin"
    path.write_bytes(header + np.arange(3000, dtype=np.uint16).tobytes())
    arguments = ["bench", str(path), "--format", "tokens", "--batch-size", "8", "--seconds", "0.05"]
    options = ["--option=dtype=uint16", "--option=sequence_length=16", *options]
    assert main([*arguments, *options]) == 0
    text = capsys.readouterr().out
    bars = [line.count("█") for line in text.splitlines() if "█" in line]
    assert len(bars) == 3
    assert max(bars) == 30


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["overlapping"], "the number of samples, 187 as read from here, differs"),
        (["tokens", "--batch-size", "1000"], "has only 187 samples"),
        (["tokens", "--seconds", "0"], "--seconds must be more than 0"),
        (["absent"], "absent"),
    ],
)
def test_refusals(
    gyred: Any,
    tmp_path: Path,
    arguments: list[str],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The stride in a daemon's definition is not known here."""
    np.arange(3000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    tokens = {"uri": f"{tmp_path}/*.bin", "format": "tokens", "dtype": "uint16"}
    overlapping = {**tokens, "sequence_length": 16, "stride": 5}
    datasets = {"tokens": {**tokens, "sequence_length": 16}, "overlapping": overlapping}
    more = [] if "--batch-size" in arguments else ["--batch-size", "8"]
    address = gyred({"datasets": datasets}).address
    assert main(["bench", *arguments, "--address", address, *more]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert complaint in captured.err


def test_files_are_found_as_the_daemon_finds_them(tmp_path: Path) -> None:
    expected = [tmp_path / f"{name}.bin" for name in ("09", "10")]
    for each in expected:
        each.write_bytes(bytes(6))
    here, known = str(tmp_path), pb.DatasetDescription(format="tokens", num_samples=3, num_bytes=12)
    for uri in (here, f"file://{here}", f"{here}/?[0-9].bin", f"{here}/{{09..10}}.bin"):
        known.uri = uri
        assert find_files(known) == expected
    for name, value, complaint in (
        ("uri", "s3://bucket/tokens.bin", "only local files"),
        ("uri", "/nowhere/at/all.bin", "cannot be read by this user"),
        ("num_bytes", 14, "as the daemon sees it"),
        ("num_samples", 10**9, "would fill the memory"),
    ):
        changed = pb.DatasetDescription()
        changed.CopyFrom(known)
        setattr(changed, name, value)
        with pytest.raises(InvalidRequest, match=complaint):
            find_files(changed)
