"""Random crops of files that are decoded no larger than these need."""

import io
import struct
from typing import Any

import numpy as np
import pytest
from gyre_daemon.transforms import Field, Transform
from gyre_daemon.transforms.worker import Chain, TransformFailed
from gyre_media.decode_image import DecodeImage, DecodeRandomResizedCrop
from gyre_media.geometry import HorizontalFlip, RandomResizedCrop
from PIL import Image

BYTES = {"jpg": Field(np.dtype(np.uint8), (None,))}
Pixels = np.ndarray[Any, Any]


def picture(height: int, width: int, grain: int = 64) -> Pixels:
    """A smooth picture with some noise, as photographs are; less `grain` is finer detail."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (height // grain + 2, width // grain + 2, 3), np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    noisy = np.asarray(smooth) + rng.normal(0, 12, (height, width, 3))
    pixels: Pixels = noisy.clip(0, 255).astype(np.uint8)
    return pixels


def encoded(pixels: Pixels, kind: str = "JPEG", mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, kind)
    return buffer.getvalue()


def made(data: bytes, transforms: list[Transform], seed: int) -> Pixels:
    chain = Chain([(type(each).__name__, each) for each in transforms], BYTES)
    out = chain.scratch()
    sample = {"jpg": np.frombuffer(data, np.uint8)}
    chain.apply(sample, np.random.default_rng(seed), out)
    return out["image"]


def both(data: bytes, seed: int, **options: Any) -> list[Pixels]:
    """The crop by one transform, and by the two whose work it does; a flip draws more behind it."""
    colors, gap = options.pop("colors", "rgb"), options.pop("reducing_gap", 1)
    crop = DecodeRandomResizedCrop("jpg", colors=colors, reducing_gap=gap, **options)
    two = [DecodeImage("jpg", colors=colors), RandomResizedCrop(**options)]
    return [made(data, [*each, HorizontalFlip()], seed) for each in ([crop], two)]


@pytest.mark.parametrize(
    ("kind", "mode", "size"),
    [
        ("JPEG", "RGB", 65),  # would be decoded smaller with a smaller size
        ("JPEG", "L", 65),
        ("JPEG", "CMYK", 8),
        ("PNG", "RGB", 8),
        ("WEBP", "RGB", (5, 9)),
    ],
)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_what_is_decoded_whole_is_that_of_two_transforms(
    kind: str, mode: str, size: Any, interpolation: Any
) -> None:
    data = encoded(picture(90, 130, grain=16), kind, mode)
    for seed in range(4):
        one, two = both(data, seed, size=size, interpolation=interpolation)
        assert np.array_equal(one, two)


# The bounds of docs/transforms.md: of smooth pictures with noise, and of detail of 8 pixels.
@pytest.mark.parametrize(
    ("grain", "gap", "most", "mean"),
    [(64, 1, 8, 0.8), (64, 2, 6, 0.6), (8, 1, 40, 6), (8, 2, 16, 2)],
)
@pytest.mark.parametrize("size", [160, (120, 80), 48])  # halves, quarters, eighths
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("colors", ["rgb", "gray"])
def test_large_files_are_decoded_smaller(
    grain: int, gap: int, most: int, mean: float, size: Any, interpolation: Any, colors: Any
) -> None:
    """Lengths are no multiples of 8, and rectangles begin at any pixel."""
    data = encoded(picture(501, 643, grain))
    wanted = size // gap if isinstance(size, int) else tuple(each // gap for each in size)
    options = {"scale": (0.6, 1.0), "interpolation": interpolation, "colors": colors}
    for seed in range(3):
        one, two = both(data, seed, size=wanted, reducing_gap=gap, **options)
        assert not np.array_equal(one, two)
        difference = np.abs(one.astype(int) - two)
        assert difference.max() <= most
        assert difference.mean() <= mean


def test_the_rectangle_decides_how_much_smaller() -> None:
    crop = DecodeRandomResizedCrop("jpg", (100, 200), reducing_gap=2)
    found = {
        (height, width): crop.factor(height, width)
        for height, width in (
            (399, 9999),
            (400, 799),
            (400, 800),
            (800, 1600),
            (1599, 3200),
            (1600, 3200),
            (9999, 9999),
        )
    }
    assert list(found.values()) == [1, 1, 2, 4, 4, 8, 8]
    assert DecodeRandomResizedCrop("jpg", 100).factor(200, 300) == 2
    assert DecodeRandomResizedCrop("jpg", 100, reducing_gap=3).factor(599, 999) == 1


def test_files_that_only_pillow_reads_are_decoded_whole() -> None:
    data = encoded(picture(300, 400))
    place = data.index(b"\xff\xdb")
    one, two = both(data[:place] + b"more" + data[place:], 1, size=16)
    assert np.array_equal(one, two)


def test_damaged_files_are_refused() -> None:
    data = encoded(picture(300, 400))
    place = data.index(b"\xff\xc0") + 5
    huge = data[:place] + struct.pack(">2H", 60_000, 60_000) + data[place + 4 :]
    for damaged, reason in (
        (data[:900], "no image that can be decoded"),
        (b"", "no image that can be decoded"),
        (huge, "declares 60000 x 60000 pixels; at most 100000000 are decoded"),
    ):
        with pytest.raises(TransformFailed, match=reason):
            made(damaged, [DecodeRandomResizedCrop("jpg", 16)], 0)


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="each length must be from 1"):
        DecodeRandomResizedCrop("jpg", 0)
    with pytest.raises(ValueError, match=r"scale goes from 0\.5 to 0\.1"):
        DecodeRandomResizedCrop("jpg", 8, scale=(0.5, 0.1))
    with pytest.raises(ValueError, match="no bytes of files"):
        floats = {"jpg": Field(np.dtype(np.float32), (None,))}
        Chain([("crop", DecodeRandomResizedCrop("jpg", 8))], floats)
