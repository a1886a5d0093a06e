"""Slices of context-parallel ranks: every field, both cuts, compared with whole sequences."""

import itertools
from typing import Any

import pytest
import torch
from gyre_client.errors import InvalidRequest
from gyre_client.loader.ranks import Ranks, SequenceCut, cut_of
from gyre_protos.v1 import loader_pb2 as pb
from torch import Tensor

L = 24
# The documents of two rows: 9 tokens, 7, and 8 of padding; 23 tokens, and 1. Document 6 is cut.
LENGTHS = [[9, 7, 8], [23, 1]]
DOCUMENT_ID = torch.tensor([4, 2, 6, 6])
PER_TOKEN = ("tokens", "position", "loss_mask", "document_id", "labels")


def description() -> pb.DatasetDescription:
    return pb.DatasetDescription(
        packing=pb.Packing(field="tokens", length=L),
        fields=[
            pb.Field(name="tokens", dtype="int32", shape=[L], token_ids=True),
            pb.Field(name="position", dtype="int32", shape=[L]),
            pb.Field(name="loss_mask", dtype="bool", shape=[L]),
            pb.Field(name="document_id", dtype="int64", ragged=True),
            pb.Field(name="cu_seqlens", dtype="int32", ragged=True),
            pb.Field(name="source", dtype="int64"),
        ],
    )


def packed_batch() -> dict[str, Tensor]:
    position = torch.cat([torch.arange(each) for each in itertools.chain(*LENGTHS)]).view(2, L)
    loss_mask = position > 0
    loss_mask[0, 16:] = False
    loss_mask[1, 5] = False  # of the documents' own mask
    return {
        "sample_id": torch.tensor([3, 1]),
        "tokens": torch.arange(100, 100 + 2 * L, dtype=torch.int32).view(2, L),
        "position": position.int(),
        "loss_mask": loss_mask,
        "document_id": DOCUMENT_ID,
        "document_id.offsets": torch.tensor([0, 2, 4]),
        "cu_seqlens": torch.tensor([0, 9, 16, 24, 47, 48], dtype=torch.int32),
        "cu_seqlens.offsets": torch.tensor([0, 3, 6]),
        "source": torch.tensor([0, 1]),
    }


def whole_batch() -> dict[str, Tensor]:
    """What slices must be slices of, made of single tokens."""
    batch = packed_batch()
    targets = torch.where(batch["loss_mask"], batch["tokens"].long(), -100)
    batch["labels"] = torch.cat((targets[:, 1:], torch.full((2, 1), -100)), dim=1)
    batch["document_id"] = torch.tensor([[4] * 9 + [2] * 7 + [-1] * 8, [6] * 24])
    return batch


def slices(cut: str, size: int) -> list[dict[str, Tensor]]:
    return [SequenceCut(description(), rank, size, cut)(packed_batch()) for rank in range(size)]


def joined(parts: list[Tensor], cut: str) -> Tensor:
    if cut == "contiguous":
        return torch.cat(parts, dim=1)
    halves = [each.chunk(2, dim=1) for each in parts]
    return torch.cat([*(a for a, _ in halves), *(b for _, b in reversed(halves))], dim=1)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("cut", ["contiguous", "zigzag"])
def test_slices_put_together_are_the_whole_sequences(cut: str, size: int) -> None:
    found, whole = slices(cut, size), whole_batch()
    for name in PER_TOKEN:
        assert torch.equal(joined([each[name] for each in found], cut), whole[name]), name
        assert {each[name].shape for each in found} == {(2, L // size)}
    for each in found:
        assert each["labels"].dtype == each["document_id"].dtype == torch.int64
        assert torch.equal(each["sample_id"], whole["sample_id"])
        assert torch.equal(each["source"], whole["source"])
        assert "document_id.offsets" not in each


def test_the_last_label_of_a_slice_is_the_first_token_of_the_next() -> None:
    first, second = slices("contiguous", 2)
    assert first["labels"][1, -1] == second["tokens"][1, 0]


def test_bounds_of_contiguous_slices_are_those_of_the_slices() -> None:
    first, second = slices("contiguous", 2)
    assert first["cu_seqlens"].tolist() == [0, 9, 12, 24]
    assert first["cu_seqlens.offsets"].tolist() == [0, 2, 4]
    assert second["cu_seqlens"].tolist() == [0, 4, 12, 23, 24]
    assert second["cu_seqlens.offsets"].tolist() == [0, 2, 5]
    assert first["cu_seqlens"].dtype == torch.int32


@pytest.mark.parametrize("size", [1, 3])
def test_bounds_of_zigzag_slices_are_those_of_the_whole_sequences(size: int) -> None:
    for each in slices("zigzag", size):
        for name in ("cu_seqlens", "cu_seqlens.offsets"):
            assert torch.equal(each[name], packed_batch()[name])


def test_one_contiguous_slice_is_the_batch() -> None:
    (only,) = slices("contiguous", 1)
    for name in ("cu_seqlens", "cu_seqlens.offsets"):
        assert torch.equal(only[name], packed_batch()[name])


def test_contiguous_slices_are_views_and_zigzag_ones_are_not() -> None:
    batch = packed_batch()
    begin = batch["tokens"].data_ptr()
    views = SequenceCut(description(), 1, 3, "contiguous")(batch)
    assert views["tokens"].data_ptr() == begin + 8 * 4
    assert views["tokens"].untyped_storage().data_ptr() == begin
    copy = SequenceCut(description(), 1, 3, "zigzag")(batch)
    assert copy["tokens"].untyped_storage().nbytes() == 2 * L // 3 * 4


def test_windows_of_tokens_need_no_packing() -> None:
    fields = [
        pb.Field(name="ids", dtype="uint16", shape=[8], token_ids=True),
        pb.Field(name="teacher", dtype="float32", shape=[8]),
        pb.Field(name="pixels", dtype="uint8", shape=[8, 8]),
    ]
    ids = torch.arange(65_520, 65_536).view(2, 8).to(torch.uint16)
    batch = {
        "ids": ids,
        "teacher": torch.ones(2, 8),
        "pixels": torch.zeros(2, 8, 8),
        "mask": torch.tensor([True, False]),
    }
    found = SequenceCut(pb.DatasetDescription(fields=fields), 1, 2, "contiguous")(batch)
    assert found["ids"].tolist() == [each[4:] for each in ids.tolist()]
    assert found["labels"].tolist() == [[65_525, 65_526, 65_527, -100], [-100] * 4]
    assert found["teacher"].shape == (2, 4)
    assert found["pixels"].shape == (2, 8, 8), "it is not one value per token"


@pytest.mark.parametrize(
    ("changed", "size", "cut", "complaint"),
    [
        ({}, 5, "contiguous", "24 tokens do not divide into 5 chunks"),
        ({}, 8, "zigzag", r"24 tokens do not divide into 16 chunks \(8 ranks, cp_cut='zigzag'\)"),
        ({}, 2, "ring", "cp_cut"),
        ({"ragged": True, "shape": []}, 2, "contiguous", "no sequences of one length"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    changed: dict[str, Any], size: int, cut: str, complaint: str
) -> None:
    its = description()
    for key, value in changed.items():
        if isinstance(value, list):
            del getattr(its.fields[0], key)[:]
            getattr(its.fields[0], key).extend(value)
        else:
            setattr(its.fields[0], key, value)
    with pytest.raises(InvalidRequest, match=complaint):
        SequenceCut(its, 0, size, cut)


def test_fields_that_do_not_fit_are_refused() -> None:
    pictures = pb.DatasetDescription(fields=[pb.Field(name="jpg", dtype="uint8", ragged=True)])
    with pytest.raises(InvalidRequest, match=r"one field of token ids \(got jpg\)"):
        SequenceCut(pictures, 0, 2, "contiguous")
    its = description()
    its.fields.add(name="labels", dtype="int64", shape=[L])
    with pytest.raises(InvalidRequest, match="has a field 'labels'"):
        SequenceCut(its, 0, 2, "contiguous")


def test_a_cut_needs_slices() -> None:
    assert cut_of(description(), Ranks(0, 1), "contiguous") is None
    with pytest.raises(InvalidRequest, match="Pass cp_dim"):
        cut_of(description(), Ranks(0, 1), "zigzag")
