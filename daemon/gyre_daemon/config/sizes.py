"""Numbers of bytes, as people write them."""

import re
from fractions import Fraction

_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]{0,3})", re.ASCII)
_BINARY_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DECIMAL_UNITS = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNIT_BYTES = {"": 1, "B": 1} | _BINARY_UNITS | _DECIMAL_UNITS
_MAX_SIZE = 1 << 60  # an EiB; anything larger is a slip of the unit


class Size(int):
    """A number of bytes.

    In TOML an integer, or text such as "64MiB" (2^20 bytes each) or "64MB" (10^6 bytes each).
    """


def parse_size(text: str | int) -> Size:
    """Bytes from an integer or text such as "1.5GiB" or "1GB", rounded down to whole bytes.

    Raises:
        ValueError: it is neither, or its unit is unknown.
    """
    match = _SIZE.fullmatch(str(text).strip())
    if not match or match[2] not in _UNIT_BYTES or ("." in match[1] and match[2] in ("", "B")):
        raise ValueError(
            'expected a number of bytes such as 1073741824, "512MiB" (binary) or "1GB" (decimal)'
        )
    size = Size(Fraction(match[1]) * _UNIT_BYTES[match[2]])
    if size > _MAX_SIZE:
        raise ValueError(f"expected at most {_MAX_SIZE} bytes, an EiB")
    return size
