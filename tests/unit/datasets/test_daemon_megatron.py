"""Megatron's files: windows of their ids, and their documents."""

from collections.abc import Sequence

import numpy as np
import pytest
from gyre_daemon.datasets.formats.tokens import TokensFormat, TokensOptions, check_documents
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.storage.shard import Shard

from tests.contract.formats.format_contract import inspect
from tests.token_files import IDS, Files, ids_of, megatron_idx

UINT16 = 8  # Megatron's code


@pytest.mark.parametrize(
    ("code", "dtype"), [(1, "uint8"), (3, "int16"), (4, "int32"), (5, "int64"), (8, "uint16")]
)
def test_a_megatron_file_has_the_dtype_of_its_index(code: int, dtype: str) -> None:
    ids = (IDS % 100).astype(dtype)
    itemsize = ids.itemsize
    shards = {"a.bin": ids.tobytes(), "b.bin": ids[:16].tobytes(), "c.bin": b""}
    beside = {
        "a.idx": megatron_idx([4000, 1000], itemsize, code),
        "b.idx": megatron_idx([16], itemsize, code) + bytes(1),  # with the mode of a sequence
        "c.idx": megatron_idx([], itemsize, code, [0]),
    }
    files = Files(shards | beside)
    index = files.index()
    assert index.fields[0].dtype == np.dtype(dtype)
    assert ids_of(index, shards) == [
        *ids.reshape(-1, 8).tolist(),
        *ids[:16].reshape(-1, 8).tolist(),
    ]
    assert [len(request.shard) for request in files.requests] == [3, 1, 3, 6]


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        (
            megatron_idx([4000, 999], 2, 8),
            "is not whole: it has 10000 bytes, and 9998 by the Megatron index next to it",
        ),
        (megatron_idx([5000], 2, 7), "Megatron index has version 1 and dtype float32"),
        (megatron_idx([5000], 2, 99), "dtype code 99"),
        (megatron_idx([5000], 2, 8, version=2), "version 2"),
        (megatron_idx([5000], 2, 8)[:-8], "Megatron index has 54 bytes, and 62 by its own count"),
        (megatron_idx([5000], 2, 8)[:20], "is no index of Megatron's"),
    ],
)
def test_a_megatron_index_that_does_not_fit_is_named(index: bytes, sentence: str) -> None:
    with pytest.raises(CorruptSample, match=sentence):
        Files({"a.bin": IDS.astype("<u2").tobytes(), "a.idx": index}).index()


def test_an_idx_file_of_another_kind_is_ignored() -> None:
    assert (
        Files({"a.bin": IDS.astype("<u2").tobytes(), "a.idx": b"0 4096\n"})
        .index(dtype="uint16")
        .num_samples
        == 625
    )


def test_an_old_index_is_refused_by_name() -> None:
    contents = {"a.bin": IDS.astype("<u2").tobytes(), "a.idx": b"TNTIDX\0\0" + bytes(32)}
    with pytest.raises(CorruptSample, match=r"TNTIDX.*preprocess_data\.py.*`header_bytes`"):
        Files(contents).index(dtype="uint16")
    assert Files(contents).index(dtype="uint16", header_bytes=0).num_samples == 625


def test_documents_have_the_sequences_that_the_index_says() -> None:
    ids = IDS.astype("<u2")
    lengths, documents = [5, 0, 7, 100, 3], [0, 2, 2, 4, 5]
    shards = {"a.bin": ids[:115].tobytes(), "b.bin": b"", "c.bin": ids[:9].tobytes()}
    beside = {
        "a.idx": megatron_idx(lengths, 2, UINT16, documents),
        "b.idx": megatron_idx([], 2, UINT16, [0]),
        "c.idx": megatron_idx([9], 2, UINT16, [0, 1]) + bytes(1),  # with the mode of a sequence
    }
    index = Files(shards | beside).index(samples="documents")
    (field,) = index.fields
    assert field.ragged
    assert field.token_ids
    assert field.dtype == np.dtype("<u2")
    want = [ids[:5], ids[:0], ids[5:112], ids[112:115], ids[:9]]
    assert ids_of(index, shards) == [each.tolist() for each in want]
    assert index.locate(np.arange(5)).shard.tolist() == [0, 0, 0, 0, 2]


def test_documents_need_an_index() -> None:
    with pytest.raises(ConfigError, match=r"shard a\.bin has no Megatron index"):
        Files({"a.bin": IDS.astype("<u2").tobytes()}).index(samples="documents")


@pytest.mark.parametrize(
    ("lengths", "documents", "sentence"),
    [
        ([4000, 999], [0, 1, 2], "has 10000 bytes, and 9998 by the Megatron index next to it"),
        ([-1, 5001], [0, 1, 2], "its sequences do not follow each other"),
        ([4000, 1000], [0], "does not say where its documents end; serve windows"),
        ([4000, 1000], [0, 1], "does not say where its documents end"),
        ([4000, 1000], [1, 2], "does not say where its documents end"),
        ([4000, 1000], [0, 2, 1, 2], "does not say where its documents end"),
        ([4000, 1000], [0, 3], "does not say where its documents end"),
    ],
)
def test_an_index_without_sound_documents_is_named(
    lengths: Sequence[int], documents: Sequence[int], sentence: str
) -> None:
    beside = megatron_idx(lengths, 2, UINT16, documents)
    with pytest.raises(CorruptSample, match=sentence) as caught:
        Files({"a.bin": IDS.astype("<u2").tobytes(), "a.idx": beside}).index(samples="documents")
    assert caught.value.facts["shard"] == "a.bin"


@pytest.mark.parametrize(
    ("array", "value", "sentence"),
    [
        ("dtype", np.array(["float32"]), "unknown dtype"),
        ("dtype", np.array(["uint16", "uint16"]), "dtypes are not those"),
        ("num_documents", np.array([3]), "documents are not those"),
        ("num_documents", np.array([-2]), "documents are not those"),
        ("num_documents", np.array([2.0]), "missing or of another kind"),
        ("start", np.array([0, 9]), "point outside"),
        ("start", np.array([0, -2]), "point outside"),
        ("size", np.array([10, 12]), "point outside"),
        ("size", np.array([10, 1 << 62]), "point outside"),
        ("size", np.array([11, 10]), "point outside"),
    ],
)
def test_documents_of_a_forged_sidecar_are_refused(
    array: str, value: np.ndarray[tuple[int], np.dtype[np.generic]], sentence: str
) -> None:
    shards, beside = [bytes(20)], {"000.idx": megatron_idx([5, 5], 2, UINT16, [0, 1, 2])}
    listed = [Shard("000.bin", 20, "")]
    options = TokensOptions(samples="documents")
    (found,) = inspect(TokensFormat(options), shards, listed, beside)
    check_documents(found, listed)
    with pytest.raises(ValueError, match=sentence):
        check_documents({**found, array: value}, listed)


@pytest.mark.parametrize("key", ["sequence_length", "stride", "header_bytes"])
def test_documents_have_no_windows(key: str) -> None:
    with pytest.raises(ConfigError, match="leave these out, or `samples`"):
        Files({"a.bin": b""}).index(samples="documents", **{key: 1})
