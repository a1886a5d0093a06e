"""Which fields the samples of tar shards have.

Missing ones, alternatives, optional ones, and arrays of several shapes.
"""

import io
from typing import Any

import numpy as np
import pytest
from gyre_daemon.datasets.formats import SampleIndex
from gyre_daemon.errors import ConfigError, CorruptSample

from tests.unit.datasets.test_daemon_webdataset import index_of, names, tar_of


def array(value: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.asarray(value))
    return stream.getvalue()


def contents(data: bytes, index: SampleIndex) -> list[list[bytes]]:
    """What the first shard has at the place of each field of each sample."""
    extents = index.locate(np.arange(index.num_samples))
    return [
        [data[begin : begin + size] for begin, size in zip(starts, sizes, strict=True)]
        for starts, sizes in zip(extents.start.tolist(), extents.size.tolist(), strict=True)
    ]


FIRST_LACKS = [("a.txt", b"one"), ("b.txt", b"two"), ("b.cls", b"2")]


def test_a_field_that_the_first_sample_lacks_is_not_dropped() -> None:
    with pytest.raises(
        CorruptSample,
        match=r"sample `a` has no member \.cls; name the fields .*`optional = \[\"cls\"\]`",
    ) as caught:
        index_of(tar_of(FIRST_LACKS))
    assert {name: caught.value.facts[name] for name in ("shard", "field", "key")} == {
        "shard": "0.tar",
        "field": "cls",
        "key": "a",
    }


def test_a_field_that_a_whole_shard_lacks_is_not_dropped() -> None:
    with pytest.raises(CorruptSample, match=r"shard 0\.tar .*sample `a` has no member \.json"):
        index_of(tar_of([("a.txt", b"1")]), tar_of([("b.txt", b"1"), ("b.json", b"{}")]))
    assert names(
        index_of(
            tar_of([("a.txt", b"1")]), tar_of([("b.txt", b"1"), ("b.json", b"{}")]), fields=["txt"]
        )
    ) == ["txt"]


def test_the_first_sample_that_lacks_a_field_is_named() -> None:
    members = [
        (f"{number}.{extension}", b"1") for number in range(6) for extension in ("x", "y", "z")
    ]
    for missing in ("3.y", "4.y", "5.z"):
        members.remove((missing, b"1"))
    with pytest.raises(CorruptSample, match=r"sample `3` has no member \.y;"):
        index_of(tar_of(members))
    with pytest.raises(CorruptSample, match=r"sample `5` has no member \.z;"):
        index_of(tar_of(members), fields=["z"])


def test_optional_fields_come_with_their_presence() -> None:
    data = tar_of(
        [("a.txt", b"one"), ("b.txt", b""), ("b.cls", b"2"), ("c.cls", b"3"), ("c.txt", b"three")]
    )
    index = index_of(data, optional=["cls"])
    assert names(index) == ["txt", "cls", "cls.present"]
    assert contents(data, index) == [[b"one", b""], [b"", b"2"], [b"three", b"3"]]
    extents = index.locate(np.array([2, 0, 1]))
    assert extents.absent is not None
    assert extents.absent.tolist() == [[False, False], [False, True], [False, False]]
    assert [values.tolist() for values in extents.indexed] == [[True, False, True]]
    assert index.blocks(1 << 20).num_blocks == 1


def test_an_optional_field_may_be_missing_from_all() -> None:
    index = index_of(tar_of([("a.txt", b"one")]), optional=["json", "cls"])
    assert names(index) == ["txt", "json", "cls", "json.present", "cls.present"]
    assert index.locate(np.array([0])).size.tolist() == [[3, 0, 0]]
    with pytest.raises(ConfigError, match=r"no shard has a member \.npy, so the type"):
        index_of(tar_of([("a.txt", b"one")]), optional=["npy"])


def test_alternatives_take_whichever_is_there() -> None:
    data = tar_of(
        [
            ("a.jpg", b"jpeg"),
            ("b.png", b"ping"),
            ("c.webp", b"webb"),
            ("d.png", b"second"),
            ("d.jpg", b"first"),
        ]
    )
    index = index_of(data, fields=["jpg;png;webp"])
    assert names(index) == ["jpg"]
    assert contents(data, index) == [[b"jpeg"], [b"ping"], [b"webb"], [b"first"]]
    assert names(index_of(data, fields=["image=jpg; png;webp"])) == ["image"]
    with pytest.raises(CorruptSample, match=r"sample `c` has no member \.png or \.jpg;"):
        index_of(data, fields=["png;jpg"])
    assert contents(data, index_of(data, fields=["png;jpg"], optional=["png"])) == [
        [b"jpeg"],
        [b"ping"],
        [b""],
        [b"second"],
    ]


def test_fields_that_change_are_another_dataset() -> None:
    data = tar_of([("a.jpg", b"jpeg"), ("b.png", b"ping")])
    digests = {
        index_of(data, fields=["jpg;png"]).digest(),
        index_of(data, fields=["image=jpg;png"]).digest(),
        index_of(data, fields=["jpg"], optional=["jpg"]).digest(),
        index_of(data, optional=["jpg", "png"]).digest(),
    }
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"fields": ["jpg;cls"]},
            r"field `jpg` cannot be \.jpg or \.cls: they are stored in different ways",
        ),
        ({"fields": ["txt;json"]}, "stored in different ways"),
        ({"fields": ["a;"]}, "cannot serve a field `a`"),
        ({"fields": ["=a"]}, "cannot serve a field ``"),
        ({"fields": ["a;b", "x=a", "x=b"]}, "names one twice: a, x, x"),
        ({"fields": ["mask=a"]}, "cannot serve a field `mask`"),
        ({"fields": ["a.present"]}, "cannot serve a field `a.present`"),
        (
            {"fields": ["txt"], "optional": ["text"]},
            "optional of a webdataset has `text`, .*did you mean `txt`",
        ),
        (
            {"fields": ["image=jpg;png"], "optional": ["jpg"]},
            "which is none of its fields; they are image",
        ),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        index_of(tar_of(FIRST_LACKS), **options)


@pytest.mark.parametrize("name", ["x.present", "x.shape"])
def test_names_that_the_new_tensors_have(name: str) -> None:
    data = tar_of([("a.x", b"1"), (f"a.{name}", b"22")])
    with pytest.raises(
        CorruptSample, match=r"it has members \.x\.(present|shape): .*`NAME=EXTENSION`"
    ):
        index_of(data)
    index = index_of(data, fields=["x", f"other={name}"])
    assert names(index) == ["x", "other"]
    assert contents(data, index) == [[b"1", b"22"]]


def test_arrays_of_one_shape_are_no_ragged_field() -> None:
    index = index_of(tar_of([("a.npy", array([[1.0, 2.0]])), ("b.npy", array([[3.0, 4.0]]))]))
    (spec,) = index.fields
    assert (spec.shape, spec.ragged, spec.dtype.str) == ((1, 2), False, "<f8")
    assert index.locate(np.array([0])).lengths is None


def test_arrays_that_differ_in_their_first_dim_are_rows() -> None:
    shards = [
        tar_of(
            [("a.npy", array(np.zeros((3, 2), "<f4"))), ("b.npy", array(np.zeros((0, 2), ">f4")))]
        ),
        tar_of([("c.npy", array(np.zeros((1, 2), "<f4")))]),
    ]
    index = index_of(*shards)
    (spec,) = index.fields
    assert (spec.name, spec.shape, spec.ragged, spec.dtype.str) == ("npy", (2,), True, "<f4")
    assert index.locate(np.array([2, 0, 1])).tensor_bytes.tolist() == [[8], [24], [0]]
    assert index.max_ragged_bytes(3) >= 32


def test_arrays_that_differ_in_other_dims_are_flattened() -> None:
    index = index_of(
        tar_of(
            [("a.npy", array(np.zeros((3, 2), "<i2"))), ("b.npy", array(np.zeros((3, 4), "<i2")))]
        )
    )
    spec, shape = index.fields
    assert (spec.name, spec.shape, spec.ragged, spec.dtype.str) == ("npy", (), True, "<i2")
    assert (shape.name, shape.shape, shape.dtype.str, shape.codec) == (
        "npy.shape",
        (2,),
        "<i8",
        "indexed",
    )
    extents = index.locate(np.array([1, 0]))
    assert extents.tensor_bytes.tolist() == [[24], [12]]
    assert extents.indexed[0].tolist() == [[3, 4], [3, 2]]


@pytest.mark.parametrize(
    "other", [np.zeros((3,), "<f4"), np.zeros((3, 2), "<f8"), np.zeros((), "<f4")]
)
def test_arrays_of_several_types_or_numbers_of_dims(other: Any) -> None:
    shards = [
        tar_of([("a.npy", array(np.zeros((3, 2), "<f4")))]),
        tar_of([("b.npy", array(other))]),
    ]
    with pytest.raises(
        CorruptSample,
        match=r"1\.tar.*sample `b` has as its npy an array of .* sample `a` of shard 0\.tar has",
    ):
        index_of(*shards)


@pytest.mark.parametrize(
    ("member", "sentence"),
    [
        (("b.cls", b"cat"), r"member b\.cls: b'cat' is no decimal number"),
        (("b.cls", b""), r"member b\.cls: b'' is no decimal number"),
        (("b.cls", b"1" * 65), "is no decimal number"),
        (("b.cls", str(1 << 63).encode()), "does not fit into int64"),
        (("b.npy", b"no array"), r"member b\.npy: it is no npy file"),
        (
            ("b.npy", array(np.zeros(3))[:-1]),
            r"member b\.npy has 151 bytes, its header declares an array of shape \[3\]",
        ),
        (("a.json", b"{'a': 1}"), r"member a\.json: it is no JSON document: JSON is malformed"),
        (("a.txt", b"\xff"), r"member a\.txt: 'utf-8' codec can't decode"),
    ],
)
def test_what_a_batch_would_refuse_is_refused_when_the_dataset_is_opened(
    member: tuple[str, bytes], sentence: str
) -> None:
    name, extension = member[0].split(".")
    sound = {"cls": b"1", "npy": array(np.zeros(3)), "json": b"{}", "txt": b"x"}[extension]
    members = [(f"{key}.{extension}", sound) for key in "abc" if key != name]
    data = tar_of(sorted([*members, member, *((f"{key}.ok", b"1") for key in "abc")]))
    with pytest.raises(CorruptSample, match=sentence):
        index_of(data)
    assert names(index_of(data, fields=["ok"])) == ["ok"], (
        "a field that is not served may be anything"
    )


def test_the_error_for_a_compressed_archive_under_a_plain_name_says_so() -> None:
    with pytest.raises(CorruptSample, match=r"it is compressed; call it 0\.tar\.gz"):
        index_of(b"\x1f\x8b" + bytes(1000))
