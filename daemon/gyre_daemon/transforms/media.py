"""Whether encoded images and sounds can be decoded, for `gyre lint`."""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from gyre_daemon.transforms.names import own_target
from gyre_daemon.transforms.transform import TooLarge

_Decode = Callable[[memoryview], object]


def check_media(media_type: str, data: memoryview) -> str:
    """Decode an image or a sound as `decode_image` and `decode_audio` do.

    Args:
        media_type: such as `image/png` or `audio/*`.
        data: the file.

    Returns:
        Why it was not decoded; empty if it was.

    Raises:
        ValueError: it cannot be decoded.
    """
    kind, _, form = media_type.partition("/")
    if form == "mp4":
        return f"{media_type} is not decoded here"
    try:
        decode = _decoder(kind)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    try:
        decode(data)
    except TooLarge as error:
        return str(error)
    return ""


@functools.cache
def _decoder(kind: str) -> _Decode:
    """A decoder of images or sounds.

    Raises:
        ModuleNotFoundError: a library is missing.
    """
    module, _, name = own_target(f"decode_{kind}").partition(":")
    decoder: Any = getattr(import_module(module), name)
    if kind == "image":
        image = decoder("")
        return lambda data: image.decoded(data, 1)
    decode: _Decode = decoder("", rate=16_000, max_seconds=24 * 3600).decoded
    return decode
