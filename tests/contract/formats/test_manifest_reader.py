"""Annotations of COCO are read by another process, and come back as they are."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_daemon.datasets.formats.base import Manifest
from gyre_daemon.datasets.indexing.format_search import ManifestReader
from gyre_daemon.datasets.scanning import scan_workers
from gyre_daemon.errors import CorruptSample
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import FairExecutor
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.location import parse_location
from gyre_daemon.storage.shard import Texts
from gyre_daemon.storage.sources.opener import StorageOpener
from gyre_daemon.workers.compute_workers import ComputeServer
from gyre_media.annotations import CocoFormat, CocoOptions

COCO = CocoFormat(CocoOptions("a.json"))


def read(path: Path) -> Manifest:
    """As a daemon does."""

    async def once() -> Manifest:
        storage = await opener.open(parse_location(str(path)), {}, "*")
        return await ManifestReader(scan_workers(server)).read(COCO, storage)

    with ThreadPoolExecutor(3) as threads, closing(ComputeServer()) as server:
        opener = StorageOpener(FairExecutor(threads, 3), EndpointOptions(16, 10.0), Metrics())
        with closing(opener):
            return asyncio.run(once())


@pytest.mark.parametrize("num_images", [0, 1, 30])
def test_annotations_are_read_by_another_process(
    num_images: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = {
        "images": [
            {"id": 7 * n, "file_name": f"ß/{n}.jpg", "width": n, "height": 9}
            for n in range(num_images)
        ],
        "annotations": [
            {"image_id": 7 * (n // 2), "category_id": 3, "bbox": [n, 1, 2.5, 3]}
            for n in range(num_images)
        ],
        "categories": [{"id": 3, "name": "größe"}],
    }
    data = json.dumps(document).encode()
    (tmp_path / "a.json").write_bytes(data)
    wanted = COCO.read_manifest("a.json", data)

    def refuse(*_: Any) -> Manifest:
        raise AssertionError("read by this process")

    monkeypatch.setattr(CocoFormat, "read_manifest", refuse)
    found = read(tmp_path / "a.json")
    assert len(found.names) == num_images
    assert found.names.data == wanted.names.data
    names = ["objects", "image_id", "num_objects", "width", "height"]
    assert [column.name for column in found.columns] == names
    for one, other in zip(found.columns, wanted.columns, strict=True):
        assert (one.kind, one.categories) == (other.kind, other.categories)
        for mine, its in zip(_plain(one.values), _plain(other.values), strict=True):
            assert mine.dtype == its.dtype
            assert np.array_equal(mine, its)


def _plain(values: Any) -> list[Any]:
    if isinstance(values, Texts):
        return [np.frombuffer(values.data, np.uint8), values.ends]
    return [values]


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"images": 3}', "\xff"])
def test_damage_is_told_as_by_the_daemon_itself(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CorruptSample, match=r"the annotations .*a\.json are damaged"):
        read(tmp_path / "a.json")
