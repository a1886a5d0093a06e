"""Encoded images, sounds and videos, by the ends of their files' names."""

from collections.abc import Iterable

MEDIA_TYPES = {
    "jpg": "image/jpeg",
    "jpeg": "image/jpeg",
    "png": "image/png",
    "webp": "image/webp",
    "gif": "image/gif",
    "bmp": "image/bmp",
    "tif": "image/tiff",
    "tiff": "image/tiff",
    "ppm": "image/x-portable-pixmap",
    "avif": "image/avif",
    "jp2": "image/jp2",
    "j2k": "image/j2c",
    "wav": "audio/wav",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "ogg": "audio/ogg",
    "opus": "audio/ogg",
    "m4a": "audio/mp4",
    "mp4": "video/mp4",
    "webm": "video/webm",
    "mkv": "video/x-matroska",
    "mov": "video/quicktime",
}
IMAGES, AUDIO = (
    tuple(name for name, media_type in MEDIA_TYPES.items() if media_type.startswith(kind))
    for kind in ("image/", "audio/")
)


def media_type_of(extensions: Iterable[str]) -> str:
    """The type of files with any of these extensions: `image/jpeg`, `image/*`, or empty."""
    kinds = {MEDIA_TYPES.get(extension.lower(), "") for extension in extensions}
    if len(kinds) == 1:
        return kinds.pop()
    types = {kind.partition("/")[0] for kind in kinds}
    return f"{types.pop()}/*" if len(types) == 1 else ""
