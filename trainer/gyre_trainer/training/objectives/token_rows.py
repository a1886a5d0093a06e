# ruff: noqa: N803, N806  # names carry shape letters
"""The rows of tokens in a loader's batch, in the three forms that fields have.

    fixed    rows of one length; `pad` is padding
    packed   rows of several documents, with `position` and `loss_mask`
    ragged   documents of any length, as bytes or as token ids; one row per document

Dims: R rows of this rank, T tokens of a row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gyre_trainer.errors import DataRejected
from gyre_trainer.training.config import DataConfig

_Ids = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The rows of one field.

    Attributes:
        ids: int64 [R, T].
        is_token: [R, T], false for padding, which is at the end of a row.
        may_be_hidden: [R, T], the tokens that may be masked.
        positions: [R, T], of packed rows; None for others.
    """

    ids: _Ids
    is_token: _Flags
    may_be_hidden: _Flags
    positions: _Ids | None = None

    def tokens(self, row: int) -> _Ids:
        """The tokens of a row, without its padding."""
        tokens: _Ids = self.ids[row][self.is_token[row]]
        return tokens


def keys_of_rows(batch: Mapping[str, Tensor], num_rows: int) -> Iterator[list[int]]:
    """Of each row: the id of its sample, and its number among the rows of that sample."""
    sample_ids = batch["sample_id"].tolist()
    per_sample = num_rows // len(sample_ids)
    for row in range(num_rows):
        yield [sample_ids[row // per_sample], row % per_sample]


def token_rows(
    batch: Mapping[str, Tensor], field: str, data: DataConfig, length: int, pad: int
) -> TokenRows:
    """The rows of a field, on the CPU; documents that are too long keep their first tokens.

    Args:
        batch: of the loader.
        field: its name.
        data: of the configuration.
        length: of a row, of the longest one where packed rows have several lengths.
        pad: fills rows.

    Raises:
        DataRejected: there is no such field, or it has no tokens, or rows of another length.
    """
    values = values_of(batch, field, data)
    offsets = batch.get(f"{field}.offsets")
    if offsets is not None:
        ends = offsets.tolist()
        ids = values.numpy().astype(np.int64)
        documents = [ids[start:stop] for start, stop in pairwise(ends)]
        return filled(documents, length, pad)
    num_samples = len(batch["sample_id"])
    if values.ndim != 2 or values.numel() != num_samples * length or length % values.shape[1]:
        raise DataRejected(
            f"the rows of this objective have {length} tokens, but a batch of {field!r} of "
            f"{data.dataset!r} has the shape {tuple(values.shape)} for {num_samples} samples; set "
            "`data.sequence_length` to the tokens of a sample (no token more, as causal models "
            "have), or deliver documents of any length"
        )
    rows_RT = values.numpy().astype(np.int64)
    counts = batch.get("loss_mask")
    if counts is None:
        is_token_RT = rows_RT != pad
        return TokenRows(rows_RT, is_token_RT, is_token_RT)
    counts_RT = counts.cpu().numpy()
    if "position" not in batch:
        return TokenRows(rows_RT, rows_RT != pad, counts_RT)
    positions_RT = batch["position"].cpu().numpy().astype(np.int64)
    return TokenRows(rows_RT, _is_in_document(positions_RT, counts_RT), counts_RT, positions_RT)


def values_of(batch: Mapping[str, Tensor], field: str, data: DataConfig) -> Tensor:
    """The values of a field of whole numbers, on the CPU.

    Raises:
        DataRejected: there is no such field, or it has other values.
    """
    values = batch.get(field)
    if values is None:
        raise DataRejected(
            f"the batches of {data.dataset!r} have no field {field!r}; they have "
            f"{', '.join(sorted(batch))}"
        )
    if values.is_floating_point() or values.dtype == torch.bool:
        raise DataRejected(f"tokens are whole numbers or bytes, but {field!r} is {values.dtype}")
    return values.cpu()


def filled(documents: list[_Ids], length: int, pad: int) -> TokenRows:
    """One row for each document: its first tokens, then padding."""
    rows_RT = np.full((len(documents), length), pad, dtype=np.int64)
    is_token_RT = np.zeros(rows_RT.shape, dtype=np.bool_)
    for row, document in enumerate(documents):
        part = document[:length]
        rows_RT[row, : len(part)] = part
        is_token_RT[row, : len(part)] = True
    return TokenRows(rows_RT, is_token_RT, is_token_RT)


def _is_in_document(positions_RT: _Ids, counts_RT: _Flags) -> _Flags:
    """False for the padding of packed rows.

    Its positions begin at 0, too, and none of it counts. A last document without any counting token
    is taken for padding.
    """
    num_tokens = positions_RT.shape[1]
    places_T = np.arange(num_tokens)
    last_start_R = np.where(positions_RT == 0, places_T, 0).max(axis=1)
    in_last_RT = places_T >= last_start_R[:, None]
    last_counts_R = (counts_RT & in_last_RT).any(axis=1)
    is_token_RT: _Flags = ~in_last_RT | last_counts_R[:, None]
    return is_token_RT
