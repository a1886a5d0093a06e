"""Files of annotations of COCO: what they may say, and their images through a real daemon."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from gyre_client import Loader, objects
from gyre_client.errors import CorruptSample as RemoteCorruptSample
from gyre_client.errors import NotAllowed, ShardMissing
from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.formats import SampleIndex
from gyre_daemon.datasets.formats.base import ManifestFormat
from gyre_daemon.datasets.known_formats import make_format
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.storage.shard import FileTable, Texts

from tests.conftest import S3Server, StartDaemon
from tests.contract.formats.format_contract import IndexContract, Sample
from tests.contract.places import HttpPlace, LocalPlace, Place, S3Place, noise
from tests.contract.storage.objects import ObjectServer

PATH = "annotations/instances_val2017.json"
OPTIONS: dict[str, Any] = {"annotations": PATH, "images": "val2017"}
DROP = [{"name": "drop", "field": "objects"}]
NUM_IMAGES = 40
FILES = {f"val2017/{n:012}.jpg": noise(n, n * 31 % 400) for n in range(NUM_IMAGES)}


def document() -> dict[str, Any]:
    """As the files of cocodataset.org are: ids with gaps, and keys that do not count here."""
    rng = np.random.default_rng(0)
    images = [
        {"id": 1000 - n, "file_name": f"{n:012}.jpg", "height": 40 + n, "width": 50}
        for n in range(NUM_IMAGES)
    ]
    annotations = [
        {
            "id": number,
            "image_id": int(rng.integers(960, 1000)) + 1,
            "category_id": int(rng.choice([90, 1, 18])),
            "bbox": rng.integers(1, 20, 4).tolist() if number % 2 else [0.5, 1.25, 3.0, 4.75],
            "area": 7.5,
            "iscrowd": number % 5 // 4,
            "segmentation": [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]],
        }
        for number in range(90)
    ]
    names = {90: "toothbrush", 1: "person", 18: "dog"}
    categories = [{"id": key, "name": name, "supercategory": "x"} for key, name in names.items()]
    return {"info": {}, "images": images, "annotations": annotations, "categories": categories}


def expected(source: dict[str, Any]) -> list[dict[str, Any]]:
    """What each image has, in the order of the images."""
    labels = {1: 0, 18: 1, 90: 2}
    found = []
    for image in source["images"]:
        its = [each for each in source["annotations"] if each["image_id"] == image["id"]]
        found.append(
            {
                "bbox": [[float(number) for number in each["bbox"]] for each in its],
                "label": [labels[each["category_id"]] for each in its],
                "category_id": [each["category_id"] for each in its],
                "area": [each["area"] for each in its],
                "iscrowd": [each["iscrowd"] for each in its],
            }
        )
    return found


def coco(**options: Any) -> ManifestFormat:
    made = make_format("set", DatasetConfig("/data", "coco", {**OPTIONS, **options}))
    assert isinstance(made, ManifestFormat)
    return made


def read(source: Any, **options: Any) -> Any:
    return coco(**options).read_manifest("a.json", json.dumps(source).encode())


class TestCoco(IndexContract):
    """The head of an image is its path and the JSON of its objects."""

    name = "coco"
    options: ClassVar = {**OPTIONS, "fields": ["path", "objects", "image=file"]}

    def shards(self) -> tuple[list[bytes], list[Sample]]:
        samples = [
            {
                "path": path.encode(),
                "objects": json.dumps(its, separators=(",", ":")).encode(),
                "image": data,
            }
            for (path, data), its in zip(FILES.items(), expected(document()), strict=True)
        ]
        return [b"".join(b"".join(sample.values()) for sample in samples)], list(samples)

    def index(self, shards: Sequence[bytes]) -> SampleIndex:
        made = self.made()
        assert isinstance(made, ManifestFormat)
        manifest = made.read_manifest("a.json", json.dumps(document()).encode())
        sizes = np.array([len(data) for data in FILES.values()], np.int64)
        assert [manifest.names[number].decode() for number in range(NUM_IMAGES)] == [*FILES]
        return made.index_of(FileTable(manifest.names, sizes), manifest.columns)

    def test_no_samples(self) -> None:
        nothing: dict[str, list[Any]] = {"images": [], "annotations": [], "categories": []}
        manifest = read(nothing)
        assert len(manifest.names) == 0
        table = FileTable(Texts.of([]), np.empty(0, np.int64))
        assert coco().index_of(table, manifest.columns).num_samples == 0


def changed(key: str, number: int, **values: Any) -> dict[str, Any]:
    source = document()
    source[key][number].update(values)
    return source


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ([], "Expected `object`, got `array`"),
        ({"images": [], "annotations": []}, "missing required field `categories`"),
        (changed("annotations", 7, bbox=[1, 2, 3]), "annotation 7 has a bbox of 3 numbers, not 4"),
        (changed("annotations", 7, bbox=[1, 2, 3, "4"]), r"\$.annotations\[7\].bbox"),
        (changed("annotations", 7, image_id=5), "annotation 7 has the image_id 5, which no image"),
        (changed("annotations", 7, category_id=5), "the category_id 5, which no category has"),
        (changed("images", 7, id=1000), "two images have the id 1000"),
        (changed("categories", 1, id=90), "two categories have the id 90"),
        (changed("images", 7, id=1 << 64), "Integer|64 bits"),
        (changed("images", 7, width=1 << 63), "image 7 has the width 9223372036854775808|64 bits"),
        (changed("images", 7, file_name="../a.jpg"), "row 8 has the path 'val2017/../a.jpg'"),
        (changed("images", 7, file_name=""), "row 8 has the path"),
        (changed("images", 7, file_name=3), r"\$.images\[7\].file_name"),
    ],
)
def test_damage_is_named(source: Any, reason: str) -> None:
    with pytest.raises(CorruptSample, match=f"the annotations a.json are damaged: .*{reason}"):
        read(source)


def test_an_object_may_lack_its_area_and_its_crowd() -> None:
    source = document()
    for each in source["annotations"]:
        del each["area"], each["iscrowd"]
    columns = {column.name: column for column in read(source).columns}
    for number, its in enumerate(expected(document())):
        found = json.loads(columns["objects"].values[number])
        assert found["area"] == [box[2] * box[3] for box in its["bbox"]]
        assert found["iscrowd"] == [0] * len(its["bbox"])
    assert columns["objects"].categories == ("person", "dog", "toothbrush")


def test_sizes_are_served_if_all_images_have_them() -> None:
    names = {column.name for column in read(document()).columns}
    some = changed("images", 3, width=None)
    del some["images"][5]["height"]
    assert names - {column.name for column in read(some).columns} == {"width", "height"}
    for odd in ("640", 640.5, [640], True):  # read until sizes were served, and still is
        columns = {column.name for column in read(changed("images", 3, width=odd)).columns}
        assert names - columns == {"width"}


def test_a_job_from_before_sizes_were_served_goes_on_with_its_fields() -> None:
    with_sizes, without = document(), document()
    for image in without["images"]:
        del image["width"], image["height"]
    fields = ["file", "objects", "image_id", "num_objects"]
    digests = set()
    for source, options in ((with_sizes, {"fields": fields}), (without, {})):
        manifest = read(source)
        table = FileTable(manifest.names, np.ones(len(manifest.names), np.int64))
        digests.add(coco(**options).index_of(table, manifest.columns).digest())
    assert len(digests) == 1


def test_two_annotations_of_one_id_are_two_objects() -> None:
    source = document()
    columns = {column.name: column for column in read(source).columns}
    for each in source["annotations"]:
        each["id"] = 7
    again = {column.name: column for column in read(source).columns}
    assert columns["objects"].values.data == again["objects"].values.data


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"annotations": "../a.json"}, "`annotations` of a coco dataset has '../a.json'"),
        ({"images": "/data"}, "`images` of a coco dataset has '/data'"),
        ({"annotations": ""}, "`annotations` of a coco dataset has ''"),
        ({"fields": ["objects", "a=objects", "a=file"]}, "`fields` has 'a' twice"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        coco(**options)
    marked = b"\xef\xbb\xbf" + json.dumps(document()).encode()
    assert len(coco().read_manifest("a.json", marked).names) == NUM_IMAGES
    with pytest.raises(ConfigError, match="`annotations` is missing"):
        make_format("set", DatasetConfig("/data", "coco", {}))


def test_what_lies_outside_of_the_folder_is_not_read(gyred: StartDaemon, tmp_path: Path) -> None:
    """Who may write the folder must not have the daemon read what others may not."""
    place = LocalPlace(tmp_path / "set")
    for path, data in {**FILES, PATH: msgspec.json.encode(document())}.items():
        place.put(path, data)
    private = tmp_path / "private"
    private.mkdir()
    (private / "a.json").write_bytes(msgspec.json.encode(document()))
    (tmp_path / "set" / "link").symlink_to(private)
    (tmp_path / "set" / "link.json").symlink_to(private / "a.json")
    (tmp_path / "set" / "annotations" / "link.json").symlink_to(private / "a.json")
    table = {"uri": place.root, "format": "coco", **OPTIONS}
    links = {"folder": "link/a.json", "link": "link.json", "below": "annotations/link.json"}
    tables = {name: {**table, "annotations": path} for name, path in links.items()}
    tables["images"] = {**table, "images": "link"}
    daemon = gyred({"datasets": {"set": table, **tables}})
    Loader("set", batch_size=7, address=daemon.address).close()
    for name in links:
        with pytest.raises(NotAllowed, match="link"):
            Loader(name, batch_size=7, address=daemon.address)
    with pytest.raises((NotAllowed, ShardMissing), match="link"):
        Loader("images", batch_size=7, address=daemon.address)


def test_images_and_their_objects_are_served(
    gyred: StartDaemon, s3_server: S3Server, object_server: ObjectServer, tmp_path: Path
) -> None:
    source = document()
    places: dict[str, Place] = {
        "local": LocalPlace(tmp_path / "set"),
        "s3": S3Place(s3_server),
        "http": HttpPlace(object_server),
    }
    tables = {}
    for name, place in places.items():
        for path, data in {**FILES, PATH: msgspec.json.encode(source), "val2017/x": b"x"}.items():
            place.put(path, data)
        table = {"uri": place.root, "format": "coco", "storage": dict(place.settings), **OPTIONS}
        tables[name] = table
        tables[f"{name}-some"] = {**table, "filter": "num_objects > 1"}
    damaged = json.dumps(changed("annotations", 3, bbox=[])).encode()
    places["local"].put("damaged.json", damaged)
    places["local"].put("absent.json", json.dumps(changed("images", 3, file_name="b.jpg")).encode())
    for name in ("damaged", "absent", "nowhere"):
        tables[name] = {**tables["local"], "annotations": f"{name}.json"}
    daemon = gyred({"datasets": tables})
    wanted, files = expected(source), list(FILES.values())
    for name in ("local", "s3", "http", "local-some", "s3-some"):
        least = 2 if name.endswith("some") else 0
        seen = []
        with Loader(name, batch_size=7, epochs=1, tail="drop", address=daemon.address) as loader:
            assert loader.categories["objects"] == ("person", "dog", "toothbrush")
            for batch in loader:
                found = objects(batch, "objects")
                data, bounds = batch["file"].numpy().tobytes(), batch["file.offsets"].tolist()
                for row, image_id in enumerate(batch["image_id"].tolist()):
                    number = 1000 - image_id
                    assert found[row] == wanted[number]
                    assert data[bounds[row] : bounds[row + 1]] == files[number]
                    assert batch["num_objects"][row] == len(found[row]["bbox"]) >= least
                    assert batch["width"][row] == 50
                    assert batch["height"][row] == 40 + number
                    seen.append(number)
        assert len(set(seen)) == len(seen) >= 14
    for chain in (DROP, [{**DROP[0], "field": "num_objects"}]):  # names do not depend on transforms
        with Loader("local", batch_size=7, transform=chain, address=daemon.address) as loader:
            assert loader.categories == {"objects": ("person", "dog", "toothbrush")}
            assert chain[0]["field"] not in next(loader)
    with pytest.raises(RemoteCorruptSample, match=r"damaged\.json are damaged: annotation 3 has"):
        Loader("damaged", batch_size=7, address=daemon.address)
    with pytest.raises(ShardMissing, match=r"val2017/b\.jpg does not exist"):
        Loader("absent", batch_size=7, address=daemon.address)
    with pytest.raises(ShardMissing, match=r"nowhere\.json"):
        Loader("nowhere", batch_size=7, address=daemon.address)
