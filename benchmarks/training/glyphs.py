"""Images that can be learned: letters and digits in matplotlib's fonts, turned, moved and noisy."""

import io
import string
import tarfile
from functools import cache
from pathlib import Path

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

CHARACTERS = string.digits + string.ascii_letters
SIZE = 64
FONTS = ("DejaVuSans*.ttf", "DejaVuSerif*.ttf", "STIXGeneral*.ttf")
FEW_LETTERS = "Display"  # in the names of fonts that have not all characters
POINTS = (26, 32, 38, 44)
MAX_TURN_DEGREES, MAX_SHIFT = 15.0, 6
NOISE = 25.0

Pixels = npt.NDArray[np.uint8]


def write_shard(
    path: Path, first: int, labels: npt.NDArray[np.int64], seed: int
) -> npt.NDArray[np.int64]:
    """A tar of samples `KEY.npy`, uint8 [3, SIZE, SIZE], and `KEY.cls`, its label.

    Args:
        path: of the shard.
        first: number of its first sample.
        labels: of its samples, indices into CHARACTERS.
        seed: with the sample's number it decides its pixels.

    Returns:
        int64 [n, 4]: of each sample the begin and end of its array and of its label in the shard.
    """
    places = []
    with tarfile.open(path, "w") as archive:
        for index, label in enumerate(labels.tolist(), first):
            array = io.BytesIO()
            np.save(array, render(CHARACTERS[label], np.random.default_rng([seed, index])))
            pixels = _add(archive, f"{index:06}.npy", array.getvalue())
            places.append((*pixels, *_add(archive, f"{index:06}.cls", b"%d" % label)))
    return np.array(places, np.int64)


def render(character: str, generator: np.random.Generator) -> Pixels:
    """One image, [3, SIZE, SIZE]."""
    font = _font(int(generator.integers(len(_font_paths()))), int(generator.choice(POINTS)))
    mask = Image.new("L", (SIZE, SIZE))
    ImageDraw.Draw(mask).text((SIZE // 2, SIZE // 2), character, 255, font, anchor="mm")
    turn = float(generator.uniform(-MAX_TURN_DEGREES, MAX_TURN_DEGREES))
    shift_x, shift_y = (int(value) for value in generator.integers(-MAX_SHIFT, MAX_SHIFT + 1, 2))
    mask = mask.rotate(turn, Image.Resampling.BILINEAR, translate=(shift_x, shift_y))
    share = np.asarray(mask, np.float32) / 255
    paper, ink = generator.uniform(0, 100, (3, 1, 1)), generator.uniform(130, 255, (3, 1, 1))
    image = paper + (ink - paper) * share + generator.normal(0, NOISE, (3, SIZE, SIZE))
    return np.clip(image, 0, 255).astype(np.uint8)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> tuple[int, int]:
    """Add a file to the tar; return the half-open range of its content."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    begin = archive.offset + tarfile.BLOCKSIZE
    archive.addfile(member, io.BytesIO(content))
    return begin, begin + member.size


@cache
def _font_paths() -> list[Path]:
    folder = Path(mpl.get_data_path()) / "fonts" / "ttf"
    return sorted(
        path for pattern in FONTS for path in folder.glob(pattern) if FEW_LETTERS not in path.name
    )


@cache
def _font(number: int, points: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(_font_paths()[number], points)
