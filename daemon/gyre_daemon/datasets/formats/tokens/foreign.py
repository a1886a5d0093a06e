r"""Recognises files that are no token ids, and says what to do with them.

True ids must not be refused by chance. So a signature counts by itself only if the bytes that it
fixes are hardly the first ids of any file; a shorter one, such as `\x80` of a pickle, counts only
if the file's name says the same.
"""

import re
import struct
from typing import NamedTuple

# 32 random ids of 16 bits are all printable in one file of 10^17.
_MIN_TEXT_BYTES = 64
_CONTROL = bytes({*range(32), 127} - set(b"\t\n\r\f"))


class ForeignType(NamedTuple):
    """A type of file that is no token ids.

    Attributes:
        description: of such a file, for messages.
        advice: what a user should do with it.
        signature: a regular expression that the head of a file matches only if it is of this type.
        magic: the first bytes of all such files, if they are too short to be a signature.
        suffixes: of file names, in lower case, beside which the magic is enough.
    """

    description: str
    advice: str
    signature: bytes
    magic: bytes = b""
    suffixes: tuple[str, ...] = ()


def foreign_type(head: bytes, name: str) -> ForeignType | None:
    """The foreign type of a file; None if it may well be ids.

    Args:
        head: some KiB, or the whole file.
        name: of the file.
    """
    for each in _TYPES:
        is_named = (
            each.magic and head.startswith(each.magic) and name.lower().endswith(each.suffixes)
        )
        if is_named or re.match(each.signature, head, re.DOTALL):
            return each
    return None


def is_text(head: bytes) -> bool:
    """Whether the head is printable UTF-8 that is too long to be ids of two bytes or more."""
    if len(head) < _MIN_TEXT_BYTES or len(head.translate(None, _CONTROL)) != len(head):
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True


def _llm_c(magic: int) -> bytes:
    """A magic number and a version below 256, both int32."""
    return re.escape(struct.pack("<i", magic)) + rb"[^\0]\0\0\0"


_TO_FILE = "write its ids as a flat file, or with numpy.save"
_TO_TARS = "put images into tar shards and serve them in the format webdataset"
_TYPES = (
    # a page header in Thrift, or the footer of an empty file
    ForeignType(
        "a Parquet file",
        _TO_FILE,
        rb"PAR1\x15[\x00\x02\x04\x06](\x15|\x19)",
        b"PAR1",
        (".parquet", ".pq"),
    ),
    ForeignType(
        "an Arrow file", _TO_FILE, rb"ARROW1\0\0", b"\xff\xff\xff\xff", (".arrow", ".arrows")
    ),
    ForeignType("an HDF5 file", _TO_FILE, rb"\x89HDF\r\n\x1a\n"),
    # a first segment of JFIF, Exif, XMP, a colour profile, Adobe, or a table of quantisation
    ForeignType(
        "a JPEG image",
        _TO_TARS,
        rb"\xff\xd8\xff(\xe0..JF(IF|XX)\0|\xe1..(Exif\0|http:)|\xe2..ICC_PROFILE|\xee..Adobe"
        rb"|\xdb\x00[\x43\x84][\x00\x01])",
        b"\xff\xd8\xff",
        (".jpg", ".jpeg"),
    ),
    ForeignType("a PNG image", _TO_TARS, rb"\x89PNG\r\n\x1a\n"),
    # RFC 1952: flags, any time, compression level, operating system
    ForeignType(
        "gzip data",
        "decompress it",
        rb"\x1f\x8b\x08[\x00-\x1f]....[\x00\x02\x04][\x00-\x0d\xff]",
        b"\x1f\x8b\x08",
        (".gz", ".tgz"),
    ),
    # RFC 8878: the reserved bit of the frame descriptor is 0
    ForeignType(
        "zstd data",
        "decompress it",
        rb"\x28\xb5\x2f\xfd[\x00-\x07\x10-\x17\x20-\x27\x30-\x37\x40-\x47\x50-\x57\x60-\x67\x70-\x77"
        rb"\x80-\x87\x90-\x97\xa0-\xa7\xb0-\xb7\xc0-\xc7\xd0-\xd7\xe0-\xe7\xf0-\xf7]",
        b"\x28\xb5\x2f\xfd",
        (".zst", ".zstd"),
    ),
    # a member's version, flags and method, or the end record of an empty archive
    ForeignType(
        "a zip archive, as npz files and torch's are",
        _TO_FILE,
        rb"PK\x03\x04[\x00-\x3f].[\x00-\x0f].[\x00\x08\x09\x0c\x0e\x5d\x5f]\0|PK\x05\x06\0{16}",
        b"PK",
        (".zip", ".npz", ".pt", ".pth"),
    ),
    ForeignType(
        "a tar archive", "serve it in the format webdataset", rb"(?=[^\0]{0,99}\0).{257}ustar"
    ),
    # protocol 4 or 5 with its first frame; or an older one of a class, a list, a dict, or of torch
    ForeignType(
        "a pickle",
        f"load it where you trust it, and {_TO_FILE}",
        rb"\x80[\x04\x05]\x95.{5}\0{3}|(\x80[\x02\x03])?c[A-Za-z_][\w.]{4,60}\n\w{4,}\n"
        rb"|\x80[\x02\x03]([\](\}]q\x00\(|\x8a\x0al\xfc\x9cF\xf9\x20)",
        b"\x80",
        (".pkl", ".pickle", ".pt", ".pth"),
    ),
    ForeignType("a chunk of lit-gpt", _TO_FILE, rb"LITPKDS"),
    ForeignType("the index of a Megatron dataset", "name the .bin file beside it", rb"MMIDIDX\0\0"),
    ForeignType("a model checkpoint of llm.c", "name the files of token ids", _llm_c(20240326)),
    ForeignType("an evaluation file of llm.c", "name the files of token ids", _llm_c(20240522)),
)
