"""A mixture knows which boxes and masks its sources have made for which image."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_client import Loader
from gyre_client.errors import ConfigError
from PIL import Image

from tests.conftest import StartDaemon

SOURCE: list[dict[str, Any]] = [
    {"name": "decode_image", "field": "file"},
    {"name": "decode_boxes", "field": "objects", "key": "bbox", "format": "xywh"},
    {"name": "drop", "field": "objects"},
    {"name": "resize", "size": [20, 40], "boxes": ["boxes"]},
]
FLIP = {"name": "horizontal_flip", "p": 1.0}
SANITIZE = {"name": "sanitize_boxes", "max_boxes": 1}
PARTS = {**SANITIZE, "normalized": True}


def write(folder: Path) -> dict[str, Any]:
    folder.mkdir()
    file = io.BytesIO()
    Image.fromarray(np.zeros((10, 20, 3), np.uint8)).save(file, "PNG")
    (folder / "a.png").write_bytes(file.getvalue())
    document = {
        "images": [{"id": number, "file_name": "a.png"} for number in range(4)],
        "annotations": [
            {"image_id": number, "category_id": 1, "bbox": [1, 2, 3, 4]} for number in range(4)
        ],
        "categories": [{"id": 1, "name": "x"}],
    }
    (folder / "a.json").write_text(json.dumps(document))
    return {"uri": str(folder), "format": "coco", "annotations": "a.json", "transforms": SOURCE}


def test_a_mixture_leaves_no_boxes_behind(gyred: StartDaemon, tmp_path: Path) -> None:
    one, two = (write(tmp_path / name) for name in ("one", "two"))
    finished = {**one, "transforms": [*SOURCE, SANITIZE]}
    parts = {**one, "transforms": [*SOURCE, PARTS]}
    mixtures = {
        "good": ({"one": 1, "two": 1}, [{**FLIP, "boxes": ["boxes"]}, SANITIZE]),
        "forgets": ({"one": 1, "two": 1}, [FLIP, SANITIZE]),
        "late": ({"finished": 1}, [FLIP]),
        "smaller": ({"parts": 1}, [{"name": "resize", "size": [5, 5]}]),
    }
    tables = {
        name: {"weights": weights, "transforms": transforms}
        for name, (weights, transforms) in mixtures.items()
    }
    datasets = {"one": one, "two": two, "finished": finished, "parts": parts}
    daemon = gyred({"datasets": datasets, "mixtures": tables})
    with Loader("good", batch_size=4, address=daemon.address) as loader:
        assert next(loader)["boxes"].tolist() == [[[32, 4, 38, 12]]] * 4
    with Loader("smaller", batch_size=4, address=daemon.address) as loader:
        assert next(loader)["image"].shape == (4, 5, 5, 3)
    for name, reason in (("forgets", "would stay where they are"), ("late", "put sanitize_boxes")):
        with pytest.raises(ConfigError, match=f"horizontal_flip.*'boxes' lie in 'image'.*{reason}"):
            Loader(name, batch_size=4, address=daemon.address)
