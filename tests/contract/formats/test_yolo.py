"""Folders of images with labels as ultralytics lays them out, through a real daemon, too."""

import contextlib
import json
import re
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from gyre_client import Loader, objects
from gyre_client.errors import CorruptSample as RemoteCorruptSample
from gyre_client.errors import InvalidRequest, NotAllowed, ShardMissing
from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.formats import SampleIndex
from gyre_daemon.datasets.formats.base import DescribedFormat, Manifest
from gyre_daemon.datasets.known_formats import make_format
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.storage.shard import FileTable, Texts
from gyre_media.annotations import labels_path
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1 import loader_pb2_grpc as pb_grpc

from tests.channels import identified_channel
from tests.conftest import S3Server, StartDaemon
from tests.contract.formats.format_contract import IndexContract, Sample
from tests.contract.places import LocalPlace, Place, S3Place, noise

# As the file of coco8 of ultralytics is, whose `path` is relative to a folder of settings.
DATA = b"""# COCO8 dataset
path: coco8 # dataset root dir
train: images/train # train images (relative to 'path')
val: images/val
test: # test images (optional)

names:
  0: person
  1: bicycle
  2: car
download: https://example.com/coco8.zip
"""
# As exports of Roboflow are, which lie in the folder but count from one in it.
ROBOFLOW = (
    b"train: ../train/images\nval: ../valid/images\n\nnc: 3\nnames: ['person', 'bicycle', 'car']"
)
CLASSES = ("person", "bicycle", "car")
NUM_IMAGES = 30


def lines_of(number: int) -> list[tuple[int, list[float]]]:
    rng = np.random.default_rng(number)
    boxes = rng.uniform(0.2, 0.4, (number % 4, 4)).round(6).tolist()
    return [(int(rng.integers(3)), box) for box in boxes]


def labels_text(number: int) -> bytes:
    lines = [
        f"{label} {' '.join(f'{each:.6f}' for each in box)}" for label, box in lines_of(number)
    ]
    return "".join(f"{line}\n" for line in lines).encode()


def tree() -> dict[str, bytes]:
    """Images of two splits; those without objects have empty labels, or none."""
    files = {"data.yaml": DATA, "images/val/x.jpg": b"x", "labels/val/x.txt": b"0 .5 .5 .1 .1"}
    for number in range(NUM_IMAGES):
        files[f"images/train/{number:012}.jpg"] = noise(number, number * 31 % 400 + 1)
        if number % 8:
            files[f"labels/train/{number:012}.txt"] = labels_text(number)
    return {**files, "labels/train.cache": b"?", "labels/train/classes.txt": b"person\n"}


def expected(number: int) -> dict[str, Any]:
    its = lines_of(number)
    return {"bbox": [box for _, box in its], "label": [label for label, _ in its]}


def yolo(**options: Any) -> DescribedFormat:
    made = make_format("set", DatasetConfig("/data", "yolo", options))
    assert isinstance(made, DescribedFormat)
    return made


def read(files: Mapping[str, bytes], **options: Any) -> Manifest:
    made = yolo(**options)
    names = sorted(name for name in files if made.is_wanted(name.rpartition("/")[2]))
    table = Texts.of(name.encode() for name in names)
    described = made.described("data.yaml", files["data.yaml"], table)
    texts = [b"" if place < 0 else files[names[place]] for place in described.texts.tolist()]
    return made.manifest(described, texts)


def documents(manifest: Manifest) -> dict[str, Any]:
    values = manifest.columns[0].values
    return {
        manifest.names[row].decode(): json.loads(values[row]) for row in range(len(manifest.names))
    }


class TestYolo(IndexContract):
    """The head of an image is its path and the JSON of its objects."""

    name = "yolo"
    options: ClassVar = {"fields": ["path", "objects", "image=file"]}

    def shards(self) -> tuple[list[bytes], list[Sample]]:
        samples = []
        for number in range(NUM_IMAGES):
            path = f"images/train/{number:012}.jpg"
            about = json.dumps(expected(number), separators=(",", ":")).encode()
            samples.append({"path": path.encode(), "objects": about, "image": tree()[path]})
        return [b"".join(b"".join(sample.values()) for sample in samples)], list(samples)

    def index(self, shards: Sequence[bytes]) -> SampleIndex:
        manifest = read(tree(), **self.options)
        sizes = [len(tree()[manifest.names[row].decode()]) for row in range(NUM_IMAGES)]
        table = FileTable(manifest.names, np.array(sizes, np.int64))
        return yolo(**self.options).index_of(table, manifest.columns)


@pytest.mark.parametrize(
    ("image", "labels"),
    [
        ("images/train/a.b.jpg", "labels/train/a.b.txt"),
        ("train/images/a.jpg", "train/labels/a.txt"),
        ("images/images/a.jpg", "images/labels/a.txt"),
        ("pictures/a.jpg", "pictures/a.txt"),
        ("a.jpg", "a.txt"),
    ],
)
def test_labels_lie_where_ultralytics_looks_for_them(image: str, labels: str) -> None:
    assert labels_path(image) == labels
    files = {"data.yaml": DATA, image: b"", labels: b"2 0.5 0.5 1 1"}
    found = read(files, images=[image.rpartition("/")[0] or "."])
    assert documents(found) == {image: {"bbox": [[0.5, 0.5, 1.0, 1.0]], "label": [2]}}


def test_exports_of_roboflow_are_read() -> None:
    files = {"data.yaml": ROBOFLOW, "train/images/a.jpg": b"", "train/labels/a.txt": b"1 0 0 1 1"}
    files |= {"valid/images/b.JPG": b"", "valid/labels/b.txt": b""}
    assert documents(read(files)) == {
        "train/images/a.jpg": {"bbox": [[0.0, 0.0, 1.0, 1.0]], "label": [1]}
    }
    both = read(
        {**files, "data.yaml": b"test: [train/images, ./valid/images/]\nnc: 2"}, split="test"
    )
    assert [*documents(both)] == ["train/images/a.jpg", "valid/images/b.JPG"]
    assert both.columns[0].categories == ("class_0", "class_1")


def test_polygons_become_the_boxes_around_them_and_lines_that_repeat_are_none() -> None:
    text = b"\xef\xbb\xbf0 0.1 0.2 0.5 0.2 0.3 0.6\r\n\r\n1 0.5 0.5 0.25 0.5\n1 .5 .5 .25 .5\n"
    files = {"data.yaml": DATA, "images/train/a.jpg": b"", "labels/train/a.txt": text}
    (its,) = documents(read(files)).values()
    assert its["label"] == [0, 1]
    assert np.allclose(its["bbox"], [[0.3, 0.4, 0.4, 0.4], [0.5, 0.5, 0.25, 0.5]])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"0 0.5 0.5 0.1", "it has 4 numbers"),
        (b"0 .5 .5 .1 .1 .9", "it has 6 numbers"),
        (b"0 0.5 0.5 0.1 x", "could not convert string to float: 'x'"),
        (b"3 0.5 0.5 0.1 0.1", "it has the class 3, and there are 3 classes, from 0"),
        (b"0.5 0.5 0.5 0.1 0.1", "it has the class 0.5"),
        (b"0 320 240 64 48", "it has 320, but coordinates are fractions of the image"),
        (b"0 0.5 nan 0.1 0.1", "it has nan"),
        (b"0 0.5 0.5 0.1 -0.1", "it has -0.1"),
        (b"0 0.5 0.5 0.1 -0.005", "it has a box of width 0.1 and height -0.005"),
    ],
)
def test_a_bad_line_is_named_with_its_file(line: bytes, reason: str) -> None:
    files = tree()
    files[f"labels/train/{9:012}.txt"] += line
    with pytest.raises(CorruptSample, match=f"labels/train/{9:012}.txt, line 2: {reason}"):
        read(files)


@pytest.mark.parametrize(
    ("data", "options", "error", "reason"),
    [
        (b"a: [", {}, CorruptSample, "the file data.yaml is damaged: while parsing"),
        (b"[" * 5000, {}, CorruptSample, "is damaged"),
        (b"- a", {}, CorruptSample, "it is no mapping"),
        (b"train: images/train", {}, CorruptSample, "it has no `names`"),
        (b"names: {0: a, 2: b}\ntrain: x", {}, CorruptSample, "keys of `names` are not 0, 1"),
        (b"names: [[a], b]\ntrain: x", {}, CorruptSample, "has a list, which is no text"),
        (b"nc: many\ntrain: x", {}, CorruptSample, "`nc` is 'many', which is no number"),
        (b"names: [a]\nnc: 2\ntrain: x", {}, CorruptSample, "`nc` is 2, and `names` has 1"),
        (DATA, {"split": "test"}, ConfigError, "no folders of the split 'test', but of train, val"),
        (b"names: [a]\ntrain: train2017.txt", {}, ConfigError, "says 'train2017.txt' of"),
        (
            b"names: [a]\ntrain: /content/train",
            {},
            ConfigError,
            "List the folders of images in the option `images`",
        ),
        (b"names: [a]\nkpt_shape: [17, 3]\ntrain: x", {}, ConfigError, "describes keypoints"),
        (DATA, {"images": ["elsewhere"]}, ConfigError, "none of the 1 images has labels; those of"),
        (DATA, {"images": ["images", "imges"]}, ConfigError, "folder 'imges', .* has no images"),
    ],
)
def test_what_the_file_says_is_checked(
    data: bytes, options: dict[str, Any], error: type[Exception], reason: str
) -> None:
    files = {**tree(), "data.yaml": data, "elsewhere/a.jpg": b""}
    with pytest.raises(error, match=reason):
        read(files, **options)


def test_classes_are_named_as_they_are_written() -> None:
    files = {
        "data.yaml": b"names: [yes, 1.0, 010]\nnc: 3\ntrain: images\ntest: ~",
        "images/a.jpg": b"",
    }
    found = read({**files, "labels/a.txt": b"1 .5 .5 .1 .1"})
    assert found.columns[0].categories == ("yes", "1.0", "010")


@pytest.mark.parametrize(
    ("link", "end"),
    [
        ("[{0}, {0}]", "names: [*a24]\ntrain: images/train"),
        ("[{0}, {0}]", "names: [a]\nnc: *a24\ntrain: images/train"),
        ("{{<<: [{0}, {0}]}}", "names: [a, b, c]\ntrain: images/train"),
    ],
)
def test_a_file_that_stands_for_more_than_it_has_takes_no_memory(link: str, end: str) -> None:
    links = "".join(f"a{n}: &a{n} {link.format(f'*a{n - 1}')}\n" for n in range(1, 25))
    files = {**tree(), "data.yaml": f"a0: &a0 {{x: y}}\n{links}{end}".encode()}
    tracemalloc.start()
    try:
        with contextlib.suppress(CorruptSample):
            read(files)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_other_labels_make_another_index() -> None:
    def index_of(label: bytes) -> bytes:
        files = {"data.yaml": DATA, "images/train/a.jpg": b"", "labels/train/a.txt": label}
        manifest = read(files)
        return yolo().index_of(FileTable(manifest.names, np.array([0])), manifest.columns).digest()

    assert index_of(b"0 .5 .5 .1 .1") == index_of(b"0 0.5 0.50 .1 .1\n")
    assert index_of(b"0 .5 .5 .1 .1") != index_of(b"1 .5 .5 .1 .1")


def test_wrong_options_are_refused() -> None:
    for options in ({"data": "../a.yaml"}, {"images": ["/data"]}, {"data": ""}):
        with pytest.raises(ConfigError, match="of a yolo dataset has"):
            yolo(**options)


def test_images_and_their_boxes_are_served(
    gyred: StartDaemon, s3_server: S3Server, tmp_path: Path
) -> None:
    places: dict[str, Place] = {"local": LocalPlace(tmp_path / "set"), "s3": S3Place(s3_server)}
    tables = {}
    for name, place in places.items():
        for path, data in tree().items():
            place.put(path, data)
        tables[name] = {"uri": place.root, "format": "yolo", "storage": dict(place.settings)}
        tables[f"{name}-some"] = {**tables[name], "filter": "num_objects > 1"}
    local = places["local"]
    local.put("bad/images/a.jpg", b"")
    local.put("bad/labels/a.txt", b"0 1 1\n")
    (tmp_path / "outside.yaml").write_bytes(DATA)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "data.yaml").symlink_to(tmp_path / "outside.yaml")
    changes: dict[str, dict[str, Any]] = {
        "bad": {"images": ["bad/images"]},
        "empty": {"images": ["labels"]},
        "nowhere": {"data": "nowhere.yaml"},
        "folder": {"data": "two"},
    }
    for name in ("a", "b"):
        local.put(f"two/{name}.yaml", DATA)
    tables |= {name: {**tables["local"], **change} for name, change in changes.items()}
    tables["link"] = {**tables["local"], "uri": str(tmp_path / "linked")}
    daemon = gyred({"datasets": tables})
    for name in ("local", "s3", "local-some", "s3-some"):
        least = 2 if name.endswith("some") else 0
        seen = []
        with Loader(name, batch_size=5, epochs=1, tail="drop", address=daemon.address) as loader:
            assert loader.categories == {"objects": CLASSES}
            for batch in loader:
                found = objects(batch, "objects")
                data, bounds = batch["file"].numpy().tobytes(), batch["file.offsets"].tolist()
                for row, its in enumerate(found):
                    file = data[bounds[row] : bounds[row + 1]]
                    (number,) = (n for n in range(NUM_IMAGES) if file == noise(n, len(file)))
                    assert its == expected(number)
                    assert batch["num_objects"][row] == len(its["label"]) >= least
                    seen.append(number)
        assert len(set(seen)) == len(seen) >= 10
    errors: dict[str, tuple[type[Exception], str]] = {
        "bad": (RemoteCorruptSample, r"the labels bad/labels/a\.txt, line 1: it has 3 numbers"),
        "empty": (ShardMissing, "lists no files"),
        "nowhere": (ShardMissing, r"nowhere\.yaml"),
        "folder": (InvalidRequest, "two is 2 files; name the one"),
        "link": (NotAllowed, "a link leads out of"),
    }
    for name, (error, reason) in errors.items():
        with pytest.raises(error, match=reason):
            Loader(name, batch_size=5, address=daemon.address)


def test_labels_that_changed_are_served_once_the_dataset_is_indexed_again(
    gyred: StartDaemon, s3_server: S3Server, tmp_path: Path
) -> None:
    places: dict[str, Place] = {"local": LocalPlace(tmp_path / "set"), "s3": S3Place(s3_server)}
    tables = {}
    for name, place in places.items():
        tables[name] = {"uri": place.root, "format": "yolo", "storage": dict(place.settings)}
        for path, data in tree().items():
            large = data * -(-9000 // len(data)) if path.endswith("jpg") else data
            place.put(path, large)  # the fingerprint covers the middle of a file
    kept = [{"name": "drop", "field": "num_objects"}, {"name": "cache"}]
    daemon = gyred({"cache_dir": str(tmp_path / "cache"), "datasets": tables})

    def labels(name: str, transform: Sequence[Mapping[str, Any]] | None) -> list[list[int]]:
        options: dict[str, Any] = {"order": "sequential", "epochs": 1, "tail": "drop"}
        with Loader(
            name, batch_size=5, transform=transform, address=daemon.address, **options
        ) as loader:
            return [its["label"] for batch in loader for its in objects(batch, "objects")]

    for name, place in places.items():
        for transform in (None, kept):
            assert labels(name, transform) == [
                expected(number)["label"] if number % 8 else [] for number in range(NUM_IMAGES)
            ]
        place.put(f"labels/train/{2:012}.txt", re.sub(rb"(?m)^\d", b"2", labels_text(2)))
        with identified_channel(daemon.address) as channel:
            request = pb.IndexDatasetRequest(dataset=pb.DatasetRef(name=name))
            list(pb_grpc.LoaderStub(channel).IndexDataset(request, timeout=60))
        for transform in (None, kept):
            assert labels(name, transform)[2] == [2] * len(lines_of(2))
