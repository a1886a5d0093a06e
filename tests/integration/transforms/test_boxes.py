"""Boxes of every kind of data through a real daemon, compared with what is painted there."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from gyre_client import Loader, detections
from gyre_client.errors import ConfigError, CorruptSample, InvalidRequest
from PIL import Image

from tests.batches import same, take

HEIGHT, WIDTH, NUM = 90, 120, 12
CLASSES = ("tern", "heron", "gull")


def boxes_of(number: int) -> list[list[int]]:
    """Left, top, width and height; in tiles of the image, so that none lies over another."""
    rng = np.random.default_rng(number)
    tiles = rng.permutation(12)[: number % 5]
    return [
        [int(tile % 4 * 30 + rng.integers(9)), int(tile // 4 * 30 + rng.integers(9)), *size]
        for tile, size in zip(tiles, rng.integers(3, 20, (len(tiles), 2)).tolist(), strict=True)
    ]


def labels_of(number: int) -> list[int]:
    return [(number + place) % 3 for place in range(len(boxes_of(number)))]


def picture(number: int) -> bytes:
    """Box `place` of an image is a rectangle of the level 20 * (place + 1)."""
    pixels = np.zeros((HEIGHT, WIDTH), np.uint8)
    for place, (left, top, width, height) in enumerate(boxes_of(number)):
        pixels[top : top + height, left : left + width] = 20 * (place + 1)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


def objects_of(number: int, label: str = "category") -> list[dict[str, Any]]:
    pairs = zip(boxes_of(number), labels_of(number), strict=True)
    return [{"bbox": box, label: name} for box, name in pairs]


Source = tuple[dict[str, Any], list[dict[str, Any]]]


def decode(file: str, **boxes: Any) -> list[dict[str, Any]]:
    image = {"name": "decode_image", "field": file}
    return [image, {"name": "decode_boxes", "format": "xywh", **boxes}]


def from_tar(folder: Path) -> Source:
    with webdataset.TarWriter(str(folder / "a.tar")) as tar:
        for number in range(NUM):
            names = [CLASSES[label] for label in labels_of(number)]
            about = {"objects": {"bbox": boxes_of(number), "name": names}}
            tar.write({"__key__": f"{number:03}", "png": picture(number), "json": about})
    keys = {"fields": {"labels": "objects.name"}, "classes": {"labels": CLASSES}}
    return {"format": "webdataset"}, decode("png", field="json", key="objects.bbox", **keys)


def from_columns(folder: Path) -> Source:
    """Parquet with a list of boxes and a list of labels, normalised as those of YOLO."""
    size = np.array([WIDTH, HEIGHT])
    scaled = []
    for number in range(NUM):
        boxes = np.array(boxes_of(number)).reshape(-1, 2, 2)
        middle = boxes[:, 0] + boxes[:, 1] / 2
        scaled.append(np.hstack([middle / size, boxes[:, 1] / size]).tolist())
    table = pa.table(
        {
            "png": [picture(number) for number in range(NUM)],
            "bbox": pa.array(scaled, pa.list_(pa.list_(pa.float64(), 4))),
            "labels": [labels_of(number) for number in range(NUM)],
        }
    )
    pq.write_table(table, folder / "a.parquet")
    return {}, decode("png", field="bbox", format="cxcywh", normalized=True)


def hugging_face(objects: Any, rows: list[Any]) -> Any:
    features = datasets.Features({"image": datasets.Image(), "objects": objects})
    images = [{"bytes": picture(number), "path": None} for number in range(NUM)]
    return datasets.Dataset.from_dict({"image": images, "objects": rows}, features=features)


BOX = datasets.Sequence(datasets.Value("float32"), length=4)
OF_OBJECTS = decode("image", field="objects", key="bbox", fields={"labels": "category"})


def lists_of(number: int) -> dict[str, Any]:
    return {"bbox": boxes_of(number), "category": labels_of(number)}


def from_hugging_face(folder: Path) -> Source:
    """A dict of lists, written as Parquet."""
    labels = datasets.Sequence(datasets.ClassLabel(names=list(CLASSES)))
    objects = {"bbox": datasets.Sequence(BOX), "category": labels}
    made = hugging_face(objects, [lists_of(number) for number in range(NUM)])
    made.to_parquet(str(folder / "a.parquet"))
    return {}, OF_OBJECTS


def from_disk(folder: Path) -> Source:
    """A list of dicts, saved as Arrow."""
    objects = [{"bbox": BOX, "category": datasets.Value("int64")}]
    hugging_face(objects, [objects_of(number) for number in range(NUM)]).save_to_disk(str(folder))
    return {}, OF_OBJECTS


def from_coco(folder: Path) -> Source:
    (folder / "images").mkdir()
    about: dict[str, list[Any]] = {"images": [], "annotations": []}
    for number in range(NUM):
        (folder / f"images/{number:03}.png").write_bytes(picture(number))
        about["images"].append({"id": 7 * number, "file_name": f"{number:03}.png"})
        its = objects_of(number, "category_id")
        about["annotations"] += [
            {**each, "category_id": 3 * each["category_id"], "image_id": 7 * number} for each in its
        ]
    about["annotations"].reverse()
    about["annotations"].sort(key=lambda each: boxes_of(each["image_id"] // 7).index(each["bbox"]))
    about["categories"] = [{"id": 3 * n, "name": name} for n, name in enumerate(CLASSES)]
    (folder / "a.json").write_text(json.dumps(about))
    options = {"format": "coco", "options": {"annotations": "a.json", "images": "images"}}
    return options, decode("file", field="objects", key="bbox", fields={"labels": "label"})


def from_yolo(folder: Path) -> Source:
    """Labels beside images; an image without boxes has none."""
    for part in ("images/train", "labels/train"):
        (folder / part).mkdir(parents=True)
    (folder / "data.yaml").write_text(f"train: images/train\nnames: {list(CLASSES)}\n")
    for number in range(NUM):
        (folder / f"images/train/{number:03}.png").write_bytes(picture(number))
        lines = [
            f"{label} {(x + w / 2) / WIDTH} {(y + h / 2) / HEIGHT} {w / WIDTH} {h / HEIGHT}\n"
            for (x, y, w, h), label in zip(boxes_of(number), labels_of(number), strict=True)
        ]
        if lines:
            (folder / f"labels/train/{number:03}.txt").write_text("".join(lines))
    decoded = {"format": "cxcywh", "normalized": True, "fields": {"labels": "label"}}
    return {"format": "yolo"}, decode("file", field="objects", key="bbox", **decoded)


def from_manifest(folder: Path) -> Source:
    lines = []
    for number in range(NUM):
        (folder / f"{number:03}.png").write_bytes(picture(number))
        lines.append(json.dumps({"path": f"{number:03}.png", "objects": lists_of(number)}))
    (folder / "a.jsonl").write_text("\n".join(lines))
    options = {"format": "files", "path": "a.jsonl"}
    return options, decode("file", field="objects", key="bbox", fields={"labels": "category"})


SOURCES = [
    from_tar,
    from_hugging_face,
    from_coco,
    *(pytest.param(each, marks=pytest.mark.models) for each in (from_columns, from_disk)),
    *(pytest.param(each, marks=pytest.mark.models) for each in (from_manifest, from_yolo)),
]
CHAIN: list[dict[str, Any]] = [
    {"name": "random_crop", "size": [70, 80], "boxes": ["boxes"]},
    {"name": "horizontal_flip", "boxes": ["boxes"]},
    {"name": "resize", "size": [140, 160], "interpolation": "nearest", "boxes": ["boxes"]},
    {"name": "sanitize_boxes", "fields": ["labels"], "min_visible": 0.25, "max_boxes": 6},
]


def opened(folder: Path, source: Source, chain: Any = CHAIN, **options: Any) -> Loader:
    keys, beginning = source
    keys = dict(keys)
    path = folder / keys.pop("path", "")
    options = {"batch_size": 4, "seed": 5, "order": "full", **keys, **options}
    return Loader(path, transform=[*beginning, *chain], **options)


def check(batch: Any) -> int:
    """Compare boxes with pixels; the number of boxes."""
    total = 0
    for row, found in enumerate(detections(batch, "labels")):
        pixels, number = batch["image"][row, :, :, 0].numpy(), int(batch["sample_id"][row])
        labels, boxes = found["labels"].tolist(), found["boxes"].tolist()
        wanted = []
        for place, (_, _, width, height) in enumerate(boxes_of(number)):
            y, x = np.nonzero(pixels == 20 * (place + 1))
            if len(x) >= 0.25 * width * height * 4 - 1e-6:
                box = [float(x.min()), float(y.min()), float(x.max() + 1), float(y.max() + 1)]
                wanted.append((labels_of(number)[place], box))
        rounded = [[round(edge, 3) for edge in box] for box in boxes]
        assert list(zip(labels, rounded, strict=True)) == wanted
        total += len(wanted)
    return total


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Images and boxes of two epochs, of one kind of data."""
    folder = tmp_path_factory.mktemp("tar")
    with opened(folder, from_tar(folder)) as loader:
        return [{key: batch[key].clone() for key in KEYS} for batch in take(loader, 6)]


KEYS = ("sample_id", "image", "boxes", "labels", "num_boxes")


@pytest.mark.parametrize("store", SOURCES, ids=lambda each: each.__name__)
def test_boxes_of_all_kinds_of_data_are_where_their_pixels_are(
    store: Callable[[Path], Source], expected: list[Any], tmp_path: Path
) -> None:
    source = store(tmp_path)
    with opened(tmp_path, source) as loader:
        batches = take(loader, 6)
        found = [{key: batch[key] for key in KEYS} for batch in batches]
        assert sum(map(check, batches)) > NUM
        for one, other in zip(found, expected, strict=True):
            for key in KEYS:
                assert one[key].dtype == other[key].dtype
                if key == "boxes":  # normalised ones are rounded otherwise
                    assert (one[key] - other[key]).abs().max() < 1e-4
                else:
                    assert one[key].equal(other[key]), key
    # another epoch has other crops
    by_id = [
        {int(n): batch["image"][row] for row, n in enumerate(batch["sample_id"])} for batch in found
    ]
    first, second = (
        {k: v for each in part for k, v in each.items()} for part in (by_id[:3], by_id[3:])
    )
    assert any(not first[number].equal(second[number]) for number in first)


def test_rows_without_a_maximum_are_those_that_are_stored(
    expected: list[Any], tmp_path: Path
) -> None:
    """And no other number of ranks, no resumption and no cache changes anything."""
    source = from_tar(tmp_path)
    ragged = [*CHAIN[:-1], {key: each for key, each in CHAIN[-1].items() if key != "max_boxes"}]
    wanted = [detections(batch, "labels") for batch in expected]
    cut = [{"name": "resize", "size": [HEIGHT, WIDTH], "boxes": ["boxes"]}, {"name": "cache"}]
    for chain in (ragged, [*cut, *ragged]):
        with opened(tmp_path, source, chain) as loader:
            for batch, its in zip(take(loader, 3), wanted, strict=False):
                stored = [len(boxes_of(number)) for number in batch["sample_id"].tolist()]
                assert batch["boxes.offsets"].diff().tolist() == stored
                assert batch["labels.offsets"].diff().tolist() == stored
                assert same(detections(batch, "labels"), its)
            state = loader.state_dict()
    with opened(tmp_path, source, chain) as loader:
        loader.load_state_dict(state)
        for batch, its in zip(take(loader, 3), wanted[3:], strict=True):
            assert same(detections(batch, "labels"), its)
    for rank in range(2):
        with opened(tmp_path, source, rank=rank, world_size=2) as loader:
            for batch, whole in zip(take(loader, 6), expected, strict=True):
                for key in KEYS:
                    assert batch[key].equal(whole[key][2 * rank : 2 * rank + 2])


def test_a_bad_box_is_named_and_loses_nothing(tmp_path: Path) -> None:
    """It ends the job that comes to it, or another sample takes its place."""
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as tar:
        for number in range(NUM):
            boxes = [[1, 2, -3, 4]] if number == 7 else boxes_of(number)
            tar.write({"__key__": f"{number:03}", "png": picture(number), "json": {"b": boxes}})
    beginning = decode("png", field="json", key="b")
    chain = [{"name": "sanitize_boxes", "max_boxes": 6}, {"name": "drop", "field": "image"}]
    with opened(tmp_path, ({}, beginning), chain, order="sequential") as loader:
        next(loader)
        with pytest.raises(
            CorruptSample, match=r"a\.tar.*decode_boxes.*box 0 of 'json' is \[1, 2, -3"
        ):
            take(loader, 1)
    replace: dict[str, Any] = {"options": {"on_corrupt": "replace", "max_corrupt": 1}}
    with opened(tmp_path, ({}, beginning), chain, order="sequential", **replace) as loader:
        found = [number for batch in take(loader, 3) for number in batch["sample_id"].tolist()]
    assert [a for a, b in zip(found, range(NUM), strict=True) if a != b] == [found[7]]
    assert found[7] != 7


def test_boxes_that_would_stay_behind_are_refused_when_the_job_begins(tmp_path: Path) -> None:
    source = from_tar(tmp_path)
    chain = [{"name": "horizontal_flip"}, CHAIN[-1]]
    with pytest.raises(
        ConfigError, match=r"transforms\[2\] \(horizontal_flip\): the boxes 'boxes'"
    ):
        opened(tmp_path, source, chain)
    with opened(tmp_path, source) as loader:
        batch = next(loader)
        with pytest.raises(InvalidRequest, match=r"no field 'area'.*; name 'area' in `fields`"):
            detections(batch, "area")
        del batch["num_boxes"]
        with pytest.raises(InvalidRequest, match=r"no field 'num_boxes'.* with sanitize_boxes"):
            detections(batch, "area")
