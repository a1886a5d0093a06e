"""Samples that cannot be transformed, under `on_corrupt = "replace"`, through a real daemon."""

import io
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from gyre_client import Loader
from gyre_client.command.cli import main
from gyre_client.errors import CorruptSample, CursorRejected
from gyre_daemon.order.cursor import decode_cursor
from PIL import Image

from tests.batches import ids
from tests.conftest import Daemon, to_toml
from tests.daemons import status
from tests.elastic import Stage, in_stages
from tests.probe_transforms import install

NUM, LENGTH, BATCH = 48, 4, 6
DEADLY, REFUSED = [7], [20, 33]
BAD = [*DEADLY, *REFUSED]
TROUBLE = {
    "name": "trouble",
    "dies": [each * LENGTH for each in DEADLY],
    "refuses": [each * LENGTH for each in REFUSED],
}
CHAIN: Sequence[Mapping[str, Any]] = [TROUBLE, {"name": "draw"}]
DECODE: Sequence[Mapping[str, Any]] = [
    {"name": "decode_image", "field": "jpg", "max_pixels": 5000},
    {"name": "resize", "size": [8, 8]},
]


class Node(NamedTuple):
    daemon: Daemon
    reports: Path


def write_pictures(folder: Path) -> Path:
    """Writes ten images, in a tar and as files; one is cut off, and one is too large."""
    folder.mkdir()
    with tarfile.open(folder / "a.tar", "w") as tar:
        for number in range(10):
            side = 90 if number == 8 else 20 + number
            pixels = np.random.default_rng(number).integers(0, 256, (side, 60, 3), np.uint8)
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "JPEG")
            data = buffer.getvalue()[: 700 if number == 3 else None]
            member = tarfile.TarInfo(f"{number}.jpg")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
            (folder / member.name).write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("replaced")
    (folder / "data").mkdir()
    np.arange(NUM * LENGTH, dtype=np.uint16).tofile(folder / "data/a.bin")
    (folder / "lines").mkdir()
    documents: list[dict[str, Any]] = [{"text": "word " * (number + 1)} for number in range(12)]
    documents[5] = {"other": 1}
    lines = "".join(json.dumps(each) + "\n" for each in documents)
    (folder / "lines/a.jsonl").write_text(lines)
    replaced = {"on_corrupt": "replace", "max_corrupt": 4}
    tokens = {
        "uri": str(folder / "data"),
        "format": "tokens",
        "dtype": "uint16",
        "sequence_length": LENGTH,
    }
    pictures = {"uri": str(write_pictures(folder / "pictures")), "format": "webdataset"}
    files = {"uri": pictures["uri"], "format": "files", "fields": ["jpg=file"]}
    config = {
        "listen": [f"unix:{folder}/run/gyre.sock"],
        "index_dir": str(folder / "index"),
        "report_dir": str(folder / "reports"),
        "drain_timeout_s": 3.0,
        "num_transform_workers": 2,
        "installed_transforms": ["draw", "trouble"],
        "datasets": {
            "set": {**tokens, **replaced},
            "declared": {**tokens, **replaced},
            "few": {**tokens, **replaced, "max_corrupt": 2},
            "pictures": {**pictures, **replaced},
            "files": {**files, **replaced},
            "lines": {"uri": str(folder / "lines"), **replaced},
        },
    }
    declared = "".join(f"\n[[datasets.declared.transforms]]\n{to_toml(each)}" for each in CHAIN)
    (folder / "gyre.toml").write_text(to_toml(config) + declared)
    environment = {"PYTHONPATH": str(install(folder / "packages"))}
    address = config["listen"][0]  # type: ignore[index]
    daemon = Daemon(folder / "gyre.toml", address, folder / "log", environment)
    yield Node(daemon.start(), folder / "reports")
    daemon.stop()


def loader(node: Node, dataset: str = "set", **arguments: Any) -> Loader:
    values: dict[str, Any] = {"batch_size": BATCH, "seed": 4, "epochs": None, **arguments}
    if "transform" not in values and dataset != "declared":
        values["transform"] = CHAIN
    return Loader(dataset, address=node.daemon.address, **values)


def ids_of(source: Loader, num_batches: int) -> list[list[int]]:
    return [batch["sample_id"].tolist() for batch in islice(source.stream(), num_batches)]


def report(node: Node, name: str) -> list[dict[str, Any]]:
    """The one report of a dataset that names any sample."""
    (path,) = node.reports.glob(f"{name}-*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_cannot_be_transformed_is_replaced_reported_and_counted(node: Node) -> None:
    before = status(node.daemon).num_substitutes_sent
    with loader(node) as source:
        drawn = set()
        read = []
        for batch in islice(source.stream(), 2 * NUM // BATCH):
            read += batch["sample_id"].tolist()
            assert batch["first"].tolist() == [each * LENGTH for each in read[-BATCH:]]
            drawn |= set(batch["drawn"].flatten().tolist())
        cursor = decode_cursor(source.state_dict()["cursor"])
    assert len(drawn) > 3 * NUM
    good = set(range(NUM)) - set(BAD)
    for epoch in (read[:NUM], read[NUM:]):
        assert set(epoch) == good
        assert max(map(epoch.count, good)) == 2
    assert cursor.num_substitutes == 2 * len(BAD)
    assert status(node.daemon).num_substitutes_sent >= before + 2 * len(BAD)
    found = report(node, "set")
    assert [(each["sample_id"], each["offset"]) for each in found] == [
        (each, each * LENGTH * 2) for each in BAD
    ]
    assert "the process that transformed it died" in found[0]["reason"]
    assert found[1]["reason"] == f"trouble: {REFUSED[0] * LENGTH} is refused"


def test_any_ranks_get_the_same_through_a_kill_and_nothing_is_tried_again(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    with loader(node, "declared") as alone:
        wanted = ids_of(alone, 16)
    assert main(["plan", "declared", "--address", node.daemon.address, "--batch-size", str(BATCH),
                 "--step", "3", "--seed", "4", "--json"]) == 0  # fmt: skip
    assert json.loads(capsys.readouterr().out)["sample_ids"] == wanted[3]
    measured = sum(each["event"] == "shard measured" for each in node.daemon.events())

    def open_rank(rank: int, world_size: int) -> Loader:
        return loader(node, "declared", rank=rank, world_size=world_size)

    stages = [Stage(2, 5, kill_before=2), Stage(3, 6), Stage(1, 5)]
    got, state = in_stages(node.daemon, open_rank, stages, ids)
    assert got == wanted
    assert sum(each["event"] == "shard measured" for each in node.daemon.events()) == measured
    fewer = [{**TROUBLE, "dies": []}, CHAIN[1]]
    with loader(node, transform=fewer) as source, pytest.raises(CursorRejected, match="otherwise"):
        source.load_state_dict(state)


def test_more_than_the_limit_are_refused(node: Node) -> None:
    with pytest.raises(CorruptSample, match=r"has 3 corrupt .*max_corrupt = 2 allows 2.*sample 7 "):
        loader(node, "few")
    with loader(node, "few", transform=[TROUBLE | {"dies": []}]) as source:
        assert not {*BAD[1:]} & {each for some in ids_of(source, 8) for each in some}


@pytest.mark.parametrize("more", [[], [{"name": "cache"}]])
@pytest.mark.parametrize("dataset", ["pictures", "files"])
def test_images_that_are_damaged_or_too_large_are_replaced(
    node: Node, dataset: str, more: Sequence[Mapping[str, Any]]
) -> None:
    with loader(node, dataset, batch_size=5, transform=[*DECODE, *more]) as source:
        assert {each for some in ids_of(source, 2) for each in some} == {*range(10)} - {3, 8}
    found = report(node, dataset)
    assert [each["sample_id"] for each in found] == [3, 8]
    if dataset == "files":  # each is named, and not the dataset as a whole
        assert [(each["shard"], each["offset"]) for each in found] == [("3.jpg", 0), ("8.jpg", 0)]
    assert "decode_image: it is no image that can be decoded" in found[0]["reason"]
    assert "decode_image: it declares 60 x 90 pixels" in found[1]["reason"]


def test_documents_that_cannot_be_tokenised_are_in_no_sequence(node: Node) -> None:
    chain = [{"name": "tokenize", "field": "json", "key": "text", "tokenizer": "bytes"}]
    pack = {"field": "tokens", "length": 80}
    with loader(node, "lines", batch_size=1, epochs=1, transform=chain, pack=pack) as source:
        packed = sorted(each for batch in source for each in batch["document_id"].tolist())
    assert packed == [each for each in range(12) if each != 5]
