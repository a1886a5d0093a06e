"""The layout of a batch.

Everything aligned, nothing overlapping, nothing left over, and never larger than was reserved.
"""

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from gyre_daemon.datasets.formats import FieldSpec, SampleIndex
from gyre_daemon.datasets.formats.base import Arrays
from gyre_daemon.datasets.formats.webdataset import WebdatasetFormat, WebdatasetOptions
from gyre_daemon.fetching.layout import (
    ALIGNMENT_BYTES,
    BatchLayout,
    LayoutMaker,
    max_batch_bytes,
    write_own_tensors,
)
from gyre_daemon.order.planner import BatchPlanner, Order, Tail
from gyre_daemon.order.steps import BatchPlan, GroupPlan, Stage
from gyre_daemon.storage.shard import Shard
from hypothesis import given
from hypothesis import strategies as st

from tests.shard_formats import shard_format

fixed = st.builds(
    FieldSpec,
    st.just(""),
    st.sampled_from(["<i8", "<f4", "<u2", "|u1", "|b1"]).map(np.dtype),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.just(False),
    st.just("bytes"),
)
ragged = st.just(FieldSpec("", np.dtype("u1"), (), ragged=True, codec="bytes"))


@st.composite
def groups(draw: st.DrawFn) -> tuple[GroupPlan, list[FieldSpec], npt.NDArray[np.int64]]:
    """Samples of several batches, and the sizes of their fields."""
    specs = draw(st.lists(fixed | ragged, min_size=1, max_size=4))
    fields = [
        FieldSpec(f"field{n}", spec.dtype, spec.shape, spec.ragged, spec.codec)
        for n, spec in enumerate(specs)
    ]
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    num = shape[0] * shape[1]
    ids = np.array(draw(st.lists(st.integers(0, 2**62), min_size=num, max_size=num)), np.int64)
    mask = (
        np.array(draw(st.lists(st.booleans(), min_size=num, max_size=num)))
        if draw(st.booleans())
        else None
    )
    rows = [
        [draw(st.integers(0, 200)) if spec.ragged else sample_bytes(spec) for spec in fields]
        for _ in range(num)
    ]
    epochs = np.zeros(shape[0], np.int64)
    plan = GroupPlan(3, ids.reshape(shape), None if mask is None else mask.reshape(shape), epochs)
    return plan, fields, np.array(rows, np.int64).reshape(num, len(fields))


def sample_bytes(spec: FieldSpec) -> int:
    return int(np.prod(spec.shape, dtype=np.int64)) * spec.dtype.itemsize


def check_layout(
    layout: BatchLayout, fields: Sequence[FieldSpec], sizes: npt.NDArray[np.int64]
) -> None:
    """Tensors and gaps cover the buffer exactly once.

    Every sample's part lies in its tensor, right after the one before.
    """
    pieces = [
        (spec.offset_bytes, spec.offset_bytes + spec.num_bytes)
        for spec in layout.tensors
        if spec.num_bytes
    ]
    edges = sorted([*pieces, *layout.gaps])
    assert [begin for begin, _ in edges] == [0, *(end for _, end in edges[:-1])]
    assert edges[-1][1] == layout.num_bytes
    assert layout.num_bytes % ALIGNMENT_BYTES == 0
    assert all(spec.offset_bytes % ALIGNMENT_BYTES == 0 for spec in layout.tensors)
    named = {spec.name: spec for spec in layout.tensors}
    assert len(named) == len(layout.tensors)
    for column, spec in enumerate(fields):
        tensor, places = named[spec.name], layout.destinations[:, column]
        assert (places[:, 1] - places[:, 0]).tolist() == sizes[:, column].tolist()
        assert places[0, 0] == tensor.offset_bytes
        assert places[1:, 0].tolist() == places[:-1, 1].tolist()
        assert places[-1, 1] == tensor.offset_bytes + tensor.num_bytes
        assert tensor.dtype == spec.dtype
        assert tensor.shape == (
            (sizes[:, column].sum(),) if spec.ragged else (len(sizes), *spec.shape)
        )


@given(groups())
def test_layout_and_own_tensors(
    group: tuple[GroupPlan, list[FieldSpec], npt.NDArray[np.int64]],
) -> None:
    plan, fields, sizes = group
    layout = LayoutMaker(fields).make(plan, sizes)
    memory = np.full(layout.num_bytes + 100, 0xA5, np.uint8)
    write_own_tensors(plan, layout, memory.data)
    end = 0
    for batch, one, offset, its in zip(
        plan, layout.batches, layout.offsets.tolist(), by_batch(plan, sizes), strict=True
    ):
        assert offset % 4096 == 0
        assert (memory[end:offset] == 0xA5).all(), "nothing is written between batches"
        end = offset + one.num_bytes
        check_layout(one, fields, its)
        check_own_tensors(batch, one, fields, its, memory[offset:end])
    assert end == layout.num_bytes
    assert (memory[end:] == 0xA5).all(), "nothing is written beyond the batch group"


def check_own_tensors(
    batch: BatchPlan,
    layout: BatchLayout,
    fields: Sequence[FieldSpec],
    sizes: npt.NDArray[np.int64],
    payload: npt.NDArray[np.uint8],
) -> None:
    tensors = {
        spec.name: payload[spec.offset_bytes : spec.offset_bytes + spec.num_bytes]
        .view(spec.dtype)
        .reshape(spec.shape)
        for spec in layout.tensors
    }
    assert tensors["sample_id"].tolist() == batch.sample_ids.tolist()
    assert ("mask" in tensors) == (batch.mask is not None)
    if batch.mask is not None:
        assert tensors["mask"].tolist() == batch.mask.tolist()
    for column, spec in enumerate(fields):
        if spec.ragged:
            assert tensors[f"{spec.name}.offsets"].tolist() == [
                0,
                *np.cumsum(sizes[:, column]).tolist(),
            ]
        assert (tensors[spec.name].view(np.uint8) == 0xA5).all(), (
            "the samples' own places are left to the samples"
        )
    for begin, end in layout.gaps:
        assert not payload[begin:end].any(), "gaps are zeroed"


@given(groups(), st.data())
def test_destinations_and_parts_are_those_of_the_batches(
    group: tuple[GroupPlan, list[FieldSpec], npt.NDArray[np.int64]], data: st.DataObject
) -> None:
    plan, fields, sizes = group
    layout = LayoutMaker(fields).make(plan, sizes)
    apart = [
        batch.destinations + offset
        for batch, offset in zip(layout.batches, layout.offsets, strict=True)
    ]
    assert layout.destinations.tolist() == np.concatenate(apart).tolist()
    begin = data.draw(st.integers(0, len(plan) - 1))
    end = data.draw(st.integers(begin + 1, len(plan)))
    part = layout.part(begin, end)
    assert part.destinations.tolist() == np.concatenate(apart[begin:end]).tolist(), (
        "they stay where they are"
    )
    assert part.num_bytes == part.offsets[-1] + part.batches[-1].num_bytes
    assert [batch.step for batch in plan[begin:end]] == list(range(3 + begin, 3 + end))
    assert (plan[:begin] + plan[begin:]).sample_ids.tolist() == plan.sample_ids.tolist()


@pytest.mark.parametrize("num_batches", [1, 3])
def test_samples_without_stored_fields_have_no_destinations(num_batches: int) -> None:
    """As those of an Arrow file that has only truth values, which the index keeps."""
    ids = np.arange(2 * num_batches).reshape(num_batches, 2)
    plan = GroupPlan(0, ids, None, np.zeros(num_batches, np.int64))
    layout = LayoutMaker([]).make(plan, np.empty((ids.size, 0), np.int64))
    assert layout.destinations.shape == (ids.size, 0, 2)


@given(groups())
def test_layouts_are_not_mixed_up(
    group: tuple[GroupPlan, list[FieldSpec], npt.NDArray[np.int64]],
) -> None:
    """A maker that has laid out other batches lays out as a fresh one does."""
    plan, fields, sizes = group
    masked = replace(plan, mask=np.ones(plan.sample_ids.shape, bool) if plan.mask is None else None)
    longer = replace(plan, sample_ids=np.tile(plan.sample_ids, (1, 2)), mask=None)
    more = replace(plan, sample_ids=np.tile(plan.sample_ids, (2, 1)), mask=None)
    maker = LayoutMaker(fields)
    maker.make(masked, sizes)
    maker.make(longer, np.tile(sizes, (2, 1)))
    maker.make(more, np.tile(sizes, (2, 1)))
    again, fresh = maker.make(plan, sizes), LayoutMaker(fields).make(plan, sizes)
    assert (again.num_bytes, again.offsets.tolist()) == (fresh.num_bytes, fresh.offsets.tolist())
    for one, other in zip(again.batches, fresh.batches, strict=True):
        assert (one.tensors, one.gaps, one.num_bytes) == (
            other.tensors,
            other.gaps,
            other.num_bytes,
        )
        assert one.destinations.tolist() == other.destinations.tolist()


def by_batch(plan: GroupPlan, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return sizes.reshape(*plan.sample_ids.shape, sizes.shape[1])


def ragged_index(sizes: list[list[int]]) -> SampleIndex:
    """A webdataset index of one shard with samples of these sizes.

    Two fields `a` and `b`, and a number.
    """
    table = np.array([[*row, 1] for row in sizes], np.int64)
    num_samples = len(table)
    meta = {
        "extensions": ["a", "b", "cls"],
        "npy": {},
        "names": "",
        "kinds": [[[0, 1, 2], 0, 0, "a"]],
        "arrays": {},
        "unsound": {},
    }
    scan: Arrays = {
        "meta": np.frombuffer(json.dumps(meta).encode(), np.uint8),
        "start": np.zeros((num_samples, 3), np.int64),
        "size": table,
        "shape": np.zeros((num_samples, 0), np.int64),
    }
    return WebdatasetFormat(WebdatasetOptions()).assemble([Shard("0.tar", 1 << 30, "")], [scan])


@given(
    st.lists(st.lists(st.integers(0, 300_000), min_size=2, max_size=2), min_size=1, max_size=12),
    st.integers(1, 40),
    st.sampled_from(["wrap", "drop", "pad"]),
    st.integers(0, 1000),
    st.data(),
)
def test_no_batch_is_larger_than_its_bound(
    rows: list[list[int]], size: int, tail: Tail, seed: int, data: st.DataObject
) -> None:
    if tail == "drop" and size > len(rows):
        return
    index = ragged_index(rows)
    world_size = data.draw(
        st.sampled_from([divisor for divisor in range(1, size + 1) if size % divisor == 0])
    )
    least = size if tail == "drop" else 1
    first = data.draw(st.integers(least, len(rows)))
    stages = [Stage(0, first), Stage(2, len(rows))][: 1 + (first < len(rows))]
    plan = BatchPlanner(Order("full", tail, seed, size), index.num_samples, stages=stages)
    bound = max_batch_bytes(index, size // world_size, least_epoch=first)
    maker = LayoutMaker(index.fields)
    for step in range(6):
        for rank in range(world_size):
            batch = plan.batches(step, 1, rank, world_size)
            sizes = index.locate(batch.sample_ids.reshape(-1)).size
            (layout,) = maker.make(batch, sizes).batches
            assert layout.num_bytes <= bound
            stored = np.where([spec.ragged for spec in index.fields], sizes, 8)
            check_layout(layout, index.fields, stored)


@given(st.integers(1, 200), st.integers(1, 50), st.sampled_from(["wrap", "pad"]))
def test_the_bound_of_fixed_sizes_is_close(length: int, size: int, tail: Tail) -> None:
    shard = Shard("0.bin", 1000 * length * 2, "")
    index = shard_format("tokens", dtype="uint16", sequence_length=length).assemble([shard], [])
    batch = BatchPlanner(Order("full", tail, 0, size), 1000).batches(0, 1, 0, 1)
    (layout,) = (
        LayoutMaker(index.fields)
        .make(batch, index.locate(batch.sample_ids.reshape(-1)).size)
        .batches
    )
    bound = max_batch_bytes(index, size)
    assert layout.num_bytes <= bound <= layout.num_bytes + 6 * ALIGNMENT_BYTES + size


def test_the_bound_of_one_long_sample_does_not_multiply() -> None:
    """One sample of a megabyte among short ones.

    A batch holds it once an epoch, and no bound may count it for every place.
    """
    index = ragged_index([[1 << 20, 0]] + [[10, 10]] * 999)
    assert max_batch_bytes(index, 100) < 3 << 20
