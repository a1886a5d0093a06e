"""Writes `torchvision.npz`: what torchvision makes of a small image, and what it draws at random.

The tests need the file alone, and no torchvision. To write it again, in a checkout:

    .venv/bin/pip install --no-deps --target /tmp/torchvision torchvision==0.29.1
    PYTHONPATH=/tmp/torchvision .venv/bin/python tests/unit/transforms/reference/make_reference.py

The operators of that build need a build of torch for GPUs. Transforms call none of them, and
importing asks only that two are declared, which is done here. The names of arrays are paths: what
was done, and the kind of image or the options.
"""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

operators: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
for name in ("nms", "qnms"):
    operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from torchvision.transforms import v2  # noqa: E402
from torchvision.transforms.v2 import functional  # noqa: E402

Arrays = dict[str, np.ndarray[Any, Any]]
FILE = Path(__file__).with_name("torchvision.npz")
HEIGHT, WIDTH = 36, 52
SIZES = [(50, 70), (17, 20), (60, 15)]  # larger, smaller, and one of each
INTERPOLATIONS = ("bilinear", "bicubic", "nearest", "nearest-exact")
SHAPES = [(90, 130), (130, 90), (40, 60), (77, 301), (301, 77), (64, 64), (33, 100), (101, 203)]
SHORTER = (72, 33, 224)
MIDDLES = [(30, 25), (7, 8), (8, 7), (20, 21), (25, 7), (7, 25)]
FACTORS = (0.0, 0.4, 0.75, 1.3, 1.9)
TURNS = (-0.5, -0.23, -0.1, 0.07, 0.31, 0.5)
AUGMENTED = (("rgb", 9), ("rgb", 25), ("gray", 9))
PHOTOS = [(300, 400), (50, 400), (400, 50), (1333, 2000)]
RANGES = [((0.08, 1.0), (3 / 4, 4 / 3)), ((0.3, 0.6), (0.5, 3.0))]
NUM_DRAWS = 2000
JITTER = {"brightness": 0.4, "contrast": 1.5, "saturation": 0.2, "hue": 0.1}
PROBABILITIES = (0.5, 0.2)


def picture() -> np.ndarray[Any, Any]:
    """The left half is smooth with some noise, as photographs are, and the right half is noise."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (4, 5, 3), np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC))
    pixels = (smooth + rng.normal(0, 6, smooth.shape)).clip(0, 255).astype(np.uint8)
    pixels[:, WIDTH // 2 :] = rng.integers(0, 256, pixels[:, WIDTH // 2 :].shape, np.uint8)
    return pixels


def tensor(pixels: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.tensor(pixels).permute(2, 0, 1).contiguous()


def array(image: torch.Tensor | Image.Image) -> np.ndarray[Any, Any]:
    """Of pixels [height, width, channels]."""
    if isinstance(image, torch.Tensor):
        return image.permute(1, 2, 0).contiguous().numpy()
    pixels = np.asarray(image)
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def resizes(pixels: np.ndarray[Any, Any]) -> Arrays:
    made = {}
    for interpolation, size in itertools.product(INTERPOLATIONS, SIZES):
        place = f"{interpolation}/{size[0]}x{size[1]}"
        for antialias in (True, False) if interpolation[0] == "b" else (False,):
            resize = v2.Resize(size, v2.InterpolationMode(interpolation), antialias=antialias)
            kind = "antialias" if antialias else "plain"
            made[f"resize/tensor/{kind}/{place}"] = array(resize(tensor(pixels)))
            if interpolation == "bicubic":
                floats = functional.to_dtype(tensor(pixels), torch.float32, scale=True)
                levels = (resize(floats) * 255).round().clamp(0, 255).to(torch.uint8)
                made[f"resize/floats/{kind}/{place}"] = array(levels)
            if antialias or interpolation == "nearest":
                made[f"resize/pillow/{kind}/{place}"] = array(resize(Image.fromarray(pixels)))
    return made


def shapes() -> Arrays:
    """Rows of a shape, the size that is asked for, and the shape of the result."""
    rows = []
    for (height, width), shorter in itertools.product(SHAPES, SHORTER):
        image = torch.zeros(1, height, width, dtype=torch.uint8)
        rows.append([height, width, shorter, *v2.Resize(shorter)(image).shape[1:]])
    return {"shapes": np.array(rows)}


def middles() -> Arrays:
    """Of an image whose pixels all differ."""
    image = torch.arange(1, 20 * 11 + 1).view(1, 20, 11).to(torch.uint8)
    return {
        f"center_crop/{height}x{width}": array(v2.CenterCrop((height, width))(image))
        for height, width in MIDDLES
    }


def colors(pixels: np.ndarray[Any, Any]) -> Arrays:
    made = {}
    for kind, image in (("tensor", tensor(pixels)), ("pillow", Image.fromarray(pixels))):
        for name in ("brightness", "contrast", "saturation", "hue"):
            change = getattr(functional, f"adjust_{name}")
            for factor in TURNS if name == "hue" else FACTORS:
                made[f"{name}/{kind}/{factor}"] = array(change(image, factor))
    return made


def others(pixels: np.ndarray[Any, Any]) -> Arrays:
    floats = functional.to_dtype(tensor(pixels[:9, 20:31]), torch.float32, scale=True)
    normalized = v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])(floats)
    flipped = v2.RandomHorizontalFlip(1.0)(tensor(pixels[:9, 20:31]))
    return {"normalize": normalized.numpy(), "flip": array(flipped)}


def operations(pixels: np.ndarray[Any, Any]) -> Arrays:
    """Each operation of RandAugment, for images of Pillow, in both directions."""
    made = {}
    images = {"rgb": Image.fromarray(pixels), "gray": Image.fromarray(pixels).convert("L")}
    for kind, magnitude in AUGMENTED:
        image = images[kind]
        augment = v2.RandAugment(magnitude=magnitude)
        for name, (strengths, is_signed) in augment._AUGMENTATION_SPACE.items():
            found = strengths(31, *pixels.shape[:2])
            by = 0.0 if found is None else float(found[magnitude])
            for sign in (1, -1) if is_signed else (1,):
                result = augment._apply_image_or_video_transform(
                    image, name, sign * by, augment.interpolation, augment._fill
                )
                made[f"augment/{name}/{kind}/{magnitude}/{sign}"] = array(result)
    return made


def boxes() -> Arrays:
    """Rows of top, left, height and width."""
    made = {}
    for (height, width), (number, (scale, ratio)) in itertools.product(PHOTOS, enumerate(RANGES)):
        crop = v2.RandomResizedCrop(8, scale, ratio)
        image = torch.zeros(1, height, width, dtype=torch.uint8)
        drawn = [crop.make_params([image]) for _ in range(NUM_DRAWS)]
        rows = [[each[key] for key in ("top", "left", "height", "width")] for each in drawn]
        made[f"boxes/{height}x{width}/{number}"] = np.array(rows, np.int16)
    return made


def jitters() -> Arrays:
    jitter = v2.ColorJitter(**JITTER)
    drawn = [jitter.make_params([]) for _ in range(NUM_DRAWS)]
    factors = [[each[f"{name}_factor"] for name in JITTER] for each in drawn]
    orders = np.array([each["fn_idx"].tolist() for each in drawn], np.int8)
    return {"jitter/factors": np.array(factors, np.float32), "jitter/orders": orders}


def flips() -> Arrays:
    image = torch.tensor([[[0, 1]]], dtype=torch.uint8)
    made = {}
    for p in PROBABILITIES:
        flip = v2.RandomHorizontalFlip(p)
        made[f"flips/{p}"] = np.array([int(flip(image)[0, 0, 0]) for _ in range(NUM_DRAWS)], bool)
    return made


class Noted(v2.RandAugment):  # type: ignore[misc]
    """Counts the operations that it draws, with their signs, and does none."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: Counter[tuple[str, bool]] = Counter()

    def _apply_image_or_video_transform(
        self, image: Any, transform_id: str, magnitude: float, **options: Any
    ) -> Any:
        self.drawn[transform_id, magnitude < 0] += 1
        return image


def augments() -> Arrays:
    """How often each operation was drawn, one row for each: with a strength above 0, and below."""
    augment = Noted()
    for _ in range(NUM_DRAWS):
        augment(torch.zeros(3, 40, 60, dtype=torch.uint8))
    names = list(augment._AUGMENTATION_SPACE)
    counts = [[augment.drawn[name, is_negative] for is_negative in (False, True)] for name in names]
    return {"augments/names": np.array(names), "augments/counts": np.array(counts)}


def main() -> None:
    torch.manual_seed(0)
    pixels = picture()
    small = np.ascontiguousarray(pixels[:24, 8:44])
    arrays: Arrays = {"picture": pixels, "small": small}
    for made in (resizes(pixels), shapes(), middles(), colors(small), others(pixels)):
        arrays |= made
    for made in (operations(small), boxes(), jitters(), flips(), augments()):
        arrays |= made
    np.savez_compressed(FILE, allow_pickle=False, **arrays)
    print(f"{FILE}: {len(arrays)} arrays, {FILE.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
