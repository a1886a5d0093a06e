"""Files that are known not to be token ids: what they look like, and what to do with them.

True ids must never be refused by chance. So a signature counts by itself only where it is longer than six bytes, or where the
bytes after it hold what its format demands; a shorter one counts only beside a file name that says the same.
"""

import re
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

_MIN_TEXT_BYTES = 64  # 32 random ids of 16 bits are all printable once in 10^17 files
_CONTROL = bytes({*range(32), 127} - set(b"\t\n\r\f"))
_JPEG = re.compile(
    rb"\xff\xd8\xff(\xe0..JF(IF|XX)\0|\xe1..(Exif\0|http:)|\xe2..ICC_PROFILE|\xee..Adobe|\xdb\x00[\x43\x84][\x00\x01])",
    re.DOTALL,
)
_PARQUET = re.compile(rb"PAR1\x15[\x00\x02\x04\x06](\x15|\x19)")  # Thrift of a page's header, or of an empty file's footer
_OLD_PICKLE = re.compile(
    rb"(\x80[\x02\x03])?c[A-Za-z_][\w.]{4,60}\n\w{4,}\n|\x80[\x02\x03]([\](}]q\x00\(|\x8a\x0al\xfc\x9cF\xf9\x20)", re.ASCII
)
_ZIP_METHODS = (0, 8, 9, 12, 14, 93, 95)
_LLM_C = {20240326: "a model checkpoint of llm.c", 20240522: "an evaluation file of llm.c"}


class Kind(NamedTuple):
    """Files of one kind.

    Attributes:
        what: they look like.
        advice: what to do with one.
        is_it: whether the head of a file is one's beyond doubt.
        magic: what every one begins with, too short to be beyond doubt; empty for none.
        suffixes: of their names, in lower case.
    """

    what: str
    advice: str
    is_it: Callable[[bytes], bool]
    magic: bytes = b""
    suffixes: tuple[str, ...] = ()


def foreign_kind(head: bytes, name: str) -> Kind | None:
    """The kind of foreign file that begins with `head` and has this name; None where it may well be ids.

    Args:
        head: some KiB, or the whole file.
        name: of the file.
    """
    for kind in _KINDS:
        is_named = bool(kind.magic) and head.startswith(kind.magic) and name.lower().endswith(kind.suffixes)
        if is_named or kind.is_it(head):
            return kind
    return None


def is_text(head: bytes) -> bool:
    """Whether it is all printable UTF-8, as ids of two bytes and more never are for so long."""
    if len(head) < _MIN_TEXT_BYTES or len(head.translate(None, _CONTROL)) != len(head):
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True


def _starts(magic: bytes) -> Callable[[bytes], bool]:
    return lambda head: head.startswith(magic)


def _is_gzip(head: bytes) -> bool:
    """Its beginning can be decompressed."""
    if not head.startswith(b"\x1f\x8b\x08"):
        return False
    try:
        return len(zlib.decompressobj(wbits=31).decompress(head, 1024)) > 0
    except zlib.error:
        return False


def _is_zstd(head: bytes) -> bool:
    """Its first block is one, of at most 128 KiB (RFC 8878)."""
    if not head.startswith(b"\x28\xb5\x2f\xfd") or len(head) < 18:
        return False
    flags = head[4]
    is_single = flags >> 5 & 1
    content = (is_single, 2, 4, 8)[flags >> 6]
    block = 5 + (1 - is_single) + (0, 1, 2, 4)[flags & 3] + content
    header = int.from_bytes(head[block : block + 3], "little")
    return not flags & 8 and header >> 1 & 3 != 3 and header >> 3 <= 1 << 17


def _is_zip(head: bytes) -> bool:
    """Its first member's header, as npz files and torch's have one, or the end of an empty archive."""
    if len(head) < 22 or not head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return False
    if head[2] == 5:
        return not any(head[4:20])
    version, flags, method = struct.unpack_from("<HHH", head, 4)
    return version & 0xFF <= 63 and not flags & 0xC7B0 and method in _ZIP_METHODS


def _is_pickle(head: bytes) -> bool:
    """Protocol 4 or 5 with its first frame, or an older one: of a class, a list or a dict, or as torch's files were."""
    if head.startswith((b"\x80\x04\x95", b"\x80\x05\x95")) and len(head) >= 11:
        return int.from_bytes(head[3:11], "little") < 1 << 40
    return _OLD_PICKLE.match(head) is not None


def _is_llm_c(magic: int) -> Callable[[bytes], bool]:
    def is_it(head: bytes) -> bool:
        first, version = struct.unpack_from("<ii", head.ljust(8, b"\0"))
        return bool(first == magic and 0 < version < 256)

    return is_it


_TO_FILE = "write its ids as a flat file, or with numpy.save"
_TO_TARS = "put images into tar shards and serve them in the format webdataset"
_KINDS = (
    Kind("a Parquet file", _TO_FILE, lambda head: _PARQUET.match(head) is not None, b"PAR1", (".parquet", ".pq")),
    Kind("an Arrow file", _TO_FILE, _starts(b"ARROW1\0\0"), b"\xff\xff\xff\xff", (".arrow", ".arrows")),
    Kind("an HDF5 file", _TO_FILE, _starts(b"\x89HDF\r\n\x1a\n")),
    Kind("a JPEG image", _TO_TARS, lambda head: _JPEG.match(head) is not None, b"\xff\xd8\xff", (".jpg", ".jpeg")),
    Kind("a PNG image", _TO_TARS, _starts(b"\x89PNG\r\n\x1a\n")),
    Kind("gzip data", "decompress it", _is_gzip, b"\x1f\x8b\x08", (".gz", ".tgz")),
    Kind("zstd data", "decompress it", _is_zstd, b"\x28\xb5\x2f\xfd", (".zst", ".zstd")),
    Kind("a zip archive, as npz files and torch's are", _TO_FILE, _is_zip, b"PK", (".zip", ".npz", ".pt", ".pth")),
    Kind("a tar archive", "serve it in the format webdataset", lambda head: head[257:262] == b"ustar" and b"\0" in head[:100]),
    Kind("a pickle", f"load it where you trust it, and {_TO_FILE}", _is_pickle, b"\x80", (".pkl", ".pickle", ".pt", ".pth")),
    Kind("the index of a Megatron dataset", "name the .bin file beside it", _starts(b"MMIDIDX\0\0")),
    *(Kind(what, "name the files of token ids", _is_llm_c(magic)) for magic, what in _LLM_C.items()),
)
