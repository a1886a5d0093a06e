"""Which tensors are widened, and that nothing of what they came in is kept."""

import pytest
import torch
from gyre_client.batches.batch import widen, widened
from gyre_client.errors import InvalidRequest
from gyre_protos.v1 import loader_pb2 as pb


def field(dtype: str, *, token_ids: bool = True) -> pb.Field:
    return pb.Field(name=dtype, dtype=dtype, shape=[4], token_ids=token_ids)


def test_only_unsigned_token_ids_are_widened() -> None:
    ids = [
        field(dtype) for dtype in ("uint8", "uint16", "uint32", "uint64", "int16", "int32", "int64")
    ]
    unsigned = ("uint8", "uint16", "uint32", "uint64")
    assert widened(ids, "int64") == dict.fromkeys(unsigned, torch.int64)
    assert widened(ids, "stored") == {}
    assert widened([*ids[:2], *ids[4:]], "int32") == dict.fromkeys(unsigned[:2], torch.int32)
    assert widened([field("uint8", token_ids=False)], "int64") == {}


@pytest.mark.parametrize("dtype", ["uint32", "uint64"])
def test_ids_that_do_not_fit_are_refused(dtype: str) -> None:
    with pytest.raises(
        InvalidRequest,
        match=f"'int32', which cannot hold every {dtype} id of the field '{dtype}'; take 'int64'",
    ):
        widened([field(dtype)], "int32")
    assert widened([field(dtype, token_ids=False)], "int32") == {}


@pytest.mark.parametrize("token_dtype", ["uint16", "", "float32", "Int64"])
def test_unknown_choices_are_refused(token_dtype: str) -> None:
    with pytest.raises(InvalidRequest, match="it can be 'int64', 'int32', 'stored'"):
        widened([], token_dtype)


def test_a_widened_batch_is_in_memory_of_its_own() -> None:
    batch = {
        "tokens": torch.tensor([[1, 65535]], dtype=torch.uint16),
        "sample_id": torch.tensor([7]),
    }
    wider = widen(batch, {"tokens": torch.int64})
    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in wider.items()} == {
        "tokens": (torch.int64, [[1, 65535]]),
        "sample_id": (torch.int64, [7]),
    }
    assert all(wider[name].data_ptr() != batch[name].data_ptr() for name in batch)
