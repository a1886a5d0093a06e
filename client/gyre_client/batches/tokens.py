"""Converts unsigned token ids to a dtype that `torch.nn.Embedding`, `max` and indexing accept."""

from collections.abc import Iterable, Mapping

import torch
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.errors import InvalidRequest
from gyre_client.messages.arguments import choice

_WIDER = {"int64": torch.int64, "int32": torch.int32, "stored": None}
_FITS_INT32 = ("uint8", "uint16")

# The dtype that a tensor is converted to, by the tensor's name.
Widened = Mapping[str, torch.dtype]


def widened(fields: Iterable[pb.Field], token_dtype: str) -> Widened:
    """Returns the conversions of a dataset's batches: its fields of unsigned token ids.

    Args:
        fields: The dataset's fields.
        token_dtype: `int64`, `int32`, or `stored` for no conversion at all.

    Raises:
        InvalidRequest: There is no such choice, or it cannot hold the ids of a field.
    """
    wider = choice("token_dtype", token_dtype, _WIDER)
    if wider is None:
        return {}
    unsigned = [field for field in fields if field.token_ids and field.dtype.startswith("uint")]
    for field in unsigned:
        if wider is torch.int32 and field.dtype not in _FITS_INT32:
            raise InvalidRequest(
                f"token_dtype is 'int32', which cannot hold every {field.dtype} id "
                f"of the field {field.name!r}; take 'int64'"
            )
    return {field.name: wider for field in unsigned}


def widen(tensors: Mapping[str, torch.Tensor], wider: Widened) -> dict[str, torch.Tensor]:
    """Returns a batch in new memory on the same device; nothing refers to the old memory.

    Other tensors are copied: they take only a few bytes per sample.
    """
    return {
        name: tensor.to(wider[name]) if name in wider else tensor.clone()
        for name, tensor in tensors.items()
    }
