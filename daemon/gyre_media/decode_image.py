"""From the bytes of an image file to its pixels, or to a random crop of them."""

import contextlib
import io
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, Literal

import numpy as np
import simplejpeg
from gyre_daemon.transforms.recipes import Field, OfField, Sample, TooLarge
from msgspec import Meta
from PIL import AvifImagePlugin, Image, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from gyre_media.geometry import (
    Pixels,
    Positive,
    RandomResizedCrop,
    Size,
    check_left_behind,
    pair,
    resized_part,
)

Image.MAX_IMAGE_PIXELS = None  # sizes are checked here, before anything is allocated
AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # there is one process for each core
# Others are read by programs that a file could misuse, or are no images.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
_JPEG = b"\xff\xd8\xff"
FACTORS = (2, 4, 8)  # by which a JPEG file can be decoded smaller
# Pillow's errors for damaged or forged files.
_NO_IMAGE = (OSError, SyntaxError, EOFError, AssertionError, struct.error)
# Tags of TIFF, and values of theirs.
_BITS, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339
_WHITE_IS_ZERO, _UNSIGNED = 0, {1, 4}  # 4: not said
_STRETCHED = {"L;2": 85, "L;4": 17}  # Pillow's names of 2 and 4 bits, and its factors


@dataclass(frozen=True)
class DecodeImage(OfField):
    """Decodes JPEG, PNG, WebP, GIF, BMP, TIFF, PPM, AVIF and JPEG 2000.

    An orientation that a camera has noted is not applied, as in torchvision. Levels of more than 8
    bits keep their upper 8, as Pillow does it for colours. Opacity is left out. Numbers other than
    levels, such as floats, are refused.

    Attributes:
        field: the bytes of files, which samples no longer have afterwards.
        to: the pixels, uint8 [height, width, channels].
        colors: `rgb` for 3 channels, `gray` for 1; `index` for 1 with the stored numbers,
            as masks have them: of a palette, gray levels, or single bits. Files with colours are
            refused.
        max_pixels: an image that declares more is refused before it is decoded.
        exact: whether JPEG is decoded to the bit as Pillow does; if not, colours between pixels are
            interpolated more coarsely, which takes a few percent less time.
        min_size: if not 0, a JPEG file is decoded at a half, a quarter or an eighth of its size
            where both lengths are at least this then. Not for `index`: numbers would be mixed.
    """

    version: ClassVar[int] = 2  # 1 made white of nearly all levels of 16 bits

    to: str = "image"
    colors: Literal["rgb", "gray", "index"] = "rgb"
    max_pixels: Annotated[int, Meta(ge=1, le=1 << 30)] = 100_000_000
    exact: bool = True
    min_size: Annotated[int, Meta(ge=0, le=1 << 16)] = 0

    def __post_init__(self) -> None:
        """Refuse to mix numbers of a palette."""
        if self.min_size and self.colors == "index":
            raise ValueError("min_size would mix the numbers of `index`; leave one of both out")
        if self.colors == "index":  # 2 stretched gray levels of 2 and 4 bits
            object.__setattr__(self, "version", 3)

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        self.require_bytes(fields)
        shape = None, None, 3 if self.colors == "rgb" else 1
        is_index = self.colors == "index"
        return {
            self.to: Field(np.dtype(np.uint8), shape, is_whole=not self.min_size, is_index=is_index)
        }

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        data = sample.pop(self.field).data
        scales = self.min_size and _is_jpeg(data)
        factor = self._factor(*self.declared_size(data)) if scales else 1
        image, _ = self.decoded(data, factor)
        self.put(self.to, image, sample, out)

    def declared_size(self, data: memoryview) -> tuple[int, int]:
        """The height and the width that the header of a file declares.

        Raises:
            ValueError: it is no image, or too large.
        """
        height, width = _declared_size(data)
        self._check_size(height, width)
        return height, width

    def decoded(self, data: memoryview, factor: int) -> tuple[Pixels, int]:
        """The pixels of a file, which are valid until the next call, and their factor.

        Args:
            data: the file.
            factor: 1, 2, 4 or 8: by how much a JPEG file is decoded smaller. Where only Pillow can
                decode the file, the factor is 1.

        Raises:
            ValueError: it is no image that can be decoded, or too large.
        """
        image = self._decode_jpeg(data, factor) if _is_jpeg(data) else None
        return (self._decode_other(data), 1) if image is None else (image, factor)

    def _decode_jpeg(self, data: memoryview, factor: int) -> Pixels | None:
        """The pixels of a JPEG file; None where only Pillow may be able to read it."""
        try:
            height, width, stored, _ = simplejpeg.decode_jpeg_header(data)
            self._check_size(height, width)
            if stored in ("CMYK", "YCCK") or (self.colors == "index" and stored != "Gray"):
                return None
            if factor > 1:
                height, width = -(-height // factor), -(-width // factor)
            channels, colors = (3, "RGB") if self.colors == "rgb" else (1, "GRAY")
            pixels: Pixels = simplejpeg.decode_jpeg(
                data,
                colors,
                min_height=height if factor > 1 else 0,
                min_width=width if factor > 1 else 0,
                min_factor=factor,
                fastdct=not self.exact,
                fastupsample=not self.exact,
                buffer=self._memory_of(height * width * channels),
            )
        except TooLarge:
            raise
        except ValueError:
            return None
        return pixels

    def _factor(self, height: int, width: int) -> int:
        """By how much a JPEG file is decoded smaller."""
        shorter = min(height, width)
        factors = [each for each in FACTORS if -(-shorter // each) >= self.min_size]
        return max(factors, default=1)

    def _decode_other(self, data: memoryview) -> Pixels:
        with _opened(data) as image:
            self._check_size(image.height, image.width)
            converted = self._converted(image)
            pixels = np.asarray(converted, np.uint8)  # single bits become 0 and 1
        return pixels if self.colors == "rgb" else pixels[:, :, None]

    def _converted(self, image: Image.Image) -> Image.Image:
        if self.colors != "index":
            eight_bits = _in_eight_bits(image)
            eight_bits.info.pop("transparency", None)  # Pillow would warn of it
            return eight_bits.convert("RGB" if self.colors == "rgb" else "L")
        if image.mode not in ("P", "L", "1"):
            raise ValueError(
                f"its pixels are {image.mode}, no numbers of a palette, no gray levels of 8 bits "
                "and not single bits"
            )
        _check_levels(image)
        return _stored_numbers(image)

    def _check_size(self, height: int, width: int) -> None:
        if height * width > self.max_pixels:
            raise TooLarge(
                f"it declares {width} x {height} pixels; at most {self.max_pixels} are decoded "
                "(max_pixels)"
            )

    def _memory_of(self, num_bytes: int) -> Pixels:
        """Memory for the next image: fresh memory costs a page fault each.

        The pixels of one image are no longer needed when the next one is decoded.
        """
        if len(self._scratch[0]) < num_bytes:
            self._scratch[0] = np.empty(num_bytes, np.uint8)
        return self._scratch[0][:num_bytes]

    @cached_property
    def _scratch(self) -> list[Pixels]:
        return [np.empty(0, np.uint8)]


def _is_jpeg(data: memoryview) -> bool:
    return bytes(data[:3]) == _JPEG


def _declared_size(data: memoryview) -> tuple[int, int]:
    with contextlib.suppress(ValueError):  # only Pillow may be able to read it
        if _is_jpeg(data):
            return simplejpeg.decode_jpeg_header(data)[:2]  # type: ignore[no-any-return]
    with _opened(data) as image:
        return image.height, image.width


@contextlib.contextmanager
def _opened(data: memoryview) -> Iterator[Image.Image]:
    """An image whose header was read.

    Raises:
        ValueError: it is not an image, or damaged; also for any error raised inside.
    """
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            yield image
    except UnidentifiedImageError as error:
        raise ValueError(
            f"it is no image that can be decoded: it begins with {bytes(data[:12])!r} and is "
            f"damaged, or none of {', '.join(_FORMATS)}"
        ) from error
    except _NO_IMAGE as error:
        reason = str(error) or type(error).__name__
        raise ValueError(f"it is no image that can be decoded: {reason}") from error


def _in_eight_bits(image: Image.Image) -> Image.Image:
    """The image, with gray levels of up to 16 bits cut to 8: Pillow's own conversion clips them."""
    _check_levels(image)
    if not image.mode.startswith("I"):  # a PPM of mode "I" was scaled to 16 bits
        image.load()
        return image
    bits, is_inverted = 16, False
    if isinstance(
        image, TiffImageFile
    ):  # Pillow leaves 12 bits, and an inverted scale, as they are
        (bits,) = image.tag_v2.get(_BITS, (16,))
        is_inverted = image.tag_v2.get(_PHOTOMETRIC) == _WHITE_IS_ZERO
    levels = np.asarray(image) >> (bits - 8)
    if is_inverted:
        levels = 255 - levels
    return Image.fromarray(levels.astype(np.uint8))


def _stored_numbers(image: Image.Image) -> Image.Image:
    """The numbers of a file: Pillow stretches gray levels of fewer than 8 bits to 0 to 255."""
    tiles = getattr(image, "tile", None)  # of images that a file holds
    codec, _, _, args = tiles[0] if tiles else ("", None, 0, "")
    form, *more = args if isinstance(args, tuple) else (args,)
    image.load()
    if image.mode != "L":
        return image
    if form in _STRETCHED:
        return Image.fromarray(np.asarray(image) // np.uint8(_STRETCHED[form]))
    if str(form).startswith("L;") or (codec.startswith("ppm") and more != [255]):
        raise ValueError("its gray levels are stretched or inverted; store a PNG of 8 bits")
    return image


def _check_levels(image: Image.Image) -> None:
    kind = ""
    if image.mode == "F":
        kind = "floats"
    elif isinstance(image, TiffImageFile):
        if not _UNSIGNED.issuperset(image.tag_v2.get(_SAMPLE_FORMAT, (1,))):
            kind = "signed numbers"
        elif image.mode == "I":
            kind = "numbers of 32 bits"
    if kind:
        raise ValueError(
            f"its pixels are {kind}, no levels of 8 or 16 bits; convert the file, or store npy"
        )


@dataclass(frozen=True)
class DecodeRandomResizedCrop(OfField):
    """Same as `DecodeImage` and then `RandomResizedCrop`, with the same rectangles drawn.

    A rectangle is drawn from the size that the header of a file declares. Then a JPEG file is
    decoded at the smallest of a half, a quarter or an eighth at which the rectangle still is at
    least `reducing_gap` times as high and as wide as the result. Images decoded at full size give
    the pixels of the two transforms; others differ a little, and less with a larger gap.

    Attributes:
        field: the bytes of files, which samples no longer have afterwards.
        size: of the result: of a square, or height and width.
        to: the result, uint8 [height, width, channels].
        colors: see `DecodeImage`.
        max_pixels: see `DecodeImage`.
        exact: see `DecodeImage`.
        scale: see `RandomResizedCrop`.
        ratio: see `RandomResizedCrop`.
        interpolation: see `resized`; always with `antialias`.
        reducing_gap: as that of `resize` of Pillow: how many pixels a rectangle decoded
            smaller has at least, each way, for one pixel of the result.
    """

    version: ClassVar[int] = 2  # that of `DecodeImage`
    is_random: ClassVar[bool] = True

    size: Size
    to: str = "image"
    colors: Literal["rgb", "gray"] = "rgb"
    max_pixels: Annotated[int, Meta(ge=1, le=1 << 30)] = 100_000_000
    exact: bool = True
    scale: tuple[Positive, Positive] = (0.08, 1.0)
    ratio: tuple[Positive, Positive] = (3 / 4, 4 / 3)
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    reducing_gap: Annotated[float, Meta(ge=1, le=64)] = 1.0

    def __post_init__(self) -> None:
        """Refuse the same options as `RandomResizedCrop`."""
        self._crop  # noqa: B018

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        others = {name: field for name, field in fields.items() if name != self.field}
        check_left_behind(self.to, others, is_whole=True, can_take=False)
        return self._crop.outputs(self._decode.outputs(fields))

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        data = sample.pop(self.field).data
        height, width = self._decode.declared_size(data)
        box = self._crop.box(height, width, rng)
        image, factor = self._decode.decoded(data, self.factor(box[2], box[3]))
        if image.shape[:2] != (-(-height // factor), -(-width // factor)):
            raise ValueError(
                f"its header declares {width} x {height} pixels, and it has "
                f"{image.shape[1] * factor} x {image.shape[0] * factor}"
            )
        if factor == 1:
            made = self._crop.cut(image, box)
        else:
            part = box[0] / factor, box[1] / factor, box[2] / factor, box[3] / factor
            made = resized_part(image, part, *pair(self.size), self.interpolation)
        self._crop.put(self.to, made, sample, out)

    def factor(self, height: int, width: int) -> int:
        """By how much a file is decoded smaller for a rectangle."""
        times = min(height / pair(self.size)[0], width / pair(self.size)[1])
        return max((each for each in FACTORS if times / each >= self.reducing_gap), default=1)

    @cached_property
    def _decode(self) -> DecodeImage:
        return DecodeImage(self.field, self.to, self.colors, self.max_pixels, self.exact)

    @cached_property
    def _crop(self) -> RandomResizedCrop:
        return RandomResizedCrop(
            self.size, self.scale, self.ratio, self.interpolation, field=self.to
        )
