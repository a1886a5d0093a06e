from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
from gyre_client.batches.arena import Memory
from gyre_client.batches.batch import (
    BatchGroup,
    Layout,
    TensorPlace,
    objects,
    padded,
    read_cursors,
    read_layout,
    read_layouts,
    read_payload,
    texts,
)
from gyre_client.errors import DaemonFault, InvalidRequest
from gyre_protos.v1 import loader_pb2 as pb


def filled(*chunks: bytes) -> Memory:
    parts = iter([memoryview(each) for each in chunks])
    return read_payload(sum(map(len, chunks)), lambda: next(parts))


def places_of(layout: list[pb.Tensor]) -> Sequence[TensorPlace]:
    return read_layout(pb.Layout(tensors=layout), {}).places


def tensors_of(memory: Memory, layout: list[pb.Tensor]) -> dict[str, torch.Tensor]:
    return {place.name: place.view(memory) for place in places_of(layout)}


@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
        "complex64",
    ],
)
def test_tensors_have_the_dtype_shape_and_values_of_the_arrays(dtype: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(dtype)
    payload = bytes(64) + array.tobytes()
    tensors = tensors_of(
        filled(payload[:70], payload[70:]),
        [pb.Tensor(name="x", dtype=dtype, shape=[3, 4], offset_bytes=64)],
    )
    assert tensors["x"].dtype == getattr(torch, dtype)
    assert np.array_equal(tensors["x"].numpy(), array)
    (place,) = places_of([pb.Tensor(name="x", dtype=dtype, shape=[3, 4], offset_bytes=64)])
    elsewhere = torch.tensor(list(payload), dtype=torch.uint8)
    copied = place.view_on_device(elsewhere)
    assert copied.dtype == tensors["x"].dtype
    assert copied.tolist() == tensors["x"].tolist()
    assert copied.data_ptr() == elsewhere.data_ptr() + 64


def test_bfloat16_is_known_to_torch_alone() -> None:
    values = torch.tensor([[0.1, -2.5], [3e38, float("inf")]]).bfloat16()
    layout = [pb.Tensor(name="x", dtype="bfloat16", shape=[2, 2])]
    payload = values.view(torch.uint8).numpy().tobytes()
    found = tensors_of(filled(payload), layout)["x"]
    (place,) = places_of(layout)
    copied = place.view_on_device(torch.tensor(list(payload), dtype=torch.uint8))
    for each in (found, copied):
        assert each.dtype == torch.bfloat16
        assert each.tolist() == values.tolist()


def test_tensors_are_writable_aligned_and_apart() -> None:
    layout = [
        pb.Tensor(name="a", dtype="uint8", shape=[3]),
        pb.Tensor(name="b", dtype="int64", shape=[1], offset_bytes=64),
    ]
    tensors = tensors_of(filled(bytes(72)), layout)
    tensors["a"].fill_(255)
    assert tensors["b"].item() == 0
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors.values())


def test_empty_tensors_and_payloads() -> None:
    layout = [
        pb.Tensor(name="none", dtype="float32", shape=[0, 5]),
        pb.Tensor(name="scalar", dtype="float16"),
    ]
    tensors = tensors_of(filled(b"\x00\x3c"), layout)
    assert tensors["none"].shape == (0, 5)
    assert tensors["scalar"].item() == 1.0
    copied = {
        place.name: place.view_on_device(torch.tensor([0, 0x3C], dtype=torch.uint8))
        for place in places_of(layout)
    }
    assert copied["none"].shape == (0, 5)
    assert copied["scalar"].item() == 1.0
    assert len(filled()) == 0


def test_a_group_has_one_layout_for_all_batches_or_one_each() -> None:
    layouts = [pb.Layout(num_bytes=num_bytes) for num_bytes in (64, 128, 192)]
    three = pb.Cursors(own=[b"a", b"b", b"c"])
    read = partial(read_layout, widened={})
    assert [
        each.num_bytes
        for each in read_layouts(pb.BatchGroup(cursors=three, layouts=layouts[:1]), read)
    ] == [64, 64, 64]
    assert [
        each.num_bytes for each in read_layouts(pb.BatchGroup(cursors=three, layouts=layouts), read)
    ] == [64, 128, 192]
    for wrong in (layouts[:2], []):
        with pytest.raises(
            DaemonFault, match=f"the 3 batches from step 7 on come with {len(wrong)} layouts"
        ):
            read_layouts(pb.BatchGroup(first_step=7, cursors=three, layouts=wrong), read)


def test_a_group_returns_its_batches_in_order() -> None:
    memory = np.arange(100, dtype=np.uint8)
    layouts = [Layout([TensorPlace("x", np.dtype(np.uint8), (num,), 1)], num + 1) for num in (3, 2)]
    group = BatchGroup(
        7,
        read_cursors(pb.Cursors(common=b"-", num_before=1, own=[b"ab", b"c"])),
        layouts,
        memory,
        [10, 40],
    )
    assert (len(group), group.last_cursor) == (2, b"c-")
    batches = [group.batch(step) for step in range(7, group.behind)]
    assert [(batch.step, batch.cursor, batch.tensors["x"].tolist()) for batch in batches] == [
        (7, b"a-b", [11, 12, 13]),
        (8, b"c-", [41, 42]),
    ]
    assert group.batch(7).tensors["x"].data_ptr() == batches[0].tensors["x"].data_ptr()
    copied = group.batch(7, copies=True).tensors["x"]
    assert copied.tolist() == [11, 12, 13]
    assert copied.data_ptr() != batches[0].tensors["x"].data_ptr()


def test_a_chunk_that_spans_two_batches_is_refused() -> None:
    chunks = iter([memoryview(bytes(6)), memoryview(bytes(5))])
    with pytest.raises(DaemonFault, match="5 bytes came where 4 end the batch"):
        read_payload(10, lambda: next(chunks))


def ragged(*samples: bytes) -> dict[str, torch.Tensor]:
    data = torch.tensor(list(b"".join(samples)), dtype=torch.uint8)
    return {
        "x": data,
        "x.offsets": torch.tensor([0, *np.cumsum([len(sample) for sample in samples])]),
        "y": torch.zeros(2),
    }


def test_ragged_samples_are_padded_to_the_longest() -> None:
    found, mask = padded(ragged(b"one", b"", b"three"), "x", value=7)
    assert found.dtype == torch.uint8
    assert [bytes(row) for row in found.tolist()] == [b"one\7\7", b"\7" * 5, b"three"]
    assert mask.sum(1).tolist() == [3, 0, 5]
    assert (found[mask] == ragged(b"one", b"", b"three")["x"]).all()
    assert (
        padded(ragged(b"", b""), "x")[0].shape == padded(ragged(b"", b""), "x")[1].shape == (2, 0)
    )
    points = {"p": torch.ones(3, 2).bfloat16(), "p.offsets": torch.tensor([0, 1, 3])}
    padded_points, mask = padded(points, "p", value=0.5)
    assert padded_points.tolist() == [[[1, 1], [0.5, 0.5]], [[1, 1], [1, 1]]]
    assert mask.tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize("value", [-1, 256, 0.5, "0", float("nan"), float("inf")])
def test_padding_that_the_dtype_does_not_hold_is_refused(value: float) -> None:
    with pytest.raises(InvalidRequest, match=r"must be a number of torch\.uint8"):
        padded(ragged(b"one"), "x", value)
    halves = {"x": torch.ones(3).half(), "x.offsets": torch.tensor([0, 3])}
    for beyond in (10**5000, -65505.0):
        with pytest.raises(InvalidRequest, match=r"must be a number of torch\.float16"):
            padded(halves, "x", beyond)


@pytest.mark.parametrize("length", [2, 100])
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.uint16, torch.int64, torch.bfloat16, torch.bool, torch.complex128]
)
def test_short_and_long_samples_of_any_dtype_are_padded(dtype: torch.dtype, length: int) -> None:
    sizes = torch.tensor([length, 0, length + 1])
    data = (torch.arange(4 * length + 2) % 3 == 0).reshape(-1, 2).to(dtype)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    found, mask = padded({"x": data, "x.offsets": offsets}, "x", value=1)
    assert found.dtype == dtype
    assert mask.sum(1).tolist() == sizes.tolist()
    for number, row in enumerate(found):
        part = data[offsets[number] : offsets[number + 1]]
        assert row.tolist() == part.tolist() + [[1, 1]] * (length + 1 - len(part))


def test_samples_that_differ_in_several_dims_are_not_padded() -> None:
    shapes = {"x.shape": torch.tensor([[1, 3]])}
    with pytest.raises(InvalidRequest, match=r"'x' differ in several dims.* x\.shape has"):
        padded({**ragged(b"one"), **shapes}, "x")


def test_samples_of_one_length_are_returned_as_they_are() -> None:
    data = torch.arange(12).reshape(2, 3, 2)
    found, mask = padded({"x": data}, "x")
    assert found.equal(data)
    assert found.data_ptr() != data.data_ptr()
    assert mask.tolist() == [[True] * 3] * 2
    with pytest.raises(InvalidRequest, match=r"must be a number of torch\.int64"):
        padded({"x": data}, "x", 0.5)


def test_a_field_of_numbers_is_not_padded() -> None:
    with pytest.raises(InvalidRequest, match="'y' is not a field whose samples differ in length"):
        padded(ragged(b"one"), "y")


def test_ragged_bytes_as_texts_and_objects() -> None:
    assert texts(ragged(b"one", b"", "drei \u2713".encode()), "x") == ["one", "", "drei \u2713"]
    assert objects(ragged(b'{"a": [1]}', b"null"), "x") == [{"a": [1]}, None]
    for name in ("y", "z"):
        with pytest.raises(
            InvalidRequest,
            match=f"'{name}' is not a field of ragged bytes; the batch has x, x.offsets, y",
        ):
            texts(ragged(b"one"), name)
