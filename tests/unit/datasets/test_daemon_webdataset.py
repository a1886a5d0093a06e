"""Bad tar shards, and what the index makes of shards that do not fit together."""

import io
import struct
import tarfile
import tracemalloc
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.formats import SampleIndex
from gyre_daemon.datasets.formats.webdataset import WebdatasetFormat
from gyre_daemon.datasets.known_formats import make_format
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.storage.shard import Shard

from tests.shard_formats import shard_format

Member = tuple[str, bytes]


def member(name: str, data: bytes = b"", **changes: Any) -> bytes:
    """Header and data of one member, some header fields changed."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in changes.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


END = bytes(1024)


def tar_of(members: Iterable[Member], tar_format: int = tarfile.PAX_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tar_format) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def base256(value: int) -> bytes:
    """A number as GNU tar writes those that octal digits cannot hold."""
    return (b"\x80" if value >= 0 else b"\xff") + (value % (1 << 88)).to_bytes(11, "big")


def with_size(header: bytes, size: bytes) -> bytes:
    """A header whose size field is anything, its checksum right."""
    changed = bytearray(header)
    changed[124:136] = size
    changed[148:156] = b" " * 8
    changed[148:156] = b"%06o\0 " % sum(changed[:512])
    return bytes(changed)


def npy(shape: str, dtype: str = "<f4", data: bytes = b"") -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def index_of(*shards: bytes, **options: Any) -> SampleIndex:
    dataset_format = shard_format("webdataset", **options)
    listed = [Shard(f"{number}.tar", len(data), "") for number, data in enumerate(shards)]
    scans = [
        WebdatasetFormat.inspection.run(shard.name, io.BytesIO(data))
        for shard, data in zip(listed, shards, strict=True)
    ]
    return dataset_format.assemble(listed, scans)


def names(index: SampleIndex) -> list[str]:
    return [spec.name for spec in index.fields]


TWO = [("a.txt", b"one"), ("a.cls", b"1"), ("b.txt", b"two"), ("b.cls", b"2")]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "no sound tar archive: empty"),
        (b"\x1f\x8b" + bytes(1000), "no sound tar archive"),
        (b"PK\x03\x04" + bytes(1000), "no sound tar archive"),
        (b"no tar at all" * 100, "no sound tar archive"),
        (tar_of(TWO)[:300], "no sound tar archive: truncated header"),
        (tar_of(TWO)[:512], "no sound tar archive"),
        (tar_of(TWO)[:600], "no sound tar archive"),
        (tar_of(TWO)[:2048], "no sound tar archive: empty header"),  # between two members
        (tar_of(TWO)[: 8 * 512], "no sound tar archive: empty header"),  # after the last one
        (tar_of(TWO)[:1024] + b"\xff" + tar_of(TWO)[1025:], "no sound tar archive: bad checksum"),
        (tar_of(TWO) + tar_of(TWO), "more after its end mark; join archives with"),
        (with_size(member("a.txt"), base256(-512)) + END, "has the size -512"),
        (with_size(member("a.txt"), base256(-(1 << 70))) + END, "has the size -"),
        (with_size(member("a.txt"), base256(1 << 62)) + END, f"has the size {1 << 62}"),
        (with_size(member("a.txt"), base256(1 << 49)) + END, f"has the size {1 << 49}"),
        (with_size(member("a.txt"), base256(1 << 40)) + END, "unexpected end of data"),
        (with_size(member("a.txt"), b"99999999999\0") + END, "no sound tar archive: "),
        (with_size(member("././@LongLink", type=b"L"), base256(-512)) + END, "has the size -512"),
        (
            with_size(member("././@LongLink", type=b"L"), b"%011o\0" % (1 << 32)) + END,
            "has the size 4294967296",
        ),
        (member("././@LongLink", b"x" * 200, type=b"L") * 2000 + END, "recursion|too deep"),
        (
            member("././@LongLink", b"x" * 200, type=b"L") + END,
            "no sound tar archive: end of file header",
        ),
        (member("pax", b"0 a=b\n", type=b"x") + member("a.txt") + END, "invalid header"),
        (
            member("pax", b"9" * 5000 + b" a=b\n", type=b"x") + member("a.txt") + END,
            "no sound tar archive",
        ),
        (
            member("pax", b"12 size=-1\n", type=b"x") + member("a.txt") + END,
            "has the size -1|invalid header",
        ),
        (
            member("pax", b"12 size=51\n", type=b"g") + member("a.txt") + END,
            "contradict each other|invalid header",  # Python 3.13 refuses the header itself
        ),
        (member("a.txt", type=b"S") + END, "is a sparse file; write the shard without --sparse"),
        (
            member("pax", b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n", type=b"x")
            + member("a.txt", b"x")
            + END,
            "no sound",
        ),
        (tar_of([*TWO, ("b.TXT", b"again")]), r"sample `b` has two members \.txt"),
        (tar_of([("a.npy", b"\x80\x04K\x01.")]), r"member a\.npy: it is no npy file"),
        (tar_of([("a.npy", npy(f"({1 << 60},)"))]), r"member a\.npy: the npy header declares"),
        (
            tar_of([("a.npy", npy("(1000000000,)", data=bytes(40)))]),
            r"a\.npy has \d+ bytes, its header declares an array of shape",
        ),
        (
            tar_of([("a.npy", npy("(10,)", data=bytes(39)))]),
            r"a\.npy has \d+ bytes, its header declares an array of shape",
        ),
        (
            tar_of([("a.npy", npy("(1,)", "|O", bytes(8)))]),
            r"member a\.npy: an npy array of '\|O' is no tensor",
        ),
    ],
    ids=range(33),
)
def test_bad_shards(data: bytes, sentence: str) -> None:
    with pytest.raises(CorruptSample, match=rf"shard 0\.tar at byte \d+: .*({sentence})") as caught:
        index_of(data)
    assert caught.value.facts["shard"] == "0.tar"
    assert caught.value.facts["offset"].isdigit()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("data", [END, bytes(10_240), tar_of([])])
def test_an_archive_without_members(data: bytes) -> None:
    assert index_of(data).num_samples == 0
    index = index_of(data, tar_of(TWO), data)
    assert index.num_samples == 2
    assert index.locate(np.array([0, 1])).shard.tolist() == [1, 1]


def test_members_that_are_no_sample_are_passed_over() -> None:
    odd = [
        member("../../etc/", type=tarfile.DIRTYPE),
        member("folder.d/", type=tarfile.DIRTYPE),
        member("folder.d/", type=b"D"),
        member("set.2026", type=b"V"),
        member("latest", type=tarfile.SYMTYPE, linkname="0001"),
        member("._c.txt", type=tarfile.LNKTYPE, linkname="a.txt"),
        member("__meta__/e.txt", type=tarfile.FIFOTYPE),
        member("__index__", b"{}"),
        member("__meta__/x.txt", b"no"),
        member("._a.txt", b"a Mac was here"),
        member("dir/._a.txt", b"a Mac was here"),
        member("README", b"no extension"),
        member("dir.d/README", b"no extension"),
        member("trailing.", b"no extension"),
    ]
    data = (
        b"".join(odd)
        + member("__x.txt", b"kept")
        + member("../up.txt", b"kept too")
        + b"".join(odd)
        + END
    )
    index = index_of(data)
    assert (index.num_samples, names(index)) == (2, ["txt"])
    extents = index.locate(np.arange(2))
    assert [
        data[start : start + size]
        for (start,), (size,) in zip(extents.start, extents.size, strict=True)
    ] == [b"kept", b"kept too"]


LINK = {"type": tarfile.LNKTYPE}
SYMLINK = {"type": tarfile.SYMTYPE}


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        (
            "c.txt",
            {**LINK, "linkname": "a.txt"},
            r"c\.txt is a hard link to a\.txt; write the shard",
        ),
        ("c.txt", {**LINK, "linkname": "./a.txt"}, r"is a hard link to \./a\.txt"),
        ("c.txt", {**SYMLINK, "linkname": "a.txt"}, r"c\.txt is a symbolic link to a\.txt; write"),
        ("c.txt", {**SYMLINK, "linkname": "c.txt"}, r"is a symbolic link to c\.txt"),
        ("d/c.txt", {**SYMLINK, "linkname": "/etc/passwd"}, "is a symbolic link to /etc/passwd"),
        ("c.txt", {**SYMLINK, "linkname": "x" * 300}, "is a symbolic link to xxx"),
        ("n" * 120 + ".txt", {**LINK, "linkname": "a.txt"}, r"nnn\.txt is a hard link to a\.txt"),
        ("c.txt", {"type": tarfile.FIFOTYPE}, r"c\.txt is a pipe, and no file; leave it out"),
        ("c.txt", {"type": tarfile.CHRTYPE}, "is a device"),
        ("c.txt", {"type": tarfile.BLKTYPE}, "is a device"),
        ("c.txt", {"type": b"M"}, "is the rest of a file that begins in another volume"),
        ("c.txt", {"type": b"Q"}, "is of the type b'Q'"),
    ],
)
@pytest.mark.parametrize("is_last", [True, False])
def test_what_is_no_file_is_not_lost(
    name: str, changes: dict[str, Any], sentence: str, is_last: bool
) -> None:
    """Whether what a link names comes before or after it."""
    files, odd = member("a.txt", b"one") + member("b.txt", b"two"), member(name, **changes)
    data = (files + odd if is_last else odd + files) + END
    with pytest.raises(
        CorruptSample, match=rf"0\.tar at byte {len(files) * is_last}: .*{sentence}"
    ):
        index_of(data)


@pytest.mark.parametrize("tar_format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_links_of_tarfile(tar_format: int) -> None:
    """With names that are so long that they lie in headers before."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tar_format) as archive:
        link = tarfile.TarInfo("d" * 150 + "/c.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "e" * 150 + "/a.txt"
        archive.addfile(link)
    with pytest.raises(CorruptSample, match=r"d/c\.txt is a symbolic link to eee"):
        index_of(stream.getvalue())


def test_members_of_a_sample_lie_together() -> None:
    """Apart, each would be half a sample, and to call a field optional would serve the halves."""
    apart = [("a.jpg", b"1"), ("b.jpg", b"2"), ("a.cls", b"3"), ("b.cls", b"4")]
    wanted = r"at byte 2560: .* \.jpg and \.cls of one sample are not adjacent, .*--sort=name"
    for options in ({}, {"optional": ["cls"]}, {"fields": ["jpg"]}):
        with pytest.raises(CorruptSample, match=wanted):
            index_of(tar_of(apart), **options)
    assert index_of(tar_of(sorted(apart))).num_samples == 2
    # one key of two samples
    assert index_of(tar_of([*TWO, TWO[0], TWO[1]])).num_samples == 3
    folders = [("images/a.jpg", b"1"), ("images/b.jpg", b"2"), ("labels/a.cls", b"3")]
    with pytest.raises(CorruptSample, match=r"`labels/a` has no member .*: every sample has one"):
        index_of(tar_of(folders))


@pytest.mark.parametrize("tar_format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names(tar_format: int) -> None:
    long = [
        ("d" * 90 + "/" + "x" * 3000 + f"{number}.{extension}", b"1")
        for number in range(2)
        for extension in ("txt", "cls")
    ]
    index = index_of(tar_of(long, tar_format))
    assert (index.num_samples, names(index)) == (2, ["txt", "cls"])


def test_names_that_are_not_utf_8() -> None:
    data = b"".join(
        member(name, b"1").replace(b"QQQ", b"\xff\xfe\xfd") for name in ("aQQQ.txt", "bQQQ.txt")
    )
    sound = (
        b"".join(
            with_size(data[i : i + 512], data[i + 124 : i + 136]) + data[i + 512 : i + 1024]
            for i in (0, 1024)
        )
        + END
    )
    assert index_of(sound).num_samples == 2
    extension = member("a.QQQ", b"1").replace(b"QQQ", b"\xff\xfe\xfd")
    sound = with_size(extension[:512], extension[124:136]) + extension[512:] + END
    assert [field.name for field in index_of(sound).fields] == [r"\udcff\udcfe\udcfd"]


def test_a_missing_field_is_named_with_its_sample() -> None:
    data = tar_of([*TWO, ("c.txt", b"three"), ("d.txt", b"four"), ("d.cls", b"4")])
    with pytest.raises(
        CorruptSample,
        match=r"sample `c` has no member \.cls; name the fields .* \(`fields`\).*`optional",
    ) as caught:
        index_of(data)
    offset = int(caught.value.facts["offset"])
    assert data[offset : offset + 5] == b"three"
    assert names(index_of(data, fields=["txt"])) == ["txt"]
    with pytest.raises(CorruptSample, match=r"0\.tar.*sample `a` has no member \.jpg"):
        index_of(data, fields=["txt", "jpg"])
    with pytest.raises(CorruptSample, match=r"1\.tar.*sample `e` has no member \.cls"):
        index_of(tar_of(TWO), tar_of([("e.txt", b"5")]))


def test_fields_come_in_the_order_asked_for() -> None:
    assert names(index_of(tar_of(TWO))) == ["txt", "cls"]
    index = index_of(tar_of(TWO), fields=["cls", "txt"])
    assert names(index) == ["cls", "txt"]
    assert index.locate(np.array([1])).size.tolist() == [[1, 3]]


@pytest.mark.parametrize("name", ["sample_id", "mask", "offsets", "txt.offsets", "a\nb"])
def test_names_that_a_batch_has_itself(name: str) -> None:
    """A field `mask` would be taken for the batch's own; `txt.offsets` for those of `txt`."""
    if name == "offsets":
        assert names(index_of(tar_of([("a.offsets", b"1")]))) == ["offsets"]
        return
    with pytest.raises(CorruptSample, match="a batch has sample_id, mask and offsets itself"):
        index_of(tar_of([("a.txt", b"1"), (f"a.{name}", b"2")]))
    with pytest.raises(ConfigError, match="cannot serve a field"):
        index_of(tar_of([("a.txt", b"1")]), fields=["txt", name])
    assert names(index_of(tar_of([("a.txt", b"1"), (f"a.{name}", b"2")]), fields=["txt"])) == [
        "txt"
    ]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"fields": ["txt", "txt"]}, "names one twice"),
        ({"fields": [""]}, "cannot serve a field ``"),
        ({"fields": "txt,,"}, "cannot serve a field ``"),
        ({"fields": 3}, "fields in dataset `set` of format webdataset is 3: expected a list"),
        (
            {"field": ["txt"]},
            r"unknown key `field` in dataset `set` of format webdataset; did you mean `fields`\?",
        ),
    ],
)
def test_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        index_of(tar_of(TWO), **options)


def test_an_unknown_format() -> None:
    with pytest.raises(
        ConfigError,
        match="dataset `set` has the unknown format `lance`; known are tokens, webdataset",
    ):
        make_format("set", DatasetConfig("/data", "lance", {}))


@pytest.mark.parametrize(
    ("column", "value"),
    [("start", -1), ("start", 1 << 40), ("size", -5), ("size", 1 << 40), ("start", (1 << 63) - 1)],
)
def test_an_index_that_points_outside_its_shard_is_refused(column: str, value: int) -> None:
    """Addresses are made of these numbers."""
    data = tar_of(TWO)
    scan = dict(WebdatasetFormat.inspection.run("0.tar", io.BytesIO(data)))
    WebdatasetFormat.inspection.check(scan, len(data))
    scan[column] = scan[column].copy()
    scan[column].flat[2] = value
    with pytest.raises(ValueError, match=r"outside the shard|a sample without members"):
        WebdatasetFormat.inspection.check(scan, len(data))


def test_a_different_order_of_members_is_another_dataset() -> None:
    one, other = tar_of(TWO), tar_of([TWO[2], TWO[3], TWO[0], TWO[1]])
    assert index_of(one).digest() == index_of(one).digest()
    assert (
        len(
            {
                index_of(one).digest(),
                index_of(other).digest(),
                index_of(one, fields=["txt"]).digest(),
            }
        )
        == 3
    )
    renamed = tar_of([("c" + name[1:] if name[0] == "b" else name, data) for name, data in TWO])
    assert index_of(renamed).digest() != index_of(one).digest()


def test_memory_does_not_grow_with_the_headers() -> None:
    """By default, tarfile keeps every header that it has seen."""
    num_members = 8_000
    block = member("000000.txt", b"x")
    header, data = block[:512], block[512:]
    blocks = []
    for number in range(num_members):
        named = b"%06d" % number + header[6:]
        blocks.append(with_size(named, header[124:136]) + data)
    shard = io.BytesIO(b"".join(blocks) + END)
    tracemalloc.start()
    scan = WebdatasetFormat.inspection.run("0.tar", shard)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(scan["start"]) == num_members
    assert peak < 200 * num_members, f"{peak / num_members:.0f} bytes a member"
