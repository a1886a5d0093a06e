"""Draws boxes.png: a picture with its boxes, and what the transforms of a daemon make of both.

`python docs/images/draw_boxes.py`; it needs the extra `images`.
"""

from pathlib import Path
from typing import Any

import numpy as np
from gyre_daemon.transforms import Transform
from gyre_media.boxes import DecodeBoxes, SanitizeBoxes
from gyre_media.geometry import HorizontalFlip, RandomResizedCrop
from PIL import Image, ImageDraw, ImageFont

FOLDER = Path(__file__).parent
NAMES = ("house", "tree", "sun", "boat")
COLORS = ("#d1495b", "#2e7d32", "#b26a00", "#2459a8")
# Left, top, width and height, as COCO has them, and the name of each.
BOXES = [
    ([70, 128, 150, 142], 0),
    ([236, 112, 76, 158], 1),
    ([322, 150, 58, 120], 1),
    ([396, 28, 66, 66], 2),
    ([344, 258, 116, 86], 3),
    ([18, 226, 34, 44], 1),
]
SIZE = 320
SEED = 33


def picture() -> Image.Image:
    """A scene of 480 x 360 pixels, smoothed by drawing it larger."""
    zoom = 4
    image = Image.new("RGB", (480 * zoom, 360 * zoom), "#cfe6f5")
    draw = ImageDraw.Draw(image)

    def scaled(*numbers: float) -> list[float]:
        return [zoom * each for each in numbers]

    draw.rectangle(scaled(0, 262, 480, 360), fill="#8fb9d8")
    draw.polygon(scaled(0, 270, 0, 262, 340, 262, 480, 262, 480, 270, 300, 290), fill="#b7cf9f")
    draw.rectangle(scaled(0, 262, 330, 282), fill="#b7cf9f")
    draw.ellipse(scaled(396, 28, 462, 94), fill="#f5cf5b")
    draw.rectangle(scaled(82, 190, 208, 270), fill="#f0e0c5")
    draw.polygon(scaled(70, 192, 145, 128, 220, 192), fill="#b5503c")
    draw.rectangle(scaled(130, 222, 158, 270), fill="#7a5a3a")
    draw.rectangle(scaled(96, 206, 118, 228), fill="#9db8d9")
    draw.rectangle(scaled(172, 206, 194, 228), fill="#9db8d9")
    for left, top, width, height in (box for box, name in BOXES if name == 1):
        middle = left + width / 2
        draw.rectangle(
            scaled(middle - width / 10, top + height / 2, middle + width / 10, top + height),
            fill="#7a5a3a",
        )
        draw.ellipse(scaled(left, top, left + width, top + height * 0.72), fill="#5f9e57")
    draw.polygon(scaled(344, 316, 460, 316, 436, 344, 368, 344), fill="#7a5a3a")
    draw.polygon(scaled(402, 258, 402, 310, 452, 310), fill="white")
    draw.line(scaled(402, 258, 402, 316), fill="#444444", width=3 * zoom)
    return image.resize((480, 360), Image.Resampling.LANCZOS)


def transformed(image: Image.Image) -> dict[str, Any]:
    """The picture and its boxes behind a random crop and a mirror."""
    sample: dict[str, Any] = {
        "image": np.asarray(image),
        "bbox": np.array([box for box, _ in BOXES], np.float32),
        "labels": np.array([name for _, name in BOXES]),
    }
    rng = np.random.default_rng(SEED)
    chain: list[Transform] = [
        DecodeBoxes("bbox", "xywh"),
        RandomResizedCrop(SIZE, scale=(0.3, 0.6), boxes=("boxes",)),
        HorizontalFlip(1.0, boxes=("boxes",)),
        SanitizeBoxes(fields=("labels",), min_visible=0.3),
    ]
    for transform in chain:
        transform.apply(sample, rng, {})
    return sample


def annotated(image: Image.Image, boxes: Any, labels: Any) -> Image.Image:
    """The picture with its boxes, drawn within their edges."""
    made = image.copy()
    draw, font = ImageDraw.Draw(made), ImageFont.load_default(13)
    for (left, top, right, bottom), label in zip(boxes, labels, strict=True):
        color, name = COLORS[label], NAMES[label]
        draw.rectangle([left, top, right - 1, bottom - 1], outline=color, width=2)
        width = draw.textlength(name, font) + 6
        draw.rectangle([left, top, left + width, top + 17], fill=color)
        draw.text((left + 3, top), name, fill="white", font=font)
    return made


def main() -> None:
    """Writes the figure."""
    image = picture()
    stored = np.array([box for box, _ in BOXES], np.float32)
    stored[:, 2:] += stored[:, :2]
    sample = transformed(image)
    num = int(sample["num_boxes"])
    before = annotated(image, stored.tolist(), [name for _, name in BOXES])
    after = annotated(
        Image.fromarray(sample["image"]),
        sample["boxes"][:num].tolist(),
        sample["labels"][:num].tolist(),
    )
    sheet = Image.new("RGB", (480 + SIZE + 60, 360 + 52), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(15)
    for left, each, words in (
        (20, before, f"stored: {len(BOXES)} boxes"),
        (520, after, f"cropped, resized and mirrored: {num} boxes"),
    ):
        draw.text((left, 12), words, fill="#222222", font=font)
        sheet.paste(each, (left, 40))
    sheet.save(FOLDER / "boxes.png", optimize=True)


if __name__ == "__main__":
    main()
