"""MDS of random schemas and TFRecord of random records equal what their own readers say."""

import json
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_daemon.datasets.codecs import CODECS
from gyre_daemon.datasets.formats import SampleIndex
from gyre_daemon.datasets.formats.base import FieldSpec
from gyre_daemon.datasets.formats.chunk_index import chunks_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.compat.tensorflow_stub.errors import OutOfRangeError
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

from benchmarks.loader.mosaic import streaming
from tests.contract.formats.chunk_contract import decode_all
from tests.contract.formats.compressed_shards import compressed
from tests.contract.formats.format_contract import inspect, listed
from tests.contract.formats.test_more_formats import tfrecord
from tests.shard_formats import shard_format

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = ["float16", "float32", "float64"]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
NAMES = st.text("abAZ.ö", min_size=1, max_size=3)
SHAPES = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)
OTHERS: Mapping[str, st.SearchStrategy[Any]] = {
    "int": st.integers(-(1 << 63), (1 << 63) - 1),
    "str_int": st.integers(-(1 << 63), (1 << 63) - 1),
    "str_float": st.floats(allow_nan=False, allow_infinity=False),
    "str_decimal": st.decimals(allow_nan=False, allow_infinity=False, places=3),
    "str": TEXTS,
    "bytes": st.binary(max_size=9),
    "json": st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), TEXTS),
        lambda each: st.one_of(st.lists(each), st.dictionaries(TEXTS, each)),
        max_leaves=4,
    ),
}


def number(dtype: str) -> st.SearchStrategy[Any]:
    """Any value of it, as numpy's scalar."""
    kind = np.dtype(dtype)
    if kind.kind == "f":
        width: Any = 8 * kind.itemsize
        return st.floats(width=width, allow_nan=False).map(kind.type)
    limits = np.iinfo(kind)
    return st.integers(int(limits.min), int(limits.max)).map(kind.type)


@st.composite
def columns(draw: st.DrawFn, encoding: str) -> tuple[str, st.SearchStrategy[Any]]:
    """An encoding, with its parameters, and its values."""
    if encoding in OTHERS:
        return encoding, OTHERS[encoding]
    if encoding != "ndarray":
        return encoding, number(encoding)
    dtype, shape = draw(st.sampled_from(INTEGERS + FLOATS)), draw(SHAPES)
    size = int(np.prod(shape))
    arrays = st.lists(number(dtype), min_size=size, max_size=size).map(
        lambda values: np.array(values, dtype).reshape(shape)
    )
    return f"ndarray:{dtype}:{','.join(map(str, shape))}", arrays


@st.composite
def tables(draw: st.DrawFn) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Encodings by the names of columns, and rows."""
    names = draw(st.lists(NAMES, min_size=3, max_size=9, unique=True))
    chosen = draw(st.permutations([*OTHERS, *INTEGERS, *FLOATS, "ndarray"]))
    drawn = {name: draw(columns(each)) for name, each in zip(names, chosen, strict=False)}
    row = st.fixed_dictionaries({name: values for name, (_, values) in drawn.items()})
    encodings = {name: encoding for name, (encoding, _) in drawn.items()}
    return encodings, draw(st.lists(row, min_size=1, max_size=5))


def values_of(index: SampleIndex, contents: Sequence[bytes]) -> list[dict[str, bytes]]:
    """Every sample, as the codecs of its fields make it."""
    extents, samples = index.locate(np.arange(index.num_samples)), []
    for row in range(index.num_samples):
        data, sample = contents[extents.shard[row]], {}
        for place, spec in enumerate(index.fields):
            start, size = int(extents.start[row, place]), int(extents.size[row, place])
            sample[spec.name] = _finished(spec, data[start : start + size])
        samples.append(sample)
    return samples


def _finished(spec: FieldSpec, stored: bytes) -> bytes:
    codec = CODECS[spec.codec]
    if codec.scratch_bytes is None:
        if codec.finish:
            codec.finish(spec, memoryview(b""), memoryview(bytearray(stored)))
        return stored
    target = bytearray(int(np.prod(spec.shape, dtype=int)) * spec.dtype.itemsize)
    assert codec.finish
    codec.finish(spec, memoryview(bytearray(stored)), memoryview(target))
    return bytes(target)


def same(spec: FieldSpec, found: bytes, wanted: Any) -> bool:
    """Whether bytes of a field are the value of the library's reader."""
    if spec.codec == "json":
        return bool(json.loads(found) == wanted)
    if spec.ragged:
        return found == (wanted if isinstance(wanted, bytes) else str(wanted).encode())
    return found == np.asarray(wanted, spec.dtype).tobytes() and np.shape(wanted) == spec.shape


@settings(max_examples=40)
@given(table=tables(), is_compressed=st.booleans())
def test_samples_of_any_mds_schema_are_those_of_the_library(
    table: tuple[dict[str, str], list[dict[str, Any]]], *, is_compressed: bool
) -> None:
    encodings, rows = table
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(),
        pytest.MonkeyPatch.context() as patch,
    ):
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves its index open
        poll = "streaming.base.format.base.writer.sleep"  # a second each time
        patch.setattr(poll, lambda _: time.sleep(0.001))
        with streaming.MDSWriter(out=f"{folder}/set", columns=encodings, size_limit=200) as writer:
            for row in rows:
                writer.write(row)
        reader = streaming.LocalDataset(f"{folder}/set")
        wanted = [reader[number] for number in range(len(reader))]
        shards = [path.read_bytes() for path in sorted(Path(folder, "set").glob("*.mds"))]
    shards = [compressed(shard) for shard in shards] if is_compressed else shards
    form = shard_format("mds")
    index = form.assemble(listed(shards), inspect(form, shards))
    found = values_of(index, decode_all(shards, index) if chunks_of(index) else shards)
    assert (chunks_of(index) is not None) == is_compressed
    assert [spec.name for spec in index.fields] == sorted(encodings)
    assert len(found) == len(wanted) == len(rows)
    for sample, expected in zip(found, wanted, strict=True):
        for spec in index.fields:
            assert same(spec, sample[spec.name], expected[spec.name]), spec


@given(st.lists(st.lists(st.binary(max_size=40), max_size=5), min_size=1, max_size=3))
def test_any_records_are_those_of_tensorflows_reader(records: list[list[bytes]]) -> None:
    shards, wanted = [tfrecord(its) for its in records], []
    for shard in shards:
        with tempfile.NamedTemporaryFile() as file:
            file.write(shard)
            file.flush()
            wanted += records_of(file.name)
    form = shard_format("tfrecord")
    index = form.assemble(listed(shards), inspect(form, shards))
    assert [sample["record"] for sample in values_of(index, shards)] == wanted
    assert wanted == [record for its in records for record in its]


def records_of(path: str) -> list[bytes]:
    """What the reader that TensorBoard has of TensorFlow's records says."""
    reader, found = PyRecordReader_New(path), list[bytes]()
    while True:
        try:
            reader.GetNext()
        except OutOfRangeError:
            return found
        found.append(reader.record())
