"""Lists of wids next to tar shards."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_client import Loader
from gyre_client.errors import CorruptSample, GyreError, InvalidRequest, ShardMissing

pytestmark = pytest.mark.usefixtures("private_daemon")


def write_tar(path: Path, numbers: range) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for number in numbers:
            image = np.random.default_rng(number).bytes(100)
            for name, data in {"cls": b"%d" % number, "jpg": image}.items():
                member = tarfile.TarInfo(f"{number:04}.{name}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def shard_list(folder: Path, counts: dict[str, int]) -> dict[str, Any]:
    """What `widsindex create` writes."""
    shards = [
        {"url": url, "md5sum": "0" * 32, "nsamples": count, "filesize": size_of(folder / url)}
        for url, count in counts.items()
    ]
    return {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": shards}


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 10240


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for number in range(3):
        write_tar(folder / f"data/{number}.tar", range(10 * number, 10 * number + 4))
    return folder


def labels(path: Path, **options: Any) -> list[int]:
    with Loader(path, batch_size=4, order="sequential", options=options) as loader:
        return [each for batch in loader for each in batch["cls"].tolist()]


@pytest.mark.parametrize("options", [{}, {"format": "webdataset"}])
def test_a_list_says_which_shards_there_are_in_which_order(
    options: dict[str, Any], folder: Path
) -> None:
    table = shard_list(folder, {"data/2.tar": 4, f"{folder}/data/0.tar": 4})
    (folder / "index.json").write_text(json.dumps(table))
    arguments = {"format": options["format"]} if options else {}
    with Loader(
        folder / "index.json", batch_size=4, order="sequential", epochs=1, **arguments
    ) as loader:
        found = [each for batch in loader for each in batch["cls"].tolist()]
    assert found == [20, 21, 22, 23, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("table", "kind", "sentence"),
    [
        ({"data/0.tar": 5}, CorruptSample, "shard 0.tar does not fit: it has 4 samples, .* says 5"),
        ({"data/3.tar": 4}, GyreError, "shard 3.tar does not exist"),
        ({"../x.tar": 4}, InvalidRequest, "'../x.tar', which is no path below its own folder"),
        ({"/etc/x.tar": 4}, InvalidRequest, "no path below its own folder"),
        ({"s3://other/x.tar": 4}, InvalidRequest, "no path below its own folder"),
        ({"data/*.tar": 4}, InvalidRequest, "no path below its own folder"),
        ({}, InvalidRequest, "it has no `shardlist`"),
    ],
)
def test_lists_that_do_not_fit_are_refused(
    table: dict[str, int], kind: type[GyreError], sentence: str, folder: Path
) -> None:
    (folder / "other.json").write_text(json.dumps(shard_list(folder, table)))
    with pytest.raises(kind, match=sentence):
        labels(folder / "other.json")


def test_other_json_is_refused(folder: Path) -> None:
    (folder / "a.json").write_text('{"version": 2, "shards": []}')
    with pytest.raises(InvalidRequest, match=r"a\.json lists no shards"):
        labels(folder / "a.json")
    (folder / "a.json").write_text("[1")
    with pytest.raises(ShardMissing, match="has a name of a known format, or begins like one"):
        labels(folder / "a.json")
