r"""Recognises files of other types than token ids, and suggests a format or a fix.

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
    """A type of file without token ids.

    Attributes:
        description: of such a file, for messages.
        advice: to the user.
        signature: a regular expression that the head of a file matches only if it is of this type.
        magic: the first bytes of all such files, if they are too short to be a signature.
        suffixes: of file names, in lower case, with which the magic is enough.
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
    """Whether the head is printable UTF-8, too long to be ids of two bytes or more."""
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
_TO_TARS_OF_SOUND = "put such files into tar shards and serve them in the format webdataset"
_TYPES = (
    # a page header in Thrift, or the footer of an empty file
    ForeignType(
        "a Parquet file",
        _TO_FILE,
        rb"PAR1\x15[\x00\x02\x04\x06](\x15|\x19)",
        b"PAR1",
        (".parquet", ".pq"),
    ),
    # or a stream of messages: a mark, a size, and the first table of a flatbuffer
    ForeignType(
        "an Arrow file",
        _TO_FILE,
        rb"ARROW1\0\0|\xff{4}..[^\xff]\0\x10\0\0\0\0\0\x0a\0",
        b"\xff\xff\xff\xff",
        (".arrow", ".arrows"),
    ),
    ForeignType("an Avro file", _TO_FILE, rb"Obj\x01.{1,4}avro\."),
    ForeignType("an ORC file", _TO_FILE, rb"(?!)", b"ORC", (".orc",)),
    ForeignType("an SQLite database", _TO_FILE, rb"SQLite format 3\0"),
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
    ForeignType(
        "sound or images in RIFF", _TO_TARS_OF_SOUND, rb"(RIFF|RF64).{4}(WAVEfmt |WEBPVP8|AVI LIST)"
    ),
    ForeignType(
        "sound in FLAC or Ogg", _TO_TARS_OF_SOUND, rb"fLaC[\0\x80]\0\0\x22|OggS\0\x02\0{8}"
    ),
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
    ForeignType("xz data", "decompress it", rb"\xfd7zXZ\0\0[\0\x01\x04\x0a]"),
    ForeignType("bzip2 data", "decompress it", rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    # its version, a block size, and bits of 0
    ForeignType(
        "lz4 data",
        "decompress it",
        rb"\x04\x22\x4d\x18[\x40-\x7d][\x40\x50\x60\x70]",
        b"\x04\x22\x4d\x18",
        (".lz4",),
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
    # the size of a header below 4 GiB, and its first key
    ForeignType("a safetensors file", _TO_FILE, rb".{4}\0{4}\{\"[\w.]"),
    ForeignType("a GGUF model", "name the files of token ids", rb"GGUF[\x01-\x09]\0\0\0"),
    ForeignType("a program", "name the files of token ids", rb"\x7fELF[\x01\x02]{2}\x01"),
    # version 2, fields, a page of 2 MiB to 2 GiB, less than 2^40 samples, a table below 2^48
    ForeignType(
        "a dataset of ffcv",
        _TO_FILE,
        rb"\x02\0[\x01-\x40]\0\0\0([\x20\x40\x80]\0|\0[\x01\x02\x04\x08\x10\x20\x40\x80])"
        rb".{5}\0{3}.{6}\0\0",
    ),
    ForeignType("a chunk of lit-gpt", _TO_FILE, rb"LITPKDS"),
    ForeignType(
        "the index of a Megatron dataset",
        "name the .bin file next to it",
        rb"MMIDIDX\0\0|TNTIDX\0\0",
    ),
    ForeignType("a model checkpoint of llm.c", "name the files of token ids", _llm_c(20240326)),
    ForeignType("an evaluation file of llm.c", "name the files of token ids", _llm_c(20240522)),
)
