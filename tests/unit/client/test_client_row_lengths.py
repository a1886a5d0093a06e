"""Layouts of batches whose samples may be several rows."""

import pytest
from gyre_client.errors import DaemonFault
from gyre_client.messages.layouts import BatchTensors, check_fields
from gyre_protos.v1 import loader_pb2 as pb

LENGTHS = [4, 8, 32]
NUM_SAMPLES = 3
FIELDS = [
    pb.Field(name="tokens", dtype="int32", shape=[32], row_lengths=LENGTHS),
    pb.Field(name="loss_mask", dtype="bool", shape=[32], row_lengths=LENGTHS),
    pb.Field(name="document_id", dtype="int64", ragged=True, row_lengths=LENGTHS),
]


def layout(**shapes: list[int]) -> pb.Layout:
    """One tensor behind the other; by default, a batch with rows of 8."""
    known = {
        "sample_id": ("int64", 8, [NUM_SAMPLES]),
        "tokens": ("int32", 4, [12, 8]),
        "loss_mask": ("bool", 1, [12, 8]),
        "document_id": ("int64", 8, [7]),
        "document_id.offsets": ("int64", 8, [13]),
    }
    tensors, end = [], 0
    for name, (dtype, item, usual) in known.items():
        shape = shapes.get(name.replace(".", "_"), usual)
        tensors.append(pb.Tensor(name=name, dtype=dtype, shape=shape, offset_bytes=end))
        count = item
        for length in shape:
            count *= length
        end = -(-(end + count) // 64) * 64
    return pb.Layout(tensors=tensors, num_bytes=end)


@pytest.mark.parametrize("length", LENGTHS)
def test_rows_have_any_of_the_lengths_in_all_fields(length: int) -> None:
    check_fields(FIELDS)
    rows = NUM_SAMPLES * 32 // length
    BatchTensors(FIELDS, NUM_SAMPLES, has_mask=False).check(
        layout(tokens=[rows, length], loss_mask=[rows, length], document_id_offsets=[rows + 1])
    )


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ({"tokens": [6, 16]}, r"'tokens' as int32 \[6, 16\], but it is int32 \[3, 32\]"),
        ({"tokens": [3, 8]}, r"'tokens' as int32 \[3, 8\], but it is int32 \[12, 8\]"),
        ({"loss_mask": [3, 32]}, r"'loss_mask' as bool \[3, 32\], but it is bool \[12, 8\]"),
        ({"document_id_offsets": [4]}, r"'document_id.offsets' as int64 \[4\], .* \[13\]"),
        ({"sample_id": [12]}, r"'sample_id' as int64 \[12\], but it is int64 \[3\]"),
        ({"tokens": [96]}, r"'tokens' as int32 \[96\]"),
    ],
)
def test_rows_that_do_not_fit_each_other_are_a_fault_of_the_daemon(
    shapes: dict[str, list[int]], text: str
) -> None:
    tensors = BatchTensors(FIELDS, NUM_SAMPLES, has_mask=False)
    with pytest.raises(DaemonFault, match=text):
        tensors.check(layout(**shapes))


@pytest.mark.parametrize(
    "field",
    [
        pb.Field(name="x", dtype="int8", shape=[32], row_lengths=[5, 32]),
        pb.Field(name="x", dtype="int8", shape=[32], row_lengths=[0, 32]),
        pb.Field(name="x", dtype="int8", shape=[32], row_lengths=[4, 16]),
        pb.Field(name="x", dtype="int8", shape=[], row_lengths=LENGTHS),
        pb.Field(name="x", dtype="int8", shape=[2], ragged=True, row_lengths=LENGTHS),
        pb.Field(name="x", dtype="int8", shape=[32], row_lengths=[8, 32]),
    ],
)
def test_lengths_into_which_no_sample_can_be_cut_are_a_fault(field: pb.Field) -> None:
    with pytest.raises(DaemonFault, match=r"has rows of \[.*\] tokens, into which its samples"):
        check_fields([*FIELDS, field])
