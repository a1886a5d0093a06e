"""Boxes that move with their image, compared with rectangles that are painted into it."""

import json
from typing import Any

import numpy as np
import pytest
from gyre_daemon.transforms import Field, Transform
from gyre_daemon.transforms.built_in import Copy, CropOrPad
from gyre_daemon.transforms.worker import Chain, TransformFailed
from gyre_media.boxes import DecodeBoxes, SanitizeBoxes
from gyre_media.colors import RandAugment, TrivialAugment
from gyre_media.decode_image import DecodeImage
from gyre_media.geometry import (
    CenterCrop,
    HorizontalFlip,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    VerticalFlip,
)

Array = np.ndarray[Any, Any]
BYTES = Field(np.dtype(np.uint8), (None,))
IMAGE = Field(np.dtype(np.uint8), (None, None, 3), is_whole=True)
HEIGHT, WIDTH = 60, 84
# None covers another, so that each has all of its pixels.
CORNERS = [[2, 3, 20, 31], [30, 0, 84, 12], [25, 40, 26, 60], [40, 20, 70, 50], [0, 50, 9, 60]]


def painted() -> Array:
    """An image in which the pixels of box number n are n + 1."""
    image = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    for number, (left, top, right, bottom) in enumerate(CORNERS):
        image[top:bottom, left:right] = number + 1
    return image


def decoded(stored: Array, image: Array, **options: Any) -> Array:
    sample = {"image": image, "bbox": stored}
    DecodeBoxes("bbox", **options).apply(sample, np.random.default_rng(0), {})
    return sample["boxes"]


def as_json(document: Any) -> Array:
    return np.frombuffer(json.dumps(document).encode(), np.uint8)


NEAREST: dict[str, Any] = {"interpolation": "nearest", "antialias": False, "boxes": ("boxes",)}
MOVING: list[tuple[Transform, float]] = [  # and by how many pixels a painted edge may differ
    (RandomResizedCrop((41, 50), **NEAREST), 0.51),
    (Resize((97, 53), **NEAREST), 0.51),
    (Resize(120, **NEAREST), 0),
    (CenterCrop((33, 40), boxes=("boxes",)), 0),
    (CenterCrop((81, 37), boxes=("boxes",)), 0),
    (CenterCrop((61, 87), boxes=("boxes",)), 0),
    (RandomCrop((40, 50), boxes=("boxes",)), 0),
    (RandomCrop((70, 90), padding=7, pad_if_needed=True, boxes=("boxes",)), 0),
    (HorizontalFlip(boxes=("boxes",)), 0),
    (VerticalFlip(boxes=("boxes",)), 0),
]


@pytest.mark.parametrize(("transform", "slack"), MOVING, ids=lambda each: type(each).__name__)
def test_boxes_are_where_their_pixels_are(transform: Transform, slack: float) -> None:
    fields = {"image": IMAGE, "boxes": Field(np.dtype(np.float32), (None, 5), image="image")}
    made = transform.outputs(fields)
    assert made["boxes"] == fields["boxes"]
    assert not made["image"].is_whole
    found = []
    for seed in range(40):
        image = painted()
        sample = {"image": image, "boxes": decoded(np.array(CORNERS), image, format="xyxy")}
        transform.apply(sample, np.random.default_rng(seed), {})
        boxes, pixels = sample["boxes"], sample["image"][:, :, 0]
        assert boxes.dtype == np.float32
        assert boxes.shape == (5, 5)
        zoom = pixels.size / (HEIGHT * WIDTH) if isinstance(transform, Resize) else 1
        for number, (left, top, right, bottom, visible) in enumerate(boxes.tolist()):
            y, x = np.nonzero(pixels == number + 1)
            if not len(x):
                assert visible == 0 or min(right - left, bottom - top) <= slack * 2
                continue
            edges = [x.min(), y.min(), x.max() + 1, y.max() + 1]
            assert np.abs(np.array(edges) - [left, top, right, bottom]).max() <= slack
            if not slack:
                assert visible == pytest.approx(len(x) / zoom / (image == number + 1).sum() * 3)
        found.append(boxes.tobytes())
    assert (len(set(found)) > 1) == transform.is_random


def test_what_is_visible_of_a_box_is_known_after_several_cuts() -> None:
    """Half of it, then a half of that; a resize and a mirror change nothing."""
    image = np.zeros((40, 80, 3), np.uint8)
    boxes = decoded(np.array([[20.0, 10.0, 60.0, 30.0]]), image, format="xyxy")
    half = np.array([[20, 10, 40, 30, 0.5]], np.float32)
    sample: dict[str, Array] = {"image": image[:, :40], "boxes": half}
    assert boxes.tolist() == [[20, 10, 60, 30, 1]]
    for transform in (
        CenterCrop((20, 40), boxes=("boxes",)),
        Resize((60, 80), boxes=("boxes",)),
        HorizontalFlip(1.0, boxes=("boxes",)),
        CenterCrop((30, 80), boxes=("boxes",)),
    ):
        transform.apply(sample, np.random.default_rng(0), {})
    # 20 high around its middle, all of it; then a half of that
    assert sample["boxes"].tolist() == [[0, 0, 40, 30, 0.25]]


def test_each_way_to_write_boxes_means_the_same() -> None:
    image = painted()
    corners = np.array(CORNERS, np.float64)
    size, middle = corners[:, 2:] - corners[:, :2], (corners[:, 2:] + corners[:, :2]) / 2
    scale = [WIDTH, HEIGHT] * 2
    written = {
        "xyxy": corners,
        "xywh": np.hstack([corners[:, :2], size]),
        "cxcywh": np.hstack([middle, size]),
    }
    wanted = np.column_stack([corners, np.ones(5)])
    for kind, stored in written.items():
        for each, normalized in ((stored, False), (stored / scale, True)):
            options: dict[str, Any] = {"format": kind, "normalized": normalized}
            of_objects = {"a": [{"b": row} for row in each.tolist()]}
            found = [
                decoded(each, image, **options),
                decoded(each.reshape(-1), image, **options),
                decoded(each.astype(np.float32), image, **options),
                decoded(as_json(each.tolist()), image, **options),
                decoded(as_json(of_objects), image, key="a.b", **options),
                decoded(as_json({"a": {"b": each.tolist()}}), image, key="a.b", **options),
            ]
            for boxes in found:
                assert boxes.dtype == np.float32
                assert np.abs(boxes - wanted).max() < 1e-5
    for nothing in (np.empty((0, 4)), np.empty(0, np.float32), as_json([])):
        assert decoded(nothing, image, format="xywh").shape == (0, 5)


def test_what_json_says_of_each_box_is_a_field() -> None:
    objects = [
        {"bbox": [1, 2, 3, 4], "category_id": 18, "area": 9.5, "kind": "dog", "iscrowd": 0},
        {"bbox": [5, 6, 7, 8], "category_id": 90, "area": 3, "kind": "cat", "iscrowd": 1},
    ]
    transform = DecodeBoxes(
        "json",
        "xywh",
        key="annotations.bbox",
        fields={
            "labels": "annotations.category_id",
            "area": "annotations.area",
            "kind": "annotations.kind",
            "iscrowd": "annotations.iscrowd",
        },
        floats=("area",),
        classes={"kind": ("cat", "dog"), "labels": (1, 18, 90)},
    )
    made = transform.outputs({"json": BYTES, "image": IMAGE})
    sample = {"image": painted(), "json": as_json({"annotations": objects})}
    transform.apply(sample, np.random.default_rng(0), {})
    found = {name: sample[name] for name in made}
    assert {name: each.dtype for name, each in found.items()} == {
        name: field.dtype for name, field in made.items()
    }
    assert found["boxes"][:, :4].tolist() == [[1, 2, 4, 6], [5, 6, 12, 14]]
    assert found["labels"].tolist() == [1, 2]
    assert found["kind"].tolist() == [1, 0]
    assert found["area"].tolist() == [9.5, 3]
    assert found["iscrowd"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("stored", "options", "reason"),
    [
        ([[1, 2, 3, 4], [5, 5, -1, 2]], {}, r"box 1 of 'bbox' is \[5, 5, -1, 2\], and has a negat"),
        ([[1, 2, float("nan"), 4]], {}, "box 0 .* has what is no number"),
        ([[1, 2, float("inf"), 4]], {}, "box 0 .* has what is no number"),
        ([[80, 2, 10, 4]], {}, "box 0 .* has places outside of the image of 84 x 60 pixels"),
        ([[90, 2, 10, 4]], {}, "box 0 .* outside of the image"),
        ([[1, 2, 3]], {}, r"box 0 of 'bbox' is \[1, 2, 3\], and not a list of 4 numbers"),
        ([[1, 2, 3, "4"]], {}, "box 0 .* not a list of 4 numbers"),
        ([1, 2, 3, 4], {}, "box 0 of 'bbox' is 1, and not"),
        ({"a": 1}, {}, "are {'a': 1}, and no list"),
        ({"a": 1}, {"key": "b.c"}, "its JSON has nothing under 'b' of the key 'b.c'"),
        ([{"b": [1, 2, 3, 4]}, {}], {"key": "b"}, "nothing under 'b'"),
        ({"b": [[1, 2, 3, 4]], "c": [1, 2]}, {"key": "b"}, "the key 'c' has 2 values for 1 boxes"),
        ({"b": [[1, 2, 3, 4]], "c": 7}, {"key": "b"}, "the key 'c' has 7 for 1 boxes"),
        ({"b": [[1, 2, 3, 4]], "c": [0.5]}, {"key": "b"}, "0 is 0.5; name the field in `floats`"),
        ({"b": [[1, 2, 3, 4]], "c": ["x"]}, {"key": "b"}, "'x'; list all its values in `classes`"),
        ({"b": [[1, 2, 3, 4]], "c": [None]}, {"key": "b"}, "'c' of box 0 is None"),
    ],
)
def test_bad_boxes_are_refused(stored: Any, options: dict[str, Any], reason: str) -> None:
    if isinstance(stored, dict) and "c" in stored:
        options = {**options, "fields": {"labels": "c"}}
    with pytest.raises(ValueError, match=reason):
        decoded(as_json(stored), painted(), format="xywh", **options)


def test_bad_numbers_and_bad_json_are_refused() -> None:
    with pytest.raises(ValueError, match="'bbox' has 7 numbers, and boxes have 4 each"):
        decoded(np.arange(7.0), painted(), format="xyxy")
    with pytest.raises(ValueError, match="Expecting"):
        decoded(np.frombuffer(b"[1, ", np.uint8), painted(), format="xyxy")
    with pytest.raises(ValueError, match=r"'c' of box 0 is 'x', none of `classes`"):
        decoded(
            as_json({"b": [[1, 2, 3, 4]], "c": ["x"]}),
            painted(),
            format="xywh",
            key="b",
            fields={"labels": "c"},
            classes={"labels": ("y",)},
        )


def test_boxes_beyond_the_image_are_cut_where_that_is_wanted() -> None:
    stored = np.array([[-0.5, 0, 84.9, 60], [74, 0, 94, 10], [90, 0, 99, 9]], np.float32)
    assert decoded(stored[:1], painted(), format="xyxy").tolist() == [[0, 0, 84, 60, 1]]
    found = decoded(stored[1:], painted(), format="xyxy", outside="clip")
    assert found.tolist() == [[74, 0, 84, 10, 0.5], [84, 0, 84, 9, 0]]


def sanitized(boxes: Array, **options: Any) -> dict[str, Array]:
    image = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    sample = {"image": image, "boxes": boxes, "labels": np.arange(len(boxes))}
    sample["points"] = np.arange(len(boxes) * 6, dtype=np.uint8).reshape(-1, 3, 2)
    transform = SanitizeBoxes(fields=("labels", "points"), **options)
    transform.apply(sample, np.random.default_rng(0), {})
    return sample


@pytest.mark.parametrize("max_boxes", [0, 60])
def test_boxes_that_cannot_be_seen_are_dropped_with_what_belongs_to_them(max_boxes: int) -> None:
    rng = np.random.default_rng(5)
    corners = rng.uniform(0, 40, (50, 4)).round(1)
    corners[:, 2:] = corners[:, :2] + rng.uniform(0, 20, (50, 2)).round(1)
    boxes = np.column_stack([corners, rng.choice([0, 0.2, 0.6, 1], 50)]).astype(np.float32)
    found = sanitized(boxes, min_size=3, min_area=30, min_visible=0.6, max_boxes=max_boxes)
    stay = [
        number
        for number, (x1, y1, x2, y2, visible) in enumerate(boxes.astype(float).tolist())
        if min(x2 - x1, y2 - y1) >= 3 and (x2 - x1) * (y2 - y1) >= 30 and visible > 0.5
    ]
    num = len(stay)
    assert 5 < num < 40
    assert found["num_boxes"] == num
    assert found["num_boxes"].dtype == np.int32
    rows = max_boxes or 50
    assert found["boxes"].shape == (rows, 4)
    assert np.array_equal(found["boxes"][:num], boxes[stay, :4])
    assert found["labels"].tolist() == stay + [-1] * (rows - num)
    assert np.array_equal(found["points"][:num, 0, 0], np.array(stay, np.uint8) * 6)
    assert not found["boxes"][num:].any()
    assert not found["points"][num:].any()


def test_a_box_of_the_least_size_stays_wherever_it_lies() -> None:
    places = np.random.default_rng(0).uniform(0, 1000, (300, 2)).round(2)
    boxes = np.hstack([places, places + 1, np.ones((300, 1))]).astype(np.float32)
    assert sanitized(boxes)["num_boxes"] == 300
    assert sanitized(boxes, min_size=1.001)["num_boxes"] == 0


def test_a_box_without_area_never_stays() -> None:
    boxes = decoded(np.array([[3, 3, 3, 9], [1, 1, 2, 2]]), painted(), format="xyxy")
    found = sanitized(boxes, min_size=0, min_area=0)
    assert found["labels"].tolist() == [1, -1]
    assert sanitized(boxes[:1], min_size=0, min_area=0)["num_boxes"] == 0


def test_results_have_the_format_that_is_wanted() -> None:
    boxes = decoded(np.array([[21, 15, 63, 45]]), painted(), format="xyxy")
    wanted = {"xyxy": [21, 15, 63, 45], "xywh": [21, 15, 42, 30], "cxcywh": [42, 30, 42, 30]}
    for kind, numbers in wanted.items():
        assert sanitized(boxes, format=kind)["boxes"].tolist() == [numbers]
        parts = sanitized(boxes, format=kind, normalized=True)["boxes"]
        assert parts.tolist() == [[a / b for a, b in zip(numbers, [84, 60] * 2, strict=True)]]


def test_a_sample_with_more_boxes_or_other_fields_is_refused() -> None:
    boxes = decoded(np.array(CORNERS), painted(), format="xyxy")
    with pytest.raises(ValueError, match="the sample has 5 boxes, and max_boxes is 4; raise"):
        sanitized(boxes, max_boxes=4)
    sample = {"boxes": boxes, "labels": np.arange(4)}
    with pytest.raises(ValueError, match="'labels' has 4 values for 5 boxes"):
        SanitizeBoxes(fields=("labels",)).apply(sample, np.random.default_rng(0), {})


DECODE = ("decode_image", DecodeImage("jpg"))
BOXES = ("decode_boxes", DecodeBoxes("json", "xywh"))
SANITIZE = ("sanitize_boxes", SanitizeBoxes())
NORMALIZED = ("sanitize_boxes", SanitizeBoxes(normalized=True))
SOURCE = {"jpg": BYTES, "json": BYTES}


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([DECODE, BOXES, ("resize", Resize(9))], r"boxes 'boxes' lie in 'image' .* boxes = \["),
        ([DECODE, ("resize", Resize((9, 9))), BOXES], "has changed since"),
        ([DECODE, ("flip", HorizontalFlip()), BOXES], "has changed since"),
        ([("decode_image", DecodeImage("jpg", min_size=8)), BOXES], "has changed since"),
        ([DECODE, ("flip", HorizontalFlip(boxes=("json",)))], "boxes that move with their image"),
        ([DECODE, ("flip", HorizontalFlip(boxes=("image",)))], "name each of them once"),
        ([DECODE, ("sanitize_boxes", SanitizeBoxes("json"))], "boxes that move with their image"),
        ([DECODE, ("boxes", DecodeBoxes("image", "xyxy"))], r"uint8 \[\*, \*, 3\], and boxes are"),
        ([DECODE, ("augment", RandAugment()), BOXES], "has changed since"),
        ([DECODE, BOXES, ("augment", RandAugment())], "takes no boxes along"),
        ([DECODE, BOXES, ("augment", TrivialAugment())], "takes no boxes along"),
        ([DECODE, BOXES, SANITIZE, ("flip", HorizontalFlip())], "put sanitize_boxes behind"),
        ([DECODE, BOXES, NORMALIZED, ("flip", HorizontalFlip())], "put sanitize_boxes behind"),
        ([DECODE, BOXES, SANITIZE, ("resize", Resize((8, 8)))], "put sanitize_boxes behind"),
        (
            [DECODE, BOXES, ("pad", CropOrPad("boxes", 9)), ("flip", HorizontalFlip())],
            "boxes 'boxes' lie in 'image'",
        ),
        (
            [
                DECODE,
                BOXES,
                ("copy", Copy("image", "view")),
                ("crop", RandomCrop(8, boxes=("boxes",))),
                ("crop", RandomCrop(8, field="view", boxes=("boxes",))),
            ],
            "the boxes 'boxes' have moved with 'image', and 'view' has not",
        ),
    ],
)
def test_a_chain_that_would_leave_boxes_behind_is_refused(
    steps: list[tuple[str, Transform]], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        Chain(steps, SOURCE)


def test_copies_of_an_image_move_copies_of_its_boxes() -> None:
    move = RandomCrop(8, field="view", boxes=("view_boxes",))
    steps: list[tuple[str, Transform]] = [
        DECODE,
        BOXES,
        ("copy", Copy("image", "view")),
        ("copy", Copy("boxes", "view_boxes")),
        ("crop", move),
        ("resize", Resize((8, 8), boxes=("boxes",))),
        ("sanitize", SanitizeBoxes()),
        ("sanitize", SanitizeBoxes("view_boxes", count="num_view_boxes")),
    ]
    made = Chain(steps, SOURCE).made
    assert made["view_boxes"].shape == made["boxes"].shape == (None, 4)


def test_parts_of_an_image_stay_the_same_parts_in_another_size() -> None:
    steps: list[tuple[str, Transform]] = [DECODE, BOXES, NORMALIZED, ("resize", Resize((8, 8)))]
    assert Chain(steps, SOURCE).made["image"].shape == (8, 8, 3)


def test_a_wrong_option_is_refused() -> None:
    with pytest.raises(ValueError, match="floats names 'area', which is not in `fields`"):
        DecodeBoxes("json", "xywh", floats=("area",))
    with pytest.raises(ValueError, match="`fields` has 'boxes', as the boxes are called"):
        DecodeBoxes("json", "xywh", fields={"boxes": "bbox"})
    with pytest.raises(ValueError, match="each once"):
        SanitizeBoxes(fields=("boxes",))
    with pytest.raises(ValueError, match="`key` and `fields` are for JSON"):
        numbers = Field(np.dtype(np.float32), (None, 4))
        DecodeBoxes("bbox", "xywh", key="a").outputs({"bbox": numbers, "image": IMAGE})


def test_the_transform_at_fault_is_named() -> None:
    chain = Chain(
        [("decode_boxes", DecodeBoxes("bbox", "xywh"))],
        {
            "bbox": Field(np.dtype(np.float64), (None, 4)),
            "image": IMAGE,
        },
    )
    sample = {"bbox": np.array([[1, 1, -2, 2]]), "image": painted()}
    with pytest.raises(TransformFailed, match=r"decode_boxes: box 0 of 'bbox' is \[1, 1, -2, 2\]"):
        chain.apply(sample, np.random.default_rng(0), {})
