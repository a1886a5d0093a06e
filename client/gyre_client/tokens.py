"""Token ids as a trainer wants them: what `torch.nn.Embedding`, `max` and indexing take, where a file stores unsigned ones."""

from collections.abc import Iterable, Mapping

import torch
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.errors import InvalidRequest

_WIDER = {"int64": torch.int64, "int32": torch.int32, "stored": None}
_FITS_INT32 = ("uint8", "uint16")

Widened = Mapping[str, torch.dtype]


def widened(fields: Iterable[pb.Field], token_dtype: str) -> Widened:
    """Returns the dtype that each tensor is converted to, by its name: none but token ids of an unsigned dtype.

    Args:
        fields: The dataset's.
        token_dtype: `int64`, `int32`, or `stored` for no conversion at all.

    Raises:
        InvalidRequest: There is no such choice, or it cannot hold the ids.
    """
    if token_dtype not in _WIDER:
        raise InvalidRequest(f"token_dtype is {token_dtype!r}; it can be {', '.join(map(repr, _WIDER))}")
    wider = _WIDER[token_dtype]
    unsigned = [field for field in fields if field.token_ids and field.dtype.startswith("uint")]
    if wider is None:
        return {}
    for field in unsigned:
        if wider is torch.int32 and field.dtype not in _FITS_INT32:
            raise InvalidRequest(
                f"token_dtype is 'int32', which cannot hold every {field.dtype} id of the field {field.name!r}; take 'int64'"
            )
    return {field.name: wider for field in unsigned}


def widen(tensors: Mapping[str, torch.Tensor], wider: Widened) -> dict[str, torch.Tensor]:
    """Returns a batch in memory of its own, on the device where it is: nothing refers to the memory it came in any more."""
    return {
        name: tensor.to(wider[name]) if name in wider else tensor.clone()  # what is not converted is a few bytes a sample
        for name, tensor in tensors.items()
    }
