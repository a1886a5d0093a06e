"""Data files. `sent` is the dataset's options and its files, as bytes by name.

Each row is a dataset of its own. It is described and read, and one of the two must fail.
"""

import gzip
import io
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.bad_inputs.row import UNPRINTABLE, Row

CORRUPT = ("DATA_LOSS", "CorruptSample")
WRONG = ("INVALID_ARGUMENT", "ConfigError")
MISSING = ("NOT_FOUND", "ShardMissing")
EMPTY = ("INVALID_ARGUMENT", "InvalidRequest")
Files = Mapping[str, bytes]


def member(name: str, data: bytes = b"7", **changes: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in changes.items():
        setattr(info, key, value)
    return info, data


def tar(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


GOOD_TAR = tar(*(member(f"{n:04}.cls", b"%d" % n) for n in range(20)))


def with_size(size: bytes) -> bytes:
    """A tar whose first header declares a size, with a right checksum."""
    header = bytearray(GOOD_TAR[:512])
    header[124:136] = size.ljust(12, b"\0")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + GOOD_TAR[512:]


def npy(header: bytes, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    size = struct.pack("<H" if version[0] == 1 else "<I", len(header))
    return b"\x93NUMPY" + version + size + header + data


def npy_of(descr: str, shape: str, order: str = "False") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"
    return npy(text.encode().ljust(117) + b"\n", bytes(64))


def npy_field(data: bytes) -> bytes:
    return tar(member("0.npy", data), member("1.npy", data))


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("x", bytes(1000))
    return buffer.getvalue()


TAR_SHARDS: dict[str, tuple[bytes, tuple[str, str], str]] = {
    "empty": (b"", CORRUPT, "no sound tar archive"),
    "zeros alone": (bytes(10_240), EMPTY, "1 to 2|no sample|has 0"),
    "one byte": (b"x", CORRUPT, "bad-one-byte|truncated|tar"),
    "noise": (bytes(range(256)) * 40, CORRUPT, "tar"),
    "HTML": (b"<!DOCTYPE html><html>" * 100, CORRUPT, "tar"),
    "a zip": (zipped(), CORRUPT, "tar"),
    "a pickle": (pickle.dumps({"a": bytes(600)}), CORRUPT, "tar"),
    "cut in a header": (GOOD_TAR[:700], CORRUPT, "tar"),
    "cut in a body": (GOOD_TAR[: 512 + 100], CORRUPT, "tar|end"),
    "a flipped header": (GOOD_TAR[:100] + b"!!!!" + GOOD_TAR[104:], CORRUPT, "checksum|tar|header"),
    "a size of 8 GiB": (with_size(b"77777777777"), CORRUPT, "x.tar"),
    "a size of text": (with_size(b"manybytes!!"), CORRUPT, "x.tar"),
    "a negative size": (with_size(b"\xff" * 12), CORRUPT, "x.tar"),
    "a size of 2^63": (with_size(b"\x80" + b"\0" * 3 + b"\x7f" + b"\xff" * 7), CORRUPT, "x.tar"),
    "a size of 512 TiB": (with_size(b"\x80" + (1 << 49).to_bytes(11, "big")), CORRUPT, "the size"),
    "a hard link": (
        tar(member("0.cls"), member("1.cls", b"", type=tarfile.LNKTYPE, linkname="0.cls")),
        CORRUPT,
        "hard link",
    ),
    "members that lie apart": (
        tar(member("0.cls"), member("1.cls"), member("0.jpg"), member("1.jpg")),
        CORRUPT,
        "not adjacent",
    ),
    "one key twice": (
        tar(member("0.cls"), member("0.cls"), member("1.cls")),
        CORRUPT,
        "twice|duplicate|more than once|two",
    ),
    "a field that is missing": (
        tar(member("0.cls"), member("0.jpg"), member("1.cls")),
        CORRUPT,
        "jpg|field",
    ),
    "a label of text": (tar(member("0.cls", b"cat")), CORRUPT, "cls"),
    "a label of 5,000 digits": (tar(member("0.cls", b"9" * 5000)), CORRUPT, "cls"),
    "a label of nothing": (tar(member("0.cls", b"")), CORRUPT, "cls"),
    "a label of 2^63": (tar(member("0.cls", b"9223372036854775808")), CORRUPT, "cls"),
    "JSON of nonsense": (tar(member("0.json", b"{]")), CORRUPT, "json"),
    "JSON nested 100,000 deep": (tar(member("0.json", b"[" * 100_000)), CORRUPT, "json"),
    "JSON that is not UTF-8": (tar(member("0.json", b'"\xff\xfe"')), CORRUPT, "json"),
    "JSON of 100,000 digits": (tar(member("0.json", b"1" * 100_000 + b"]")), CORRUPT, "json"),
    "npy of nothing": (npy_field(b""), CORRUPT, "npy"),
    "npy of text": (npy_field(b"hello world"), CORRUPT, "npy"),
    "npy of version 9": (npy_field(npy(b"{}", version=b"\x09\x00")), CORRUPT, "npy"),
    "npy cut in its header": (npy_field(npy_of("'<i4'", "(4,)")[:30]), CORRUPT, "npy"),
    "npy header of 4 GiB": (
        npy_field(b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}"),
        CORRUPT,
        "npy",
    ),
    "npy of terabytes": (npy_field(npy_of("'<i8'", "(1099511627776,)")), CORRUPT, "npy"),
    "npy of 2^63 by 2^63": (
        npy_field(npy_of("'<i8'", "(9223372036854775807, 9223372036854775807)")),
        CORRUPT,
        "npy",
    ),
    "npy of negative shape": (npy_field(npy_of("'<i4'", "(-4,)")), CORRUPT, "npy"),
    "npy of a float shape": (npy_field(npy_of("'<i4'", "(4.0,)")), CORRUPT, "npy"),
    "npy of objects": (npy_field(npy_of("'|O'", "(4,)")), CORRUPT, "npy"),
    "npy of a record": (npy_field(npy_of("[('a', '<i4')]", "(4,)")), CORRUPT, "npy"),
    "npy of Unicode": (npy_field(npy_of("'<U8'", "(4,)")), CORRUPT, "npy"),
    "npy in Fortran order": (npy_field(npy_of("'<i4'", "(4, 4)", "True")), CORRUPT, "Fortran"),
    "npy of big-endian": (npy_field(npy_of("'>i4'", "(4,)")), CORRUPT, "npy"),
    "npy header of code": (
        npy_field(npy(b"__import__('os').system('true')\n")),
        CORRUPT,
        "npy",
    ),
    "npy header 200 deep": (npy_field(npy(b"(" * 200 + b")" * 200 + b"\n")), CORRUPT, "npy"),
    "npy without its data": (npy_field(npy_of("'<i4'", "(4000,)")), CORRUPT, "npy"),
}
# Headers that a reader must not follow, beside what is good: nothing outside the shard is served.
TOKEN_FILES: dict[str, tuple[dict[str, Any], Files, tuple[str, str], str]] = {
    "empty": ({}, {"x.bin": b""}, EMPTY, "1 to 2|no sample|has 0"),
    "shorter than a sample": ({}, {"x.bin": bytes(20)}, EMPTY, "1 to 2|no sample|has 0"),
    "odd size": ({}, {"x.bin": bytes(1001)}, CORRUPT, "x.bin"),
    "npy header, wrong dtype": (
        {},
        {"x.bin": npy_of("'<f8'", "(8,)")},
        CORRUPT,
        "x.bin",
    ),
    "a gzip": ({}, {"x.bin": gzip.compress(bytes(4000))}, CORRUPT, "gzip|compress"),
    "a zip": ({}, {"x.bin": zipped() * 10}, CORRUPT, "zip"),
    "a tar": ({}, {"x.bin": GOOD_TAR}, CORRUPT, "tar"),
    "a pickle": ({}, {"x.bin": pickle.dumps(list(range(900)), 2)}, CORRUPT, "pickle"),
    "length 0": ({"sequence_length": 0}, {"x.bin": bytes(4096)}, WRONG, "sequence_length"),
    "length -1": ({"sequence_length": -1}, {"x.bin": bytes(4096)}, WRONG, "sequence_length"),
    "length of text": ({"sequence_length": "x"}, {"x.bin": bytes(4096)}, WRONG, "sequence_length"),
    "length 2^62": ({"sequence_length": 1 << 62}, {"x.bin": bytes(4096)}, WRONG, "sequence_length"),
    "dtype of objects": ({"dtype": "object"}, {"x.bin": bytes(4096)}, WRONG, "dtype"),
    "dtype of escape sequences": (
        {"dtype": UNPRINTABLE},
        {"x.bin": bytes(4096)},
        WRONG,
        "dtype",
    ),
}
GZIPPED: dict[str, tuple[bytes, tuple[str, str], str]] = {
    "empty": (b"", CORRUPT, "x.tar.gz"),
    "no gzip": (GOOD_TAR, CORRUPT, "gzip|x.tar.gz"),
    "cut": (gzip.compress(GOOD_TAR)[:200], CORRUPT, "x.tar.gz"),
    "a flipped byte": (
        gzip.compress(GOOD_TAR)[:-20] + b"\xff" + gzip.compress(GOOD_TAR)[-19:],
        CORRUPT,
        "x.tar.gz",
    ),
    "gzip of noise": (gzip.compress(bytes(range(256)) * 10), CORRUPT, "x.tar.gz"),
}


_FOLDER = Path(__file__).parent
OTHERS: dict[str, tuple[str, str, bytes, str]] = {
    "a footer on which pyarrow aborts": (
        "parquet",
        "x.parquet",
        (_FOLDER / "aborts_pyarrow.parquet").read_bytes(),
        "process that indexed it died",
    ),
    "parquet of noise": ("parquet", "x.parquet", bytes(range(256)) * 9, "x.parquet"),
    "arrow of noise": ("arrow", "x.arrow", bytes(range(256)) * 9, "x.arrow"),
    "mds of noise": ("mds", "x.mds", bytes(range(256)) * 9, "x.mds"),
    "tfrecord of noise": ("tfrecord", "x.tfrecord", bytes(range(256)) * 9, "x.tfrecord"),
    "arrayrecord of noise": (
        "arrayrecord",
        "x.array_record",
        bytes(range(256)) * 9,
        "shard x.array_record at byte 0: it does not begin as an ArrayRecord file",
    ),
    "jsonl of noise": ("jsonl", "x.jsonl", bytes(range(256)) * 9, "x.jsonl"),
}


def _slug(words: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in words)


def dataset(row: Row) -> str:
    """Returns the name of a row's dataset."""
    return _slug(row.id)


ROWS = [
    *(
        Row(f"tar {words}", ({"format": "webdataset"}, {"x.tar": data}), *told, text)
        for words, (data, told, text) in TAR_SHARDS.items()
    ),
    *(
        Row(f"gzip {words}", ({"format": "webdataset"}, {"x.tar.gz": data}), *told, text)
        for words, (data, told, text) in GZIPPED.items()
    ),
    *(
        Row(f"file {words}", ({"format": name}, {file: data}), *CORRUPT, text)
        for words, (name, file, data, text) in OTHERS.items()
    ),
]
TOKEN_ROWS = [
    Row(
        f"tokens {words}",
        ({"format": "tokens", "dtype": "int32", "sequence_length": 16, **options}, files),
        *told,
        text,
    )
    for words, (options, files, told, text) in TOKEN_FILES.items()
]
# A configuration with these is refused before anything starts; see `table.configuration`.
OPTIONS_REFUSED_EARLY = [row for row in TOKEN_ROWS if row.reason == "ConfigError"]
ROWS += [row for row in TOKEN_ROWS if row not in OPTIONS_REFUSED_EARLY]
