"""RandAugment, by torchvision's documentation and the functions of Pillow that it calls."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from gyre_daemon.transforms.images import augment
from gyre_daemon.transforms.images.augment import OPERATIONS, RandAugment
from PIL import Image, ImageEnhance, ImageOps

# Of torchvision's table, at magnitude 9 of 31 bins and 40 x 60 pixels.
WANTED = {
    "identity": 0.0,
    "shear_x": 0.09,
    "shear_y": 0.09,
    "translate_x": 150 / 331 * 60 * 0.3,
    "translate_y": 150 / 331 * 40 * 0.3,
    "rotate": 9.0,
    "brightness": 0.27,
    "color": 0.27,
    "contrast": 0.27,
    "sharpness": 0.27,
    "posterize": 4 * 0.3,
    "solarize": 255 * 0.3,
    "autocontrast": 0.0,
    "equalize": 0.0,
}
SIGNED = {"shear", "translate", "rotate", "brightness", "color", "contrast", "sharpness"}


def picture(channels: int = 3) -> np.ndarray[Any, Any]:
    coarse = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    image = Image.fromarray(coarse).resize((60, 40), Image.Resampling.BICUBIC)
    pixels = np.asarray(image if channels == 3 else image.convert("L"))
    return pixels.reshape(40, 60, channels)


def torchvisions(name: str, image: Image.Image, by: float) -> Image.Image:
    """What torchvision's `_apply_op` does to an image of Pillow."""
    match name:
        case "shear_x" | "shear_y" | "translate_x" | "translate_y":
            x, y = (by, 0.0) if name.endswith("x") else (0.0, by)
            matrix = [1, x, 0, y, 1, 0] if "shear" in name else [1, 0, -int(x), 0, 1, -int(y)]
            return image.transform(image.size, Image.Transform.AFFINE, matrix)
        case "rotate":
            return image.rotate(by, Image.Resampling.NEAREST)
        case "brightness" | "color" | "contrast" | "sharpness":
            enhanced: Image.Image = getattr(ImageEnhance, name.capitalize())(image).enhance(1 + by)
            return enhanced
        case "posterize":
            return ImageOps.posterize(image, 7)  # 8 - round(9 / (30 / 4))
        case "solarize":
            return image.point(
                [level if level < 255 * 0.7 else 255 - level for level in range(256)]
                * len(image.getbands())
            )
        case "autocontrast" | "equalize":
            return ImageOps.autocontrast(image) if name[0] == "a" else ImageOps.equalize(image)
    return image


@pytest.mark.parametrize("name", WANTED)
@pytest.mark.parametrize("channels", [1, 3])
def test_each_operation_is_that_of_torchvision(
    name: str, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(OPERATIONS) == list(WANTED)
    operation, pixels = OPERATIONS[name], picture(channels)
    assert operation.strongest(40, 60) * 9 / 30 == pytest.approx(WANTED[name])
    assert operation.is_signed == (name.split("_", maxsplit=1)[0] in SIGNED)
    monkeypatch.setattr(augment, "_ALL", (operation,))
    image, found = Image.fromarray(pixels.squeeze()), set()
    for seed in range(12):
        sample = {"image": pixels}
        RandAugment(num_ops=1).apply(sample, np.random.default_rng(seed), {})
        signs = (1, -1) if operation.is_signed else (1,)
        wanted = [np.asarray(torchvisions(name, image, sign * WANTED[name])) for sign in signs]
        equal = [np.array_equal(sample["image"].squeeze(), each) for each in wanted]
        assert any(equal)
        found.add(equal.index(True))
    assert len(found) == len(signs) - (channels == 1 and name == "color")  # no colours to change


def test_operations_are_drawn_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: Counter[tuple[str, bool]] = Counter()

    def noted(name: str) -> Any:
        def apply(image: Image.Image, by: float) -> Image.Image:
            drawn[name, by < 0] += 1
            return image

        return OPERATIONS[name]._replace(apply=apply)

    monkeypatch.setattr(augment, "_ALL", tuple(map(noted, OPERATIONS)))
    rng = np.random.default_rng(3)
    for _ in range(1400):
        RandAugment().apply({"image": picture()}, rng, {})
    assert sum(drawn.values()) == 2800
    for name, operation in OPERATIONS.items():
        assert 150 <= drawn[name, False] + drawn[name, True] <= 250  # of 200
        assert operation.is_signed == (drawn[name, True] > 60)
