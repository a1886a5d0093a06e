"""Transforms of images, compared with Pillow and torch.

`test_daemon_torchvision` compares them with torchvision.
"""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from cykooz_resizer import CpuExtensions
from gyre_daemon.transforms import Field, Transform
from gyre_daemon.transforms.recipes import dtype_of
from gyre_daemon.transforms.worker import Chain, TransformFailed
from gyre_media.colors import (
    ColorJitter,
    Flatten,
    Normalize,
    RandAugment,
    ToChw,
)
from gyre_media.decode_image import DecodeImage
from gyre_media.geometry import (
    RESIZER,
    CenterCrop,
    HorizontalFlip,
    RandomResizedCrop,
    Resize,
    resized,
    to_pillow,
)
from PIL import Image
from torch.nn import functional

BYTES = {"jpg": Field(np.dtype(np.uint8), (None,))}
Pixels = np.ndarray[Any, Any]


def picture(height: int, width: int, seed: int = 0) -> Pixels:
    """A smooth picture with some noise, as photographs are."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    noisy = np.asarray(smooth, np.int16) + rng.integers(-12, 13, (height, width, 3), np.int16)
    pixels: Pixels = noisy.clip(0, 255).astype(np.uint8)
    return pixels


def encoded(pixels: Pixels, kind: str = "JPEG", mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, kind)
    return buffer.getvalue()


def reference(data: bytes, mode: str = "RGB") -> Pixels:
    return np.asarray(Image.open(io.BytesIO(data)).convert(mode))


def run(data: bytes, *transforms: Transform, seed: int = 0) -> dict[str, Pixels]:
    """What a chain that begins with an encoded image makes of it."""
    chain = Chain([(type(each).__name__, each) for each in transforms], BYTES)
    out: dict[str, Pixels] = {}
    for name, field in chain.made.items():
        out[name] = np.full([length or 0 for length in field.shape], 7, field.dtype)
    rng = np.random.default_rng(seed)
    chain.apply({"jpg": np.frombuffer(data, np.uint8)}, rng, out)
    return out


def decoded(data: bytes, **options: Any) -> Pixels:
    sample: dict[str, Pixels] = {"jpg": np.frombuffer(data, np.uint8)}
    DecodeImage("jpg", **options).apply(sample, np.random.default_rng(0), {})
    assert list(sample) == ["image"]
    return sample["image"]


KINDS = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_files_are_decoded_as_pillow_does(kind: str, mode: str) -> None:
    data = encoded(picture(67, 45), kind, mode)
    assert np.array_equal(decoded(data), reference(data))
    gray = decoded(data, colors="gray")[:, :, 0].astype(int)
    most = 2 if (kind, mode) == ("JPEG", "RGB") else 0  # gray is stored there, and not computed
    assert np.abs(gray - reference(data, "L")).max() <= most


def test_odd_files_are_decoded_as_pillow_does() -> None:
    cmyk = encoded(picture(40, 50), "JPEG", "CMYK")
    progressive = io.BytesIO()
    Image.fromarray(picture(40, 50)).save(progressive, "JPEG", progressive=True, subsampling=2)
    palette = encoded(picture(40, 50), "PNG", "P")
    for data in (cmyk, progressive.getvalue(), palette, encoded(picture(9, 9)) + b"more"):
        assert np.array_equal(decoded(data), reference(data))
    approximate = decoded(progressive.getvalue(), exact=False).astype(int)
    assert np.abs(approximate - reference(progressive.getvalue())).mean() < 6


LEVELS = np.array([[0, 256, 1000], [20_000, 40_000, 65_535]], np.uint16)
UPPER = (LEVELS >> 8).astype(np.uint8)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_of_16_bits(channels: int) -> bytes:
    """A PNG file of `LEVELS` in each channel."""
    rows = np.repeat(LEVELS.astype(">u2")[:, :, None], channels, axis=2)
    return png([row.tobytes() for row in rows], 3, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels])


def png(rows: list[bytes], width: int, bits: int, color_type: int = 0) -> bytes:
    """A PNG file."""
    parts = (
        (b"IHDR", struct.pack(">2L5B", width, len(rows), bits, color_type, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows))),
        (b"IEND", b""),
    )
    chunks = [
        struct.pack(">L", len(data)) + name + data + struct.pack(">L", zlib.crc32(name + data))
        for name, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def tiff(
    pixels: bytes, width: int, bits: int, photometric: int = 1, sample_format: int = 1
) -> bytes:
    """A TIFF file of gray levels."""
    height = len(pixels) * 8 // bits // width
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1}
    tags |= {278: height, 279: len(pixels), 339: sample_format}
    entries = [struct.pack("<HHIHH", tag, 3, 1, value, 0) for tag, value in tags.items()]
    directory = struct.pack("<H", len(tags)) + b"".join(entries) + bytes(4)
    assert len(pixels) % 2 == 0
    return b"II*\0" + struct.pack("<I", 8 + len(pixels)) + pixels + directory


def twelve_bits() -> bytes:
    """The upper 12 bits of `LEVELS`, two levels in three bytes."""
    pairs = (LEVELS >> 4).reshape(-1, 2).tolist()
    packed = b"".join((first << 12 | second).to_bytes(3, "big") for first, second in pairs)
    return packed + b"\0"


BIG_ENDIAN = Image.frombytes("I;16B", (3, 2), LEVELS.astype(">u2").tobytes())
WIDE = {
    **{f"PNG {channels}": png_of_16_bits(channels) for channels in (1, 2, 3, 4)},
    **{kind: saved(Image.fromarray(LEVELS), kind) for kind in ("PNG", "TIFF", "PPM", "JPEG2000")},
    **{
        f"TIFF {compression} {image.mode}": saved(image, "TIFF", compression=compression)
        for compression in ("tiff_lzw", "tiff_adobe_deflate", None)
        for image in (BIG_ENDIAN, Image.fromarray(LEVELS))
    },
    "PGM 4095": b"P5 3 2 4095\n" + (LEVELS >> 4).astype(">u2").tobytes(),
    "PGM text": b"P2 3 2 65535\n" + " ".join(map(str, LEVELS.ravel().tolist())).encode(),
    "TIFF inverted": tiff((65_535 - LEVELS).astype("<u2").tobytes(), 3, 16, photometric=0),
}


@pytest.mark.parametrize("name", WIDE)
def test_levels_of_16_bits_keep_their_upper_8(name: str) -> None:
    """As Pillow does for colours; it clips gray levels, so that nearly all become white."""
    assert np.array_equal(decoded(WIDE[name]), np.repeat(UPPER[:, :, None], 3, axis=2))
    assert np.array_equal(decoded(WIDE[name], colors="gray")[:, :, 0], UPPER)


def test_levels_of_16_bits_that_pillow_makes_8_or_12() -> None:
    color = b"P6 3 2 65535\n" + np.repeat(LEVELS.astype(">u2")[:, :, None], 3, axis=2).tobytes()
    assert np.abs(decoded(color)[:, :, 0].astype(int) - UPPER).max() <= 1  # it rounds
    packed = tiff(twelve_bits(), 2, 12)
    assert np.array_equal(decoded(packed)[:, :, 0].ravel(), UPPER.ravel())


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (saved(Image.fromarray(LEVELS.astype(np.float32)), "TIFF"), "floats"),
        (b"Pf\n3 2\n-1.0\n" + LEVELS.astype("<f4").tobytes(), "floats"),
        (tiff(LEVELS.astype("<u2").tobytes(), 3, 16, sample_format=2), "signed numbers"),
        (tiff(bytes(6), 3, 8, sample_format=2), "signed numbers"),
        (tiff(LEVELS.astype("<u4").tobytes(), 3, 32), "numbers of 32 bits"),
        (saved(Image.fromarray(LEVELS.astype(np.int32)), "TIFF"), "signed numbers"),
    ],
)
def test_numbers_that_are_no_levels_are_refused(data: bytes, kind: str) -> None:
    with pytest.raises(TransformFailed, match=f"its pixels are {kind}, no levels of 8 or 16 bits"):
        run(data, DecodeImage("jpg"), Resize((8, 8)))


@pytest.mark.parametrize("mode", ["1", "LA", "P", "PA", "RGBA"])
def test_opacity_is_left_out(mode: str) -> None:
    """Also where pixels cannot be seen: their colours are those of the file."""
    image = Image.fromarray(picture(20, 30))
    image = image.convert("P").convert("PA") if mode == "PA" else image.convert(mode)
    if mode in ("LA", "PA", "RGBA"):
        image.putalpha(Image.new("L", image.size, 0))
    data = saved(image, "TIFF" if mode == "PA" else "PNG")
    assert np.array_equal(decoded(data), np.asarray(image.convert("RGB")))
    palette = Image.fromarray(picture(20, 30)).convert("P")
    clear = saved(palette, "PNG", transparency=bytes(256))
    assert np.array_equal(decoded(clear), np.asarray(palette.convert("RGB")))


def forged(data: bytes, marker: bytes, after: int) -> bytes:
    """A file that declares 60,000 x 60,000 pixels."""
    at = data.index(marker) + len(marker) + after
    return data[:at] + struct.pack(">2L", 60_000, 60_000) + data[at + 8 :]


def huge_png() -> bytes:
    """The header of a PNG of 60,000 x 60,000 pixels."""
    header = struct.pack(">2L5B", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    body = struct.pack(">L", len(header)) + chunk + struct.pack(">L", zlib.crc32(chunk))
    return b"\x89PNG\r\n\x1a\n" + body + struct.pack(">L", 0) + b"IDAT"


def huge_jpeg() -> bytes:
    """A JPEG file whose header says 60,000 x 60,000 pixels."""
    data = bytearray(encoded(picture(16, 16)))
    place = data.index(b"\xff\xc0") + 5
    data[place : place + 4] = struct.pack(">2H", 60_000, 60_000)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (huge_png(), "declares 60000 x 60000 pixels"),
        (huge_jpeg(), "declares 60000 x 60000 pixels"),
        (forged(encoded(picture(9, 9), "JPEG2000"), b"ihdr", 0), "declares 60000 x 60000 pixels"),
        # the size of the image fits, and that of its data does not
        (
            forged(encoded(picture(9, 9), "JPEG2000"), b"\xff\x51", 4),
            "no image that can be decoded",
        ),
        (forged(encoded(picture(9, 9), "AVIF"), b"ispe", 4), "no image that can be decoded"),
        (encoded(picture(60, 60), "AVIF")[:300], r"begins with b'.*ftypavif' and is damaged"),
        (encoded(picture(60, 60), "JPEG2000")[:300], "no image that can be decoded"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "no image that can be decoded"),
        (b"", "no image that can be decoded"),
        (encoded(picture(60, 60))[:900], "no image that can be decoded"),
        (encoded(picture(60, 60), "PNG")[:900], "no image that can be decoded"),
    ],
)
def test_files_that_are_no_images_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(TransformFailed, match=reason) as caught:
        run(data, DecodeImage("jpg"), Resize((8, 8)))
    assert "object at" not in str(caught.value)


def test_flips_of_bits_are_refused_or_decoded_as_pillow_does() -> None:
    data, rng = encoded(picture(50, 60)), np.random.default_rng(1)
    for place in rng.choice(len(data), 60, replace=False).tolist():
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(rng.integers(8))
        try:
            found = decoded(bytes(damaged))
        except ValueError:
            continue
        assert found.shape[2] == 3


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_bilinear_pixels_are_as_near_to_the_exact_ones_as_those_of_pillow(channels: int) -> None:
    """And every processor computes the same; the fourth byte of a pixel is unused."""
    padded = np.random.default_rng(3).integers(0, 256, (61, 83, 4), np.uint8)
    pixels = padded[:, :, : min(channels, 3)]
    pixels = pixels if channels == 4 else np.ascontiguousarray(pixels)
    tensor = torch.tensor(np.ascontiguousarray(pixels)).permute(2, 0, 1)[None].double()
    for size in ((40, 30), (80, 120)):
        exact = functional.interpolate(tensor, size, mode="bilinear", antialias=True)
        wanted = exact[0].permute(1, 2, 0).numpy()
        small = np.asarray(to_pillow(pixels).resize(size[::-1], Image.Resampling.BILINEAR))
        found = [small.reshape(wanted.shape)]
        for extension in (CpuExtensions.none, CpuExtensions.sse4_1, CpuExtensions.avx2):
            RESIZER.cpu_extensions = extension
            found.append(resized(pixels, *size, "bilinear", antialias=True))
        errors = [np.abs(each - wanted) for each in found]
        assert all(np.array_equal(each, found[-1]) for each in found[1:])
        assert errors[-1].max() <= 1.01
        assert errors[-1].mean() <= 1.05 * errors[0].mean()


def test_a_size_that_is_too_large_is_refused_before_it_is_made() -> None:
    data = encoded(np.zeros((20_000, 1, 3), np.uint8), "PNG")
    with pytest.raises(TransformFailed, match="1 x 20000 pixels would become one of 224 x 4480000"):
        run(data, DecodeImage("jpg"), Resize(224), CenterCrop(224))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["chw", "hwc"])
def test_normalized_numbers_are_those_of_torch(dtype: Any, layout: Any) -> None:
    data, normalize = encoded(picture(24, 18)), Normalize(dtype=dtype, layout=layout)
    found = run(data, DecodeImage("jpg"), Resize((24, 18)), normalize)["image"]
    tensor = torch.tensor(reference(data).copy()).permute(2, 0, 1).float() / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (normalize.mean, normalize.std))
    wanted = ((tensor - mean) / std).to(getattr(torch, dtype)).float().numpy()
    assert found.dtype == dtype_of(dtype)
    made = found.astype(np.float32)
    assert np.array_equal(made if layout == "chw" else made.transpose(2, 0, 1), wanted)


@pytest.mark.parametrize("colors", ["rgb", "gray"])
def test_channels_come_first_where_that_is_asked_for(colors: Any) -> None:
    data = encoded(picture(24, 18))
    found = run(data, DecodeImage("jpg", colors=colors), Resize((24, 18)), ToChw())["image"]
    assert np.array_equal(found.transpose(1, 2, 0), decoded(data, colors=colors))


@pytest.mark.parametrize("colors", ["rgb", "gray"])
def test_an_image_of_any_size_is_flattened(colors: Any) -> None:
    data = encoded(picture(24, 18))
    chain = Chain([("d", DecodeImage("jpg", colors=colors)), ("f", Flatten())], BYTES)
    assert chain.made["image"].shape == (None,)
    sample, out = {"jpg": np.frombuffer(data, np.uint8)}, chain.scratch()
    chain.apply(sample, np.random.default_rng(0), out)
    (flat,) = chain.made_ragged(sample)
    assert np.array_equal(flat.reshape(out["image_shape"]), decoded(data, colors=colors))
    whole = run(data, DecodeImage("jpg"), Resize((24, 18)), Flatten())["image"]
    assert np.array_equal(whole.reshape(24, 18, 3), decoded(data))


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize(
    "transform",
    [
        CenterCrop(16),
        HorizontalFlip(1.0),
        RandomResizedCrop(16),
        Resize((30, 12), antialias=False),
        ColorJitter(0.4, 0.4, 0.4, 0.1),
        RandAugment(),
        Normalize(),
        ToChw(),
    ],
    ids=lambda each: type(each).__name__,
)
def test_an_unused_fourth_byte_changes_nothing(transform: Transform, is_last: bool) -> None:
    """Pixels are as those of an image of three bytes; the unused ones differ from each other."""
    height, width = 24, 18
    rng = np.random.default_rng(1)
    four = rng.integers(0, 256, (height, width, 4), np.uint8)
    made = []
    for image in (four[:, :, :3], four[:, :, :3].copy()):
        fields = transform.outputs({"image": Field(np.dtype(np.uint8), (height, width, 3))})
        shape = [length or 0 for length in fields["image"].shape]
        out = {"image": np.full(shape, 7, fields["image"].dtype)} if is_last else {}
        sample = {"image": image}
        transform.apply(sample, np.random.default_rng(0), out)
        made.append(out.get("image", sample["image"]))
    with_four, with_three = made
    assert np.array_equal(with_four, with_three)


@pytest.mark.parametrize(
    ("transforms", "reason"),
    [
        ([RandomResizedCrop(8, field="jpg")], "'jpg' is uint8 .*, and an image is uint8"),
        ([DecodeImage("jpg")], r"differ in shape \[\*, \*, 3\]. End with"),
        ([DecodeImage("jpg"), Resize(8)], r"differ in shape \[\*, \*, 3\]"),
        ([DecodeImage("jpg", colors="gray"), ColorJitter(hue=0.1)], "is gray"),
        ([DecodeImage("jpg", colors="gray"), Normalize()], "need 1 numbers"),
        (
            [DecodeImage("jpg"), CenterCrop(8), Normalize(), CenterCrop(4)],
            "float32 .*, and an image",
        ),
    ],
)
def test_chains_that_make_no_sense_are_refused(transforms: list[Transform], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Chain([(type(each).__name__, each) for each in transforms], BYTES)


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_jpegs_are_decoded_smaller_where_that_is_allowed(factor: int) -> None:
    height, width = 321, 405
    data = encoded(picture(height, width))
    least = -(-height // factor)
    small = decoded(data, min_size=least)
    assert small.shape == (least, -(-width // factor), 3)
    assert decoded(data, min_size=least + 1).shape[0] == -(-height // (factor // 2))
    # where lengths are no multiples of the factor, the last small pixel has a part that is no image
    data, size = encoded(picture(320, 416)), (320 // factor // 2, 416 // factor // 2)
    whole = run(data, DecodeImage("jpg"), Resize(size))["image"].astype(int)
    found = run(data, DecodeImage("jpg", min_size=320 // factor), Resize(size))["image"]
    difference = np.abs(found - whole)
    assert difference.max() <= 16
    assert difference.mean() <= 0.5 * factor
