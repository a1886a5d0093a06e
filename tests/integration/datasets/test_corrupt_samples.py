"""Corrupt samples under `on_corrupt = "replace"`: others in their places, counted and reported."""

import io
import json
import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import zstandard
from gyre_client import Loader
from gyre_client.command.cli import main
from gyre_client.errors import CorruptSample
from gyre_daemon.order.cursor import decode_cursor
from PIL import Image
from tensorboard.summary.writer.record_writer import RecordWriter

from tests.conftest import SERVE, Daemon, to_toml
from tests.daemons import status
from tests.preloaded.interpreter import Interpreter

NUM_SAMPLES, SIZE = 60, 6
BROKEN_HEADER = 5 * 512  # of the second sample, whose predecessor has a member of 0 bytes
BAD_LINES, BAD_RECORDS, BAD_MEMBERS = [3, 31, 59], [7, 8], [0, 10, 33]
BAD_GROUPS, BAD_BATCHES = [*range(20, 30), *range(40, 50)], [*range(10, 20)]

LINES = ['{"n": 1, "t": "wörd"}', "", '{"n": 3, "t": "x"}']


def store_media(folder: Path) -> None:
    """Images and sounds of which some are cut, and what nobody decodes."""
    folder.mkdir()
    image, large, sound = io.BytesIO(), io.BytesIO(), io.BytesIO()
    Image.fromarray(np.arange(60_000, dtype=np.uint8).reshape(100, 200, 3)).save(image, "PNG")
    Image.new("1", (20_000, 10_000)).save(large, "PNG")
    soundfile.write(sound, np.zeros(1000), 16_000, format="WAV")
    pictures = [image.getvalue(), image.getvalue(), image.getvalue()[:200], large.getvalue()]
    for name, data in (("b/0", pictures[0]), ("b/1", pictures[2]), ("c/0", pictures[2])):
        path = folder.with_name("photos") / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    sounds = [sound.getvalue()] * 4
    sounds[1] = sounds[1][:-99]
    with tarfile.open(folder / "a.tar", "w") as archive:
        for number, (picture, heard) in enumerate(zip(pictures, sounds, strict=True)):
            members = {"png": picture, "wav": heard, "mp4": b"x", "m4a": b"y"}
            for extension, data in members.items():
                member = tarfile.TarInfo(f"{number}.{extension}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


class Node(NamedTuple):
    daemon: Daemon
    reports: Path


def store_lines(folder: Path) -> None:
    folder.mkdir()
    for shard in range(3):
        lines = []
        for number in range(shard * 20, shard * 20 + 20):
            whole = json.dumps({"number": number, "text": "x" * number})
            lines.append(whole[:-1] if number in BAD_LINES else whole)
        (folder / f"{shard}.jsonl").write_text("\n".join(lines) + "\n")


def store_records(folder: Path) -> None:
    folder.mkdir()
    path = folder / "a.tfrecord"
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for number in range(NUM_SAMPLES):
            writer.write(b"%06d" % number)
    data = bytearray(path.read_bytes())
    for number in BAD_RECORDS:
        data[number * 22 + 12] ^= 1  # 8 + 4 bytes before the data, 4 behind them
    path.write_bytes(data)


def store_members(folder: Path) -> None:
    """One sample lacks a member, one has a class that is no number, and one has half a document."""
    folder.mkdir()
    with tarfile.open(folder / "a.tar", "w") as archive:
        for number in range(NUM_SAMPLES):
            document = b"{" if number == BAD_MEMBERS[0] else b"{}"
            label = b"cat" if number == BAD_MEMBERS[1] else b"%d" % number
            members = {"bin": bytes(number), "cls": label, "json": document}
            if number == BAD_MEMBERS[2]:
                del members["bin"]
            for extension, data in members.items():
                member = tarfile.TarInfo(f"{number:04}.{extension}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def store_broken(folder: Path, whole: Path) -> None:
    """A shard with a damaged header, one that is empty, one that was cut off, and a good one."""
    folder.mkdir()
    data = bytearray(whole.read_bytes())
    (folder / "cut.tar").write_bytes(data[: len(data) // 2 + 100])
    data[BROKEN_HEADER + 10] ^= 1
    (folder / "header.tar").write_bytes(data)
    with tarfile.open(folder / "empty.tar", "w"):
        pass
    shutil.copy(whole, folder / "whole.tar")


def store_rows(folder: Path) -> None:
    """Two row groups of five whose last page is damaged, and a good file."""
    folder.mkdir()
    table = pa.table({"number": pa.array(range(50), pa.int32())})
    options = {"row_group_size": 10, "write_page_checksum": True, "use_dictionary": False}
    for name in "ab":
        pq.write_table(table, folder / f"{name}.parquet", compression="none", **options)
    path = folder / "a.parquet"
    data = bytearray(path.read_bytes())
    for group in (1, 4):
        data[data.index(np.arange(group * 10, group * 10 + 10, dtype="<i4").tobytes())] ^= 64
    path.write_bytes(data)


def store_groups(folder: Path) -> None:
    """Row groups of ten: one is damaged in its texts, one in its numbers."""
    folder.mkdir()
    path, texts = folder / "a.parquet", [f"text {number:04}" for number in range(NUM_SAMPLES)]
    table = pa.table({"number": pa.array(range(NUM_SAMPLES), pa.int32()), "text": texts})
    options = {"row_group_size": 10, "write_page_checksum": True, "use_dictionary": False}
    pq.write_table(table, path, compression="none", **options)
    data = bytearray(path.read_bytes())
    data[data.index(b"text 0025")] ^= 64
    data[data.index(np.arange(40, 50, dtype="<i4").tobytes())] ^= 64
    path.write_bytes(data)


def store_batches(folder: Path) -> None:
    """Compressed record batches of ten, of which one is damaged."""
    folder.mkdir()
    path = folder / "a.arrow"
    random = np.random.default_rng(0).integers(1 << 60, size=NUM_SAMPLES)
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(path, pa.schema([("number", pa.int64())]), options=options) as writer:
        writer.write_table(pa.table({"number": random}), max_chunksize=10)
    frames = [match.start() for match in re.finditer(rb"\x28\xb5\x2f\xfd", path.read_bytes())]
    data = bytearray(path.read_bytes())
    data[frames[1]] ^= 1
    path.write_bytes(data)


def store_frames(folder: Path) -> None:
    """The same lines, compressed with zstd."""
    store_lines(folder)
    for path in folder.iterdir():
        path.with_suffix(".jsonl.zst").write_bytes(zstandard.compress(path.read_bytes()))
        path.unlink()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, interpreter: Interpreter) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("corrupt")
    datasets: dict[str, Any] = {}
    for name, store in (
        ("lines", store_lines),
        ("records", store_records),
        ("members", store_members),
        ("groups", store_groups),
        ("batches", store_batches),
        ("frames", store_frames),
    ):
        store(folder / name)
        uri = {"uri": str(folder / name)}
        datasets[name] = {**uri, "on_corrupt": "replace", "max_corrupt": 20}
        datasets[f"{name}_fail"] = uri
        datasets[f"{name}_few"] = {**uri, "on_corrupt": "replace", "max_corrupt": 0.02}
    store_media(folder / "media")
    (folder / "clean").mkdir()
    (folder / "clean/a.jsonl").write_text('{"a": 1}\n\n[2]\n')
    (folder / "line").mkdir()
    (folder / "line/a.jsonl").write_text("\n".join([*LINES, '{"n": 2, "t": "wo', *LINES]))
    datasets["line"] = {"uri": str(folder / "line")}
    datasets["keys"] = {"uri": str(folder / "line"), "columns": ["*"]}
    datasets["media"] = {"uri": str(folder / "media")}
    datasets["photos"] = {"uri": str(folder / "photos")}
    datasets["clean"] = {"uri": str(folder / "clean")}
    datasets["broken"] = {"uri": str(folder / "broken"), "format": "webdataset"}
    datasets["rows"] = {"uri": str(folder / "rows")}
    store_rows(folder / "rows")
    store_broken(folder / "broken", folder / "members/a.tar")
    address = f"unix:{folder}/run/gyre.sock"
    config = {
        "listen": [address],
        "index_dir": str(folder / "index"),
        "report_dir": str(folder / "reports"),
        "datasets": datasets,
    }
    path = folder / "gyre.toml"
    path.write_text(to_toml(config))
    daemon = Daemon(path, address, folder / "log", {}, SERVE, interpreter).start()
    yield Node(daemon, folder / "reports")
    daemon.stop()


def ids_of(node: Node, name: str, rank: int = 0, world_size: int = 1, **more: Any) -> list[int]:
    """The ids of a rank's samples in two epochs."""
    loader = Loader(
        name,
        batch_size=SIZE,
        rank=rank,
        world_size=world_size,
        seed=4,
        job=f"{name}-{rank}-of-{world_size}",
        address=node.daemon.address,
        **more,
    )
    with loader:
        return [
            number for _, batch in zip(range(20), forever(loader), strict=False)
            for number in batch["sample_id"].tolist()
        ]  # fmt: skip


def forever(loader: Loader) -> Iterator[Any]:
    while True:
        yield from loader


def records(node: Node, name: str) -> list[dict[str, Any]]:
    (path,) = node.reports.glob(f"{name}-*.jsonl")
    assert path.stat().st_mode & 0o777 == 0o600
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("name", "bad", "reason"),
    [
        ("lines", BAD_LINES, "field json: "),
        ("records", BAD_RECORDS, "checksum differs"),
        ("members", BAD_MEMBERS, "field json: .*|field cls: .*|the sample has no member .bin"),
        ("groups", BAD_GROUPS, "CRC"),
        ("batches", BAD_BATCHES, "cannot be read"),
        ("frames", BAD_LINES, "field json: "),
    ],
)
def test_each_corrupt_sample_is_replaced_and_reported(
    node: Node, name: str, bad: list[int], reason: str
) -> None:
    with pytest.raises(CorruptSample):
        ids_of(node, f"{name}_fail")
    with pytest.raises(CorruptSample, match=r"max_corrupt = 0\.02 allows 1"):
        ids_of(node, f"{name}_few")
    ids = ids_of(node, name)
    assert len(ids) == 2 * NUM_SAMPLES
    assert set(ids) == set(range(NUM_SAMPLES)) - set(bad)
    found = records(node, name)
    assert [each["sample_id"] for each in found] == bad
    for each in found:
        assert set(each) == {"shard", "offset", "sample_id", "reason"}
        assert re.search(reason, each["reason"])


def test_chunks_that_failed_are_remembered(node: Node) -> None:
    before = ids_of(node, "groups")
    node.daemon.stop()
    node.daemon.restart()
    assert ids_of(node, "groups") == before
    assert [each["sample_id"] for each in records(node, "groups")] == BAD_GROUPS


def test_all_ranks_agree_and_the_cursor_counts_them(node: Node) -> None:
    whole = ids_of(node, "lines")
    parts = [ids_of(node, "lines", rank, 2) for rank in range(2)]
    half = SIZE // 2
    for step in range(20):
        mine = [part[step * half : (step + 1) * half] for part in parts]
        assert mine[0] + mine[1] == whole[step * SIZE : (step + 1) * SIZE]
    states = []
    for rank in range(2):
        with Loader(
            "lines", batch_size=SIZE, rank=rank, world_size=2, seed=4, address=node.daemon.address
        ) as loader:
            for _ in zip(range(NUM_SAMPLES // SIZE), forever(loader), strict=False):
                pass
            states.append(loader.state_dict())
    assert states[0]["cursor"] == states[1]["cursor"]
    assert decode_cursor(states[0]["cursor"]).num_substitutes == len(BAD_LINES)
    with Loader("lines", batch_size=SIZE, seed=4, address=node.daemon.address) as resumed:
        resumed.load_state_dict(states[0])
        again = [
            number for _, batch in zip(range(10), forever(resumed), strict=False)
            for number in batch["sample_id"].tolist()
        ]  # fmt: skip
        cursor = decode_cursor(resumed.state_dict()["cursor"])
    assert again == whole[NUM_SAMPLES:]
    assert cursor.num_substitutes == 2 * len(BAD_LINES)


def test_the_status_says_how_many_were_sent(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    before = status(node.daemon).num_substitutes_sent
    ids_of(node, "records")
    assert status(node.daemon).num_substitutes_sent >= before + 2 * len(BAD_RECORDS)
    assert main(["status", "--address", node.daemon.address]) == 0
    assert "in place of corrupt ones" in capsys.readouterr().out


def lint(
    node: Node, name: str, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, Any], list[tuple[str, str, int | None]]]:
    """The exit status, the JSON, and kind, shard and sample of each finding."""
    code = main(["lint", name, "--json", "--address", node.daemon.address])
    found = json.loads(capsys.readouterr().out)
    return (
        code,
        found,
        [(each["kind"], each["shard"], each["sample_id"]) for each in found["findings"]],
    )


def test_lint_names_what_is_corrupt(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, named = lint(node, "lines_fail", capsys)
    assert (code, found["num_samples"]) == (1, NUM_SAMPLES)
    assert named == [("corrupt", f"{number // 20}.jsonl", number) for number in BAD_LINES]
    ids_of(node, "lines")  # which writes the report
    offsets = [each["offset"] for each in records(node, "lines")]
    assert [each["offset"] for each in found["findings"]] == offsets
    assert [number for *_, number in lint(node, "records_fail", capsys)[2]] == BAD_RECORDS
    code, found, named = lint(node, "members_fail", capsys)
    assert sorted(number for *_, number in named if number is not None) == BAD_MEMBERS
    assert lint(node, "clean", capsys) == (
        0,
        {
            "num_shards": 1,
            "num_samples": 2,
            "num_bytes": 11,
            "num_decoded": 0,
            "not_decoded": {},
            "num_findings": 0,
            "findings": [],
        },
        [],
    )


def test_lint_decodes_images_and_sounds(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """And says of which files it did not."""
    code, found, named = lint(node, "media", capsys)
    assert (code, found["num_samples"], found["num_decoded"]) == (1, 4, 5)
    assert found["not_decoded"] == {
        "audio/mp4 is not decoded here": 4,
        "video is not decoded here": 4,
        "it declares 20000 x 10000 pixels; at most 100000000 are decoded (max_pixels)": 1,
    }
    assert named == [("corrupt", "a.tar", 1), ("corrupt", "a.tar", 2)]
    assert [each["reason"] for each in found["findings"]] == [
        "field wav: it is cut: its header says 2044 bytes, and it has 1945",
        "field png: it is no image that can be decoded: image file is truncated",
    ]
    assert main(["lint", "media", "--address", node.daemon.address]) == 1
    assert "media    5 decoded; 4 not decoded: audio/mp4 is not" in capsys.readouterr().out
    _, found, named = lint(node, "photos", capsys)
    assert named == [("corrupt", "b/1.png", 1), ("corrupt", "c/0.png", 2)]
    assert [each["offset"] for each in found["findings"]] == [0, 0]


@pytest.mark.parametrize("name", ["line", "keys"])
def test_lint_shows_the_byte_at_which_a_damaged_line_begins(
    node: Node, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Of whole documents, and of their keys, where lines are parsed in chunks."""
    offset = len("\n".join([*LINES, ""]).encode())
    assert main(["lint", name, "--address", node.daemon.address]) == 1
    text = capsys.readouterr().out
    assert re.search(r"found +1\n", text)
    assert re.search(rf"KIND +SHARD +OFFSET +SAMPLE\ncorrupt +a.jsonl +{offset} ", text), text
    code, found, _ = lint(node, name, capsys)
    assert (code, [each["offset"] for each in found["findings"]]) == (1, [offset])


def test_lint_goes_on_where_shards_cannot_be_read(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found, named = lint(node, "broken", capsys)
    assert code == 1
    assert named[:3] == [
        ("corrupt", "cut.tar", None),
        ("odd", "empty.tar", None),
        ("corrupt", "header.tar", None),
    ]
    assert [name for _, name, _ in named[3:]] == ["whole.tar"] * len(BAD_MEMBERS)
    assert BROKEN_HEADER <= found["findings"][2]["offset"] <= BROKEN_HEADER + 512
    assert main(["lint", "broken", "--address", node.daemon.address]) == 1
    text = capsys.readouterr().out
    assert re.search(r"found +6\n", text)
    assert re.search(r"odd +empty.tar +0 +-\n  it has no sample", text)


def test_lint_names_every_row_group_that_cannot_be_decoded(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found, named = lint(node, "rows", capsys)
    assert code == 1
    assert [name for _, name, _ in named] == ["a.parquet"] * 2
    assert found["num_samples"] == 100
    assert all("CRC" in each["reason"] for each in found["findings"])
    assert found["findings"][0]["offset"] < found["findings"][1]["offset"]
