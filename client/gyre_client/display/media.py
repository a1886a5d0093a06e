"""The media type of a field's bytes, by how they begin, and pictures of images for terminals.

Bytes of datasets are decoded only where this is asked for, only as one of a few kinds of images,
and only after their size was checked.
"""

import io
import os
from typing import IO, NamedTuple

from gyre_client.errors import NotInstalled

_SIGNATURES = (
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"fLaC", "audio/flac"),
    (b"OggS", "audio/ogg"),
    (b"ID3", "audio/mpeg"),
    (b"\xff\xfb", "audio/mpeg"),
    (b"\xff\xf3", "audio/mpeg"),
)
_RIFF = {b"WEBP": "image/webp", b"WAVE": "audio/wav"}
_DECODABLE = ("JPEG", "PNG", "GIF", "WEBP")
# An image is decoded whole before it is made smaller: 64 million pixels take 192 MiB.
_MAX_PIXELS = 64 << 20
_UPPER_HALF = "\u2580"  # its upper half in the text's colour, its lower half in the background's
_PLAIN = "\x1b[0m"

Pixel = tuple[int, int, int]


class Picture(NamedTuple):
    """A small image: rows of red, green and blue; an even number of rows of one length."""

    rows: list[list[Pixel]]

    def drawn(self) -> str:
        """Returns the lines for a terminal of true colours: two rows in each."""
        lines = []
        for upper, lower in zip(self.rows[::2], self.rows[1::2], strict=True):
            cells = [
                f"\x1b[38;2;{above[0]};{above[1]};{above[2]};48;2;{below[0]};{below[1]};{below[2]}m"
                f"{_UPPER_HALF}"
                for above, below in zip(upper, lower, strict=True)
            ]
            lines.append("".join(cells) + _PLAIN)
        return "\n".join(lines)


def media_type(data: bytes) -> str | None:
    """Returns the type of an image or a sound by its first bytes; None if it is neither."""
    if data[:4] == b"RIFF":
        return _RIFF.get(data[8:12])
    return next((kind for start, kind in _SIGNATURES if data.startswith(start)), None)


def shows_pictures(output: IO[str]) -> bool:
    """Whether pictures can be drawn on `output`: a terminal with colours."""
    return output.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def thumbnail(data: bytes, num_columns: int, num_lines: int) -> Picture | None:
    """Returns an image in at most these columns and lines; None for other bytes and too large ones.

    Raises:
        NotInstalled: Pillow is missing.
    """
    try:
        from PIL import Image  # noqa: PLC0415  # only pictures need it
    except ImportError:
        raise NotInstalled.needs("drawing images", "Pillow", "images") from None
    size = num_columns, 2 * num_lines
    try:
        with Image.open(io.BytesIO(data), formats=_DECODABLE) as image:
            if image.width * image.height > _MAX_PIXELS:
                return None
            image.draft("RGB", size)
            small = image.convert("RGB")
            small.thumbnail(size)
            pixels = small.tobytes()
    except Exception:  # a damaged image can fail in any way
        return None
    width, height = small.size
    triples = [
        (pixels[place], pixels[place + 1], pixels[place + 2]) for place in range(0, len(pixels), 3)
    ]
    rows = [triples[row * width : (row + 1) * width] for row in range(height)]
    if height % 2:
        rows.append([(0, 0, 0)] * width)
    return Picture(rows)
