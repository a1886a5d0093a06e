"""Lists whose numbers are cast: of ranges of a file, and of chunks."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from gyre_daemon.datasets.codecs import check_field, chosen_fields
from gyre_daemon.datasets.filters import apply_filter
from gyre_daemon.datasets.formats import FieldSpec, SampleIndex
from gyre_daemon.datasets.formats.chunk_index import chunks_of
from gyre_daemon.datasets.formats.concat import with_fields
from gyre_daemon.errors import ConfigError

from tests.contract.formats.chunk_contract import decode_all
from tests.contract.formats.format_contract import inspect, listed
from tests.contract.formats.test_arrow import stored
from tests.shard_formats import shard_format

LISTS = [list(range(number % 4)) for number in range(20)]


def shards_of(name: str) -> list[bytes]:
    parts = (LISTS[:12], LISTS[12:])
    if name == "arrow":
        return [stored(pa.table({"a": range(len(its)), "ids": its}), 5) for its in parts]
    lines = [[json.dumps({"a": 1, "ids": ids}) + "\n" for ids in its] for its in parts]
    return ["".join(its).encode() for its in lines]


def cast(
    name: str, shards: Sequence[bytes], casts: dict[str, str], **options: Any
) -> tuple[SampleIndex, Sequence[FieldSpec]]:
    form = shard_format(name, columns=["ids", "a"], **options)
    index = form.assemble(listed(shards), inspect(form, shards))
    fields = chosen_fields(index.fields, {}, casts)
    return with_fields(index, fields), fields


def lists(
    index: SampleIndex, field: FieldSpec, shards: Sequence[bytes], ids: Sequence[int]
) -> list[list[Any]]:
    """The first field of samples, as it is served."""
    found = []
    data = decode_all(shards, index) if chunks_of(index) else shards
    extents = index.locate(np.array(ids))
    places = zip(extents.shard, extents.start[:, 0], extents.size[:, 0], strict=True)
    for place, (shard, start, size) in enumerate(places):
        spec = field.form(0 if extents.schema is None else int(extents.schema[place]))
        raw = memoryview(data[shard])[start : start + size]
        made = check_field(spec, raw, int(extents.tensor_bytes[place, 0]))
        found.append(np.frombuffer(made, field.dtype).tolist())
    return found


@pytest.mark.parametrize("name", ["arrow", "jsonl"])
@pytest.mark.parametrize("dtype", ["int8", "uint32", "float16", "float64"])
def test_lists_are_cast(name: str, dtype: str) -> None:
    shards = shards_of(name)
    index, (field, _) = cast(name, shards, {"ids": dtype})
    assert field.dtype == dtype
    assert index.fields[0] is field
    assert lists(index, field, shards, range(20)) == LISTS
    assert index.max_ragged_bytes(20) >= sum(map(len, LISTS)) * field.dtype.itemsize
    few, kept = apply_filter(index, index.fields, "length(ids) == 3")
    assert kept.tolist() == [number for number in range(20) if number % 4 == 3]
    assert lists(few, field, shards, range(5)) == [[0, 1, 2]] * 5


@pytest.mark.parametrize("name", ["arrow", "jsonl"])
def test_the_index_stays_itself_where_no_list_is_cast(name: str) -> None:
    form = shard_format(name, columns=["ids", "a"])
    index = form.assemble(listed(shards_of(name)), inspect(form, shards_of(name)))
    assert with_fields(index, chosen_fields(index.fields, {}, {"a": "int8"})) is index


@pytest.mark.parametrize("name", ["arrow", "jsonl"])
def test_a_number_that_does_not_fit_is_refused(name: str) -> None:
    shards = shards_of(name)
    index, (field, _) = cast(name, shards, {"ids": "uint8"})
    assert lists(index, field, shards, [3]) == [[0, 1, 2]]
    wide = [shard.replace(b"[0, 1, 2]", b"[0, 1, 256]") for shard in shards]
    if name == "arrow":
        wide = [stored(pa.table({"a": [1], "ids": [[256]]}), 1)]
    index, (field, _) = cast(name, wide, {"ids": "uint8"})
    with pytest.raises(ValueError, match="256 does not fit into uint8"):
        lists(index, field, wide, range(index.num_samples))


@pytest.mark.parametrize("name", ["arrow", "jsonl"])
def test_the_default_of_a_union_is_cast_too(name: str) -> None:
    lacks = stored(pa.table({"a": [7]}), 1) if name == "arrow" else b'{"a": 7}\n'
    shards = [shards_of(name)[0], lacks]
    index, (field, *_) = cast(
        name, shards, {"ids": "int16"}, schema="union", defaults={"ids": [5, 6]}
    )
    assert lists(index, field, shards, [3, 12]) == [[0, 1, 2], [5, 6]]


def test_bytes_are_no_list_of_numbers() -> None:
    shards = [stored(pa.table({"a": [1], "ids": pa.array([[1]], pa.list_(pa.uint8()))}), 1)]
    with pytest.raises(ConfigError, match="lists of numbers"):
        cast("arrow", shards, {"ids": "int64"})
