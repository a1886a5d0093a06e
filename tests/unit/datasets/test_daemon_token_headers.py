"""What the first bytes of a tokens dataset's shards tell: headers, foreign files, true ids."""

import bz2
import gzip
import io
import lzma
import pickle
import struct
import tarfile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import soundfile
import zstandard
from gyre_daemon.errors import ConfigError, CorruptSample
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.token_files import IDS, Files, ids_of, llm_c, megatron_idx, npy


@pytest.mark.parametrize(
    ("dtype", "version"),
    [
        *((dtype, (1, 0)) for dtype in ("u1", "<u2", "<i2", "<i4", "<u4", "<i8", "<u8")),
        *(("<u2", version) for version in ((2, 0), (3, 0))),
    ],
)
def test_an_npy_file_is_read_behind_its_header(dtype: str, version: tuple[int, int]) -> None:
    contents = {
        "a.npy": npy((IDS % 100).astype(dtype), version),
        "b.npy": npy(np.arange(17).astype(dtype), version),
    }
    index = Files(contents).index()
    assert index.fields[0].dtype == np.dtype(dtype)
    assert ids_of(index, contents)[-2:] == [list(range(8)), list(range(8, 16))]
    assert index.num_samples == 5000 // 8 + 2


@pytest.mark.parametrize(
    ("magic", "version", "dtype"), [(20240520, 1, "uint16"), (20240801, 7, "uint32")]
)
def test_files_of_llm_c_and_modded_nanogpt_are_read_behind_their_header(
    magic: int, version: int, dtype: str
) -> None:
    contents = {
        "val.bin": llm_c(IDS.astype(dtype), magic, version),
        "x.bin": llm_c(np.arange(3, dtype=dtype), magic, version),
    }
    index = Files(contents).index()
    assert index.fields[0].dtype == np.dtype(dtype)
    assert ids_of(index, contents) == IDS.reshape(-1, 8).tolist()


def test_a_shard_is_looked_at_once_and_only_the_first_is_asked_for_an_index() -> None:
    contents = {f"{number}.bin": IDS.astype("<u2").tobytes() for number in range(3000)}
    files = Files(contents)
    assert files.index(dtype="uint16").num_samples == 3000 * 625
    assert [len(request.shard) for request in files.requests] == [1024, 1024, 952, 1]
    assert all(stop <= 4096 for request in files.requests for stop in request.stop)


def test_a_flat_file_needs_a_dtype() -> None:
    with pytest.raises(
        ConfigError,
        match=r"`dtype` is missing: shard a\.bin .* Set it to one of uint8, uint16, int16",
    ):
        Files({"a.bin": IDS.astype("<u2").tobytes()}).index()


@pytest.mark.parametrize("contents", [npy(IDS.astype("<i4")), llm_c(IDS.astype("<u2"))])
def test_a_dtype_that_the_header_contradicts_is_refused(contents: bytes) -> None:
    with pytest.raises(
        ConfigError, match=r"`dtype` is int64, but shard a\.bin has a .* header of u?int\d\d ids"
    ):
        Files({"a.bin": contents}).index(dtype="int64")
    of_file = "int32" if contents.startswith(b"\x93NUMPY") else "uint16"
    assert Files({"a.bin": contents}).index(dtype=of_file).num_samples == 625


def test_header_bytes_say_where_ids_begin_and_nothing_is_looked_at() -> None:
    contents = {
        "a.bin": bytes(100) + IDS.astype("<u2").tobytes(),
        "b.bin": b"",
        "c.bin": bytes(100),
    }
    files = Files(contents)
    assert (
        ids_of(files.index(header_bytes=100, dtype="uint16"), contents)
        == IDS.reshape(-1, 8).tolist()
    )
    assert not files.requests
    image = {"a.bin": b"\x89PNG\r\n\x1a\n" + bytes(1000)}
    assert Files(image).index(header_bytes=0, dtype="uint16").num_samples == 63, "the way out"
    with pytest.raises(ConfigError, match="`dtype` is missing"):
        Files(contents).index(header_bytes=100)
    with pytest.raises(ConfigError, match=r"header_bytes .* is -1: expected `int` >= 0"):
        Files(contents).index(header_bytes=-1, dtype="uint16")


def test_the_digest_covers_where_ids_begin() -> None:
    data = {"a.bin": bytes(16) + IDS.astype("<u2").tobytes()}
    digests = {
        Files(data).index(dtype="uint16", header_bytes=num_bytes).digest()
        for num_bytes in (0, 2, 16)
    }
    digests.add(Files({"a.npy": npy(IDS.astype("<u2"))}).index().digest())
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("contents", "sentence"),
    [
        (
            npy(np.zeros((3, 4), np.int32)),
            r"npy array is of int32 and has shape \[3, 4\]; store integers of one dimension",
        ),
        (npy(np.zeros(30)), "npy array is of float64"),
        (npy(np.zeros(30, bool)), "npy array is of bool"),
        (npy(np.zeros(30, ">i4")), "big-endian; store it little-endian"),
        (
            npy(np.zeros(3, [("a", "<i4")])),
            "it is an npy file, and an npy array of .* is no tensor",
        ),
        (
            npy(np.zeros(30, np.int32))[:-4],
            r"is not whole: it has 244 bytes, and 248 by its npy header",
        ),
        (npy(np.zeros(30, np.int32)) + b"1234", "is not whole"),
        (
            llm_c(IDS.astype("<u2"))[:-2],
            "is not whole: it has 11022 bytes, and 11024 by its llm.c header of 5000 uint16 ids",
        ),
        (llm_c(IDS.astype("<u2"), count=4999), "is not whole"),
        (llm_c(IDS.astype("<u2"))[:700], "is not whole"),
        (llm_c(IDS.astype("<u2"), version=2), "llm.c's 20240520 in version 2, which is not known"),
        (llm_c(IDS.astype("<u2"), magic=20240326), "looks like a model; name its format"),
        (
            megatron_idx([5, 6], 2, 8),
            "looks like the index of a Megatron dataset",
        ),
    ],
)
def test_headers_that_cannot_be_served_are_named(contents: bytes, sentence: str) -> None:
    with pytest.raises(CorruptSample, match=sentence) as caught:
        Files({"a.bin": contents}).index(dtype="uint16")
    assert caught.value.facts["shard"] == "a.bin"


def test_shards_of_one_dataset_are_alike() -> None:
    contents = {
        "a.bin": llm_c(IDS.astype("<u2")),
        "b.bin": b"",
        "c.bin": IDS.astype("<u2").tobytes(),
    }
    with pytest.raises(
        CorruptSample,
        match=r"shard c\.bin does not fit: it has no header, and shard a\.bin has a llm\.c header",
    ):
        Files(contents).index()
    with pytest.raises(
        CorruptSample, match=r"npy header of int32 ids, and shard a has a npy header of int64 ids"
    ):
        Files({"a": npy(IDS), "b": npy(IDS.astype("<i4"))}).index()


def saved(write: Any) -> bytes:
    stream = io.BytesIO()
    write(stream)
    return stream.getvalue()


def tar() -> bytes:
    with tarfile.open(fileobj=(stream := io.BytesIO()), mode="w") as archive:
        archive.addfile(tarfile.TarInfo("0.txt"))
    return stream.getvalue()


def arrow(make: Any) -> bytes:
    table = pa.table({"ids": IDS})
    stream = io.BytesIO()
    with make(stream, table.schema) as writer:
        writer.write_table(table)
    return stream.getvalue()


def picture(kind: str) -> bytes:
    return saved(lambda file: Image.fromarray(np.zeros((40, 40, 3), np.uint8)).save(file, kind))


def sound_file(kind: str) -> bytes:
    return saved(lambda file: soundfile.write(file, np.zeros(4000), 16_000, format=kind))


RAW = IDS.astype("<u2").tobytes()


def foreign_files() -> list[tuple[bytes, str]]:
    """Files of other types, and what their refusal calls them."""
    return [
        (saved(lambda file: pq.write_table(pa.table({"a": [1]}), file)), "a Parquet file"),
        (arrow(pa.ipc.new_file), "an Arrow file"),
        (b"\x89HDF\r\n\x1a\n" + bytes(3000), "an HDF5 file"),
        (b"SQLite format 3\0" + bytes(3000), "an SQLite database"),
        (picture("JPEG"), "an image"),
        (picture("PNG"), "an image"),
        *((sound_file(kind), "sound") for kind in ("WAV", "FLAC", "OGG")),
        *((each.compress(RAW), "compressed data") for each in (gzip, lzma, bz2)),
        (zstandard.ZstdCompressor().compress(RAW), "compressed data"),
        (saved(lambda file: np.savez(file, ids=IDS)), "a zip archive, as npz files and torch's"),
        (tar(), "a tar archive; name its format"),
        *((pickle.dumps(IDS, protocol), "a pickle") for protocol in range(2, 6)),
        (safetensors.numpy.save({"ids": IDS}), "a model"),
        (b"GGUF" + struct.pack("<IQQ", 3, 291, 24) + bytes(3000), "a model"),
        (
            b"It was the best of times, it was the worst of times.\n" * 100,
            "text; tokenise it first, or serve its bytes",
        ),
        ("Wir fahren über die Brücke. ".encode() * 300, "text"),
    ]


def test_files_of_other_types_are_refused_by_name() -> None:
    for contents, what in foreign_files():
        with pytest.raises(
            CorruptSample,
            match=rf"shard a\.bin holds no token ids: it looks like {what}.* `header_bytes`",
        ):
            Files({"a.bin": contents}).index(dtype="uint16")
        with pytest.raises(CorruptSample, match=what.partition(";")[0]):
            Files({"a.bin": contents}).index(dtype="int32")


def test_text_may_be_served_as_bytes() -> None:
    assert Files({"a.txt": b"All work and no play. " * 40}).index(dtype="uint8").num_samples == 110


@pytest.mark.parametrize(
    ("stored", "served"),
    [("<i4", "uint16"), ("<u4", "int16"), ("<i8", "uint16"), ("<i8", "int32"), ("<i8", "uint32")],
)
@pytest.mark.parametrize("first", [0, 70_000])
def test_wider_ids_read_as_narrow_ones_are_refused(stored: str, served: str, first: int) -> None:
    contents = {"a.bin": (first + IDS).astype(stored).tobytes()}
    with pytest.raises(
        CorruptSample,
        match=f"every second {served} at its beginning is next to 0, .*Correct `dtype`",
    ):
        Files(contents).index(dtype=served)
    assert Files(contents).index(dtype=served, header_bytes=0).num_samples > 0, "the way out"


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([2, 5, 17, 65, 256, 1000, 50257, 65536]),
    st.booleans(),
)
def test_true_ids_are_served(seed: int, vocabulary: int, is_even: bool) -> None:
    """Uniform, and with frequencies that fall as a language's do."""
    generator = np.random.default_rng(seed)
    exponents = generator.random(4096, np.float32) * np.log(vocabulary)
    ids = generator.integers(0, vocabulary, 4096) if is_even else np.exp(exponents).astype(np.int64)
    for dtype in ("uint16", "int32", "uint32", "int64"):
        assert Files({"a.bin": ids.astype(dtype).tobytes()}).index(dtype=dtype).num_samples == 512


def test_files_that_say_too_little_are_served() -> None:
    for contents in (
        bytes(8000),
        b"hello world " * 2,
        np.arange(100, dtype="<i4").tobytes(),
        b"\xff" * 3000,
    ):
        assert Files({"a.bin": contents}).index(dtype="uint16").num_samples > 0


@pytest.mark.parametrize(
    ("dtype", "vocabulary", "checked"),
    [
        ("uint16", 50257, 50257),
        ("uint16", 0, 0),
        ("uint16", 65536, 0),
        ("uint8", 256, 0),
        ("int16", 32768, 32768),
        ("int32", 9, 9),
    ],
)
def test_ids_that_cannot_be_outside_the_vocabulary_are_not_checked(
    dtype: str, vocabulary: int, checked: int
) -> None:
    (spec,) = (
        Files({"a.bin": (IDS % 100).astype(dtype).tobytes()})
        .index(dtype=dtype, vocabulary=vocabulary)
        .fields
    )
    assert (spec.token_ids, spec.vocabulary, spec.codec) == (
        True,
        checked,
        "ids" if checked else "bytes",
    )


def test_a_vocabulary_that_the_dtype_cannot_hold_is_refused() -> None:
    contents = {"a.bin": IDS.astype("<u2").tobytes()}
    with pytest.raises(ConfigError, match="a vocabulary of 65537 do not fit into the uint16"):
        Files(contents).index(dtype="uint16", vocabulary=65537)
    with pytest.raises(ConfigError, match=r"vocabulary .* is -1: expected `int` >= 0"):
        Files(contents).index(dtype="uint16", vocabulary=-1)
    whole = Files(contents).index(dtype="uint16")
    assert whole.digest() == Files(contents).index(dtype="uint16", vocabulary=5000).digest(), (
        "the bytes are the same"
    )
