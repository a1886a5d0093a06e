"""Tar shards.

What the WebDataset library writes is found where it lies and grouped as the library itself groups
it, and a sample that it would tear apart is refused.
"""

import contextlib
import io
import itertools
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from gyre_daemon.datasets.formats import Extents, SampleIndex
from gyre_daemon.datasets.formats.base import Arrays
from gyre_daemon.datasets.formats.webdataset import (
    WebdatasetFormat,
    WebdatasetOptions,
    plain_header,
)
from gyre_daemon.errors import CorruptSample
from gyre_daemon.storage.shard import Shard
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

folders = st.lists(
    st.text("ab.-_ é", min_size=1, max_size=4).filter(lambda t: t not in (".", "..")), max_size=2
)
stems = st.text("abcXYZ019-_ é", min_size=1, max_size=6)
keys = st.tuples(folders, stems).map(lambda parts: "/".join([*parts[0], parts[1]]))
extensions = st.sampled_from(["jpg", "png", "pyd", "bin", "JPG", "a.jpg", "seg.b", "x_y", "é"])
contents = st.binary(max_size=1500)


def scan(data: bytes, fields: tuple[str, ...] = ()) -> Arrays:
    dataset_format = WebdatasetFormat(WebdatasetOptions(fields))
    return dataset_format.inspection.run("a.tar", io.BytesIO(data))


def index_of(shards: list[bytes], fields: tuple[str, ...] = ()) -> SampleIndex:
    listed = [Shard(f"{number}.tar", len(data), "") for number, data in enumerate(shards)]
    return WebdatasetFormat(WebdatasetOptions(fields)).assemble(
        listed, [scan(data, fields) for data in shards]
    )


def stored(shards: list[bytes], index: SampleIndex) -> list[dict[str, bytes]]:
    """The samples by their extents."""
    extents: Extents = index.locate(np.arange(index.num_samples))
    return [
        {
            spec.name: shards[extents.shard[sample]][start : start + size]
            for spec, start, size in zip(
                index.fields,
                extents.start[sample].tolist(),
                extents.size[sample].tolist(),
                strict=True,
            )
        }
        for sample in range(index.num_samples)
    ]


def as_the_library_reads(data: bytes) -> list[dict[str, bytes]]:
    files = webdataset.tariterators.tar_file_iterator(io.BytesIO(data))
    samples = webdataset.tariterators.group_by_keys(dict(file, __url__="a.tar") for file in files)
    return [
        {name: value for name, value in sample.items() if not name.startswith("__")}
        for sample in samples
    ]


def tar_of(members: list[tuple[str, bytes]], tar_format: int = tarfile.PAX_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tar_format) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


@given(
    st.lists(keys, min_size=1, max_size=8, unique=True),
    st.lists(extensions, min_size=1, max_size=4, unique_by=str.lower),
    st.data(),
)
def test_sets_of_the_library_s_writer(
    names: list[str], fields: list[str], data: st.DataObject
) -> None:
    samples = [
        {"__key__": key, **{field: data.draw(contents) for field in fields}} for key in names
    ]
    stream = io.BytesIO()
    with webdataset.TarWriter(stream, encoder=False) as writer:
        for sample in samples:
            writer.write(sample)
    tar = stream.getvalue()
    index = index_of([tar])
    assert {spec.name for spec in index.fields} == {field.lower() for field in fields}
    expected = [
        {key.lower(): value for key, value in sample.items() if key != "__key__"}
        for sample in samples
    ]
    assert stored([tar], index) == as_the_library_reads(tar) == expected


@given(
    st.lists(st.tuples(keys, extensions, contents), max_size=12),
    st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT]),
)
# a key that comes again
@example([("a", "txt", b"1"), ("b", "txt", b"2"), ("a", "txt", b"3")], tarfile.PAX_FORMAT)
def test_any_members_are_grouped_as_the_library_groups_them(
    members: list[tuple[str, str, bytes]], tar_format: int
) -> None:
    tar = tar_of([(f"{key}.{extension}", data) for key, extension, data in members], tar_format)
    try:
        expected = as_the_library_reads(tar)
    except ValueError:
        expected = None
    if expected is None:
        with pytest.raises(CorruptSample, match=r"has two members|not adjacent"):
            scan(tar)
        return
    meta = None
    with contextlib.suppress(CorruptSample):
        meta = scan(tar)
    if meta is None:  # the parts of a sample lie apart
        groups = [key for key, _ in itertools.groupby(key for key, _, _ in members)]
        assert len(set(groups)) < len(groups)
        return
    assert (meta["size"] >= 0).sum(axis=1).tolist() == [len(sample) for sample in expected]
    places = [
        sorted((start, size) for start, size in zip(starts, sizes, strict=True) if size >= 0)
        for starts, sizes in zip(meta["start"].tolist(), meta["size"].tolist(), strict=True)
    ]
    found = [tar[start : start + size] for its in places for start, size in its]
    assert found == [value for sample in expected for value in sample.values()]


@given(st.lists(st.lists(contents, max_size=4), min_size=1, max_size=4))
def test_shards_follow_each_other(sizes: list[list[bytes]]) -> None:
    assume(any(sizes))
    shards = [tar_of([(f"{i}.bin", data) for i, data in enumerate(members)]) for members in sizes]
    index = index_of(shards)
    assert stored(shards, index) == [{"bin": data} for members in sizes for data in members]
    extents = index.locate(np.array([index.num_samples - 1, 0], np.int64))
    assert extents.shard.tolist() == [
        max(i for i, m in enumerate(sizes) if m),
        min(i for i, m in enumerate(sizes) if m),
    ]


def test_shards_of_the_library_s_shard_writer(tmp_path: Path) -> None:
    """With the library's own encoders, and its own reader."""
    generator = np.random.default_rng(0)
    with webdataset.ShardWriter(str(tmp_path / "%03d.tar"), maxcount=40, verbose=0) as writer:
        for number in range(100):
            writer.write(
                {
                    "__key__": f"{number:06}",
                    "txt": "text " * int(generator.integers(50)),
                    "json": {"number": number},
                    "cls": number % 7,
                    "npy": generator.random((3, 4), np.float32),
                    "bin": generator.bytes(int(generator.integers(3000))),
                }
            )
    shards = [path.read_bytes() for path in sorted(tmp_path.glob("*.tar"))]
    assert len(shards) == 3
    index = index_of(shards)
    assert [
        (spec.name, spec.codec, spec.ragged)
        for spec in sorted(index.fields, key=lambda spec: spec.name)
    ] == [
        ("bin", "bytes", True),
        ("cls", "integer", False),
        ("json", "json", True),
        ("npy", "npy", False),
        ("txt", "text", True),
    ]
    (array,) = (spec for spec in index.fields if spec.name == "npy")
    assert (array.dtype, array.shape) == (np.dtype("<f4"), (3, 4))
    assert stored(shards, index) == [
        sample for data in shards for sample in as_the_library_reads(data)
    ]


GOOD = tar_of(
    [
        (f"sample-{number}.{extension}", b"x" * 700)
        for number in range(3)
        for extension in ("txt", "bin")
    ]
)


@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=5)
)
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
def test_damage_is_noticed_or_is_in_the_data(positions: list[tuple[int, int]]) -> None:
    """Never fewer samples than there were, and never another exception."""
    data = bytearray(GOOD)
    for position, value in positions:
        data[position] = value
    try:
        found = WebdatasetFormat.inspection.run("a.tar", io.BytesIO(data))
    except CorruptSample:
        return
    has = found["size"] >= 0
    assert found["size"][has].tolist() == [700] * 6
    assert (np.diff(np.sort(found["start"][has])) > 0).all()


@given(st.integers(0, len(GOOD) - 1))
@settings(max_examples=300)
def test_truncation_is_noticed(length: int) -> None:
    # everything after the last member's last block is end mark
    end_mark = len(GOOD.rstrip(b"\0")) // 512 * 512 + 512
    try:
        found = WebdatasetFormat.inspection.run("a.tar", io.BytesIO(GOOD[:length]))
    except CorruptSample:
        assert length < end_mark + 512
        return
    assert length >= end_mark + 512
    assert found["start"].size == 6


@given(st.binary(max_size=2000))
def test_noise_is_no_archive(data: bytes) -> None:
    try:
        found = WebdatasetFormat.inspection.run("a.tar", io.BytesIO(data))
    except CorruptSample:
        return
    assert data[:512] == bytes(512)
    assert len(found["start"]) == 0


@given(
    st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=99),
    st.integers(0, 8**11 - 1),
    st.sampled_from([tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.GNUTYPE_SPARSE]),
    st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    st.lists(st.tuples(st.integers(0, 511), st.integers(0, 255)), max_size=2),
)
def test_a_plain_header_is_what_tarfile_reads(
    name: str, size: int, kind: bytes, tar_format: Any, damage: list[tuple[int, int]]
) -> None:
    """Whole or damaged; what is not plain is left to `tarfile`."""
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    header = bytearray(member.tobuf(tar_format)[-tarfile.BLOCKSIZE :])
    for place, byte in damage:
        header[place] = byte
    plain = plain_header(bytes(header))
    if plain is not None:
        read = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        assert plain == (read.name, read.size)
        assert read.type in (tarfile.REGTYPE, tarfile.AREGTYPE)
    elif not damage and kind == tarfile.REGTYPE:
        assert name.endswith("/")
