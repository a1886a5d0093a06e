"""`gyre bench` against a real daemon, and the DataLoaders that it compares with."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_client.bench.comparison import located
from gyre_client.bench.dataset_files import find_files, token_stride
from gyre_client.bench.stopwatch import differing
from gyre_client.command.cli import main
from gyre_client.errors import InvalidRequest
from gyre_client.transport.address import parse_address
from gyre_client.transport.connection import Connection
from gyre_protos.v1 import loader_pb2 as pb
from webdataset import TarWriter

LABELS = [
    "Gyre",
    "DataLoader, tuned, in process",
    "DataLoader, tuned, 2 workers",
    "DataLoader, plain, in process",
    "DataLoader, plain, 2 workers",
]


@pytest.fixture
def daemon(gyred: Any, token_files: Path, tmp_path: Path) -> Any:
    shards = tmp_path / "shards"
    shards.mkdir()
    for shard in range(2):
        with TarWriter(str(shards / f"{shard:03}.tar")) as writer:
            for n in range(15):
                array = io.BytesIO()
                np.save(array, np.arange(6, dtype=np.float32).reshape(2, 3) + n)
                content = {
                    "txt": f"{shard} {n}" * n,
                    "cls": str(n),
                    "npy": array.getvalue(),
                    "jpg": bytes([n]) * (n % 4),
                }
                writer.write({"__key__": f"{shard}{n:03}", **content})
    return gyred(
        {
            "datasets": {
                "tokens": {
                    "uri": f"{token_files}/*.bin",
                    "format": "tokens",
                    "dtype": "uint16",
                    "sequence_length": 16,
                },
                "overlapping": {
                    "uri": str(token_files),
                    "format": "tokens",
                    "dtype": "uint16",
                    "sequence_length": 16,
                    "stride": 5,
                },
                "mixed": {"uri": f"{shards}/{{000..001}}.tar", "format": "webdataset"},
            }
        }
    )


def test_the_table_of_a_named_dataset(daemon: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "bench",
        "mixed",
        "--batch-size",
        "8",
        "--seconds",
        "0.05",
        "--address",
        daemon.address,
    ]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    _, _, rest = text.partition("LOADER")
    rows = rest.splitlines()[1:6]
    assert [row[: len(label)] for row, label in zip(rows, LABELS, strict=True)] == LABELS
    bars = [row.count("█") for row in rows]
    assert max(bars) == 30
    assert min(bars) >= 1


def test_an_ad_hoc_dataset_behind_a_header_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.bin"
    path.write_bytes(bytes(10) + np.arange(3000, dtype=np.uint16).tobytes())
    options = ("dtype=uint16", "sequence_length=16", "stride=5", "header_bytes=10")
    arguments = ["bench", str(path), "--format", "tokens", "--batch-size", "8", "--seconds", "0.05"]
    arguments += [part for option in options for part in ("--option", option)]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_samples"] == (3000 - 16) // 5 + 1
    assert found["batch_size"] == 8
    assert [loader["label"] for loader in found["loaders"]] == LABELS
    assert all(
        loader["samples_per_s"] > 0 and loader["first_batch_s"] > 0 for loader in found["loaders"]
    )


def header_of_npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros(4000, np.uint16))
    return file.getvalue()[:-8000]


@pytest.mark.parametrize(
    ("name", "header", "options"),
    [
        ("ids.npy", header_of_npy(), {}),
        ("llm_c.bin", np.array([20240520, 1, 4000, *[0] * 253], np.int32).tobytes(), {}),
        ("own.bin", bytes(10), {"dtype": "uint16", "header_bytes": 10}),
    ],
)
def test_batches_of_files_with_a_header_are_those_of_the_daemon(
    gyred: Any, tmp_path: Path, name: str, header: bytes, options: dict[str, Any]
) -> None:
    path = tmp_path / name
    path.write_bytes(header + np.arange(4000, dtype=np.uint16).tobytes())
    dataset = {"uri": str(path), "format": "tokens", "sequence_length": 16, **options}
    task = {
        "dataset": "ids", "batch_size": 8, "seed": 1, "daemon_user": None, "format": None,
        "address": gyred({"datasets": {"ids": dataset}}).address, "options": options,
    }  # fmt: skip
    with Connection(parse_address(task["address"])) as connection:
        description = connection.describe(pb.DatasetRef(name="ids"))
    assert description.num_samples == 250
    with located(description, task, lambda stage: None) as (files, _):
        assert differing({**task, **files, "options": None}, 3) == ""
        elsewhere = {**files, "header_bytes": len(header) + 2}
        assert differing({**task, **elsewhere, "options": None}, 3) == "tokens"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["overlapping"], "do not begin every 16 tokens"),
        (["tokens", "--batch-size", "1000"], "has only 186 samples"),
        (["tokens", "--seconds", "0"], "--seconds must be more than 0"),
        (["absent"], "absent"),
    ],
)
def test_refusals(
    daemon: Any, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "bench",
                *arguments,
                "--address",
                daemon.address,
                *(["--batch-size", "8"] if "--batch-size" not in arguments else []),
            ]
        )
        == 2
    )
    captured = capsys.readouterr()
    assert captured.out == ""
    assert complaint in captured.err


def test_files_with_other_contents_are_refused(daemon: Any, token_files: Path) -> None:
    """As large as the daemon's, but not them: a user's stale copy."""
    task = {
        "dataset": "tokens", "batch_size": 8, "seed": 1, "address": daemon.address,
        "daemon_user": None, "format": None, "options": None, "stride": 16, "header_bytes": None,
        "files": [str(token_files / f"{name}.bin") for name in "abcd"],
        "fields": [("tokens", "uint16", [16], False)],
    }  # fmt: skip
    assert differing(task, 20) == ""
    stale = token_files.parent / "stale.bin"
    stale.write_bytes(bytes((token_files / "a.bin").stat().st_size))
    assert differing(task | {"files": [str(stale), *task["files"][1:]]}, 20) == "tokens"


@pytest.fixture
def description(token_files: Path) -> pb.DatasetDescription:
    field = pb.Field(name="tokens", dtype="uint16", shape=[16])
    return pb.DatasetDescription(
        format="tokens",
        uri=str(token_files),
        num_samples=186,
        num_shards=4,
        num_bytes=6006,
        fields=[field],
    )


def test_files_are_found_as_the_daemon_finds_them(
    description: pb.DatasetDescription, token_files: Path
) -> None:
    expected = [token_files / f"{name}.bin" for name in "abcd"]
    for uri in (
        token_files,
        f"file://{token_files}",
        f"{token_files}/?.bin",
        f"{token_files}/{{a,b,c,d}}.bin",
    ):
        description.uri = str(uri)
        assert find_files(description) == expected
    assert token_stride(description, expected, 0) == 16
    (token_files / "10.bin").write_bytes(b"")
    (token_files / "09.bin").write_bytes(b"")
    description.uri, description.num_shards, description.num_bytes = (
        f"{token_files}/{{09..10}}.bin",
        2,
        0,
    )
    assert find_files(description) == [token_files / "09.bin", token_files / "10.bin"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"uri": "s3://bucket/tokens.bin"}, "only local files"),
        ({"uri": "data/tokens.bin"}, "only local files"),
        ({"uri": "/nowhere/at/all.bin"}, "cannot be read by this user"),
        ({"format": "parquet"}, "only tokens and webdataset"),
        ({"num_shards": 5}, "as the daemon sees it"),
        ({"num_bytes": 6008}, "as the daemon sees it"),
        ({"num_samples": 10**9}, "would fill the memory"),
    ],
)
def test_files_that_cannot_be_compared(
    description: pb.DatasetDescription, change: dict[str, Any], complaint: str
) -> None:
    for name, value in change.items():
        setattr(description, name, value)
    with pytest.raises(InvalidRequest, match=complaint):
        find_files(description)
