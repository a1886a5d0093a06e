"""Cuts the sequences of a batch into the slices of context-parallel ranks. Pure.

[Note: Two cuts] A sequence of L tokens is cut for n ranks. *Contiguous*: rank r has the tokens
[rL/n, (r+1)L/n). *Zig-zag*: the sequence has 2n chunks, and rank r has chunks r and 2n-1-r, so that
causal attention costs every rank the same.

Targets are shifted before the cut: the label of a token is the next token, also where another
rank's slice has it.
"""

from collections.abc import Mapping

import torch
from gyre_protos.v1 import loader_pb2 as pb
from torch import Tensor

from gyre_client.errors import InvalidRequest
from gyre_client.loader.ranks import Ranks
from gyre_client.messages.arguments import choice, shown
from gyre_client.messages.layouts import MASK, OFFSETS_SUFFIX

LABELS = "labels"
NO_TARGET = -100  # ignored by torch.nn.functional.cross_entropy
NO_DOCUMENT = -1
_TOKENS, _LOSS_MASK = "tokens", "loss_mask"
_DOCUMENT_ID, _CU_SEQLENS = "document_id", "cu_seqlens"
_CHUNKS = {"contiguous": 1, "zigzag": 2}  # of each rank


class SequenceCut:
    """Makes one context-parallel rank's slice of each batch.

    Attributes:
        field: The field of token ids.
        names: The fields that have one value per token, which are cut alike.
    """

    def __init__(
        self, description: pb.DatasetDescription, cp_rank: int, cp_size: int, cp_cut: str
    ) -> None:
        """Checks that the sequences of a dataset can be cut.

        Args:
            description: The dataset's description, packed and transformed as the batches are.
            cp_rank: Which slice.
            cp_size: The number of slices.
            cp_cut: `contiguous` or `zigzag`.

        Raises:
            InvalidRequest: There is no such cut, the dataset has no sequences of one length, or
                they do not divide.
        """
        num_chunks = cp_size * choice("cp_cut", cp_cut, _CHUNKS)
        fields = {field.name: field for field in description.fields}
        self._is_packed = description.HasField("packing")
        self.field = description.packing.field if self._is_packed else _token_field(fields)
        self.length = _length(fields[self.field])
        if self.length % num_chunks:
            raise InvalidRequest(
                f"cp_dim: sequences of {self.length} tokens do not divide into {num_chunks} chunks "
                f"({cp_size} ranks, cp_cut={cp_cut!r}). Take a length that is a multiple of "
                f"{num_chunks}"
            )
        if LABELS in fields:
            raise InvalidRequest(
                "cp_dim: the dataset has a field 'labels', and the cut makes 'labels' of the next "
                "tokens. Rename that field or drop it"
            )
        self.names = tuple(
            name for name, field in fields.items() if _is_per_token(field, self.length)
        )
        size = self.length // num_chunks
        chunks = (cp_rank,) if num_chunks == cp_size else (cp_rank, num_chunks - 1 - cp_rank)
        self._ranges = [range(chunk * size, (chunk + 1) * size) for chunk in chunks]

    def __call__(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the slice of a batch.

        Fields with one value per token, [B, L], become [B, L / n]: views of the batch where the cut
        is contiguous, copies where it is zig-zag. `labels`, int64 [B, L / n], is added. Where
        documents are packed, `document_id` becomes int64 [B, L / n], the document of each token, or
        -1 in padding; and `cu_seqlens` is that of the slices if these are contiguous. All other
        tensors stay whole.
        """
        found = {
            name: self._cut(each) if name in self.names else each for name, each in batch.items()
        }
        found[LABELS] = self._labels(batch)
        if self._is_packed:
            found[_DOCUMENT_ID] = self._documents(batch)
            del found[_DOCUMENT_ID + OFFSETS_SUFFIX]
            if len(self._ranges) == 1:
                found |= self._bounds(batch)
        return found

    def _cut(self, tensor: Tensor) -> Tensor:
        parts = [tensor[:, each.start : each.stop] for each in self._ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _labels(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The next token of each, or `NO_TARGET` if it is no target or there is none."""
        tokens, counts = batch[self.field], batch.get(_LOSS_MASK)
        num_here = sum(map(len, self._ranges))
        labels = tokens.new_full((len(tokens), num_here), NO_TARGET, dtype=torch.int64)
        begin = 0
        for each in self._ranges:
            following = slice(each.start + 1, min(each.stop + 1, self.length))
            part = labels[:, begin : begin + following.stop - following.start]
            part.copy_(tokens[:, following])
            if counts is not None and _LOSS_MASK in self.names:
                part.masked_fill_(~counts[:, following].bool(), NO_TARGET)
            begin += len(each)
        if MASK in batch:
            labels[~batch[MASK]] = NO_TARGET
        return labels

    def _documents(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The document of each token."""
        documents, begins = batch[_DOCUMENT_ID], batch[_CU_SEQLENS][:-1]
        offsets = batch[_DOCUMENT_ID + OFFSETS_SUFFIX]
        first_begins = batch[_CU_SEQLENS + OFFSETS_SUFFIX][:-1]
        # Padding ends a row and counts as a document in cu_seqlens, but not in document_id.
        rows = torch.arange(len(first_begins), device=documents.device)
        row_of = torch.repeat_interleave(rows, offsets.diff())
        places = torch.arange(len(documents), device=documents.device) - offsets[row_of]
        by_begin = documents.new_full((len(begins),), NO_DOCUMENT)
        by_begin[first_begins[row_of] + places] = documents
        tokens = torch.cat(
            [torch.arange(r.start, r.stop, device=rows.device) for r in self._ranges]
        )
        everywhere = rows[:, None] * self.length + tokens
        return by_begin[torch.searchsorted(begins, everywhere.to(begins.dtype), right=True) - 1]

    def _bounds(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`cu_seqlens` of contiguous slices, one after the other."""
        begins, (here,) = batch[_CU_SEQLENS][:-1], self._ranges
        num_rows, size = len(batch[self.field]), len(here)
        rows, columns = begins // self.length, begins % self.length
        inside = (columns > here.start) & (columns < here.stop)
        ends = torch.arange(num_rows + 1, device=begins.device, dtype=begins.dtype) * size
        its = (rows * size + columns - here.start)[inside]
        bounds = torch.cat((its, ends)).sort().values
        offsets = torch.searchsorted(bounds, ends)
        offsets[-1] += 1  # the end of the last slice
        return {_CU_SEQLENS: bounds, _CU_SEQLENS + OFFSETS_SUFFIX: offsets}


def cut_of(description: pb.DatasetDescription, ranks: Ranks, cp_cut: str) -> SequenceCut | None:
    """Returns the cut for the batches of a process; None if it reads whole sequences.

    Raises:
        InvalidRequest: As `SequenceCut`; or there is a cut and nothing to cut for.
    """
    if ranks.cp_size is not None:
        return SequenceCut(description, ranks.cp_rank, ranks.cp_size, cp_cut)
    if cp_cut != "contiguous":
        raise InvalidRequest(
            f"cp_cut: there is nothing to cut for (got {shown(cp_cut)}). Pass cp_dim, or cp_rank "
            "and cp_size"
        )
    return None


def _token_field(fields: Mapping[str, pb.Field]) -> str:
    """The field of token ids of an unpacked dataset.

    Raises:
        InvalidRequest: There is no such field, or there are several.
    """
    found = [name for name, field in fields.items() if field.token_ids] or [
        name for name in fields if name == _TOKENS
    ]
    if len(found) != 1:
        raise InvalidRequest(
            f"cp_dim: the dataset must have one field of token ids (got {', '.join(fields)}). "
            "Leave cp_dim out, so that ranks along it get whole batches"
        )
    return found[0]


def _length(field: pb.Field) -> int:
    """The length of the sequences.

    Raises:
        InvalidRequest: They have none.
    """
    if field.ragged or len(field.shape) != 1:
        raise InvalidRequest(
            f"cp_dim: samples of {field.name!r} are no sequences of one length. Pack them with "
            "pack=, or cut and fill them with the transform crop_or_pad"
        )
    return field.shape[0]


def _is_per_token(field: pb.Field, length: int) -> bool:
    return not field.ragged and list(field.shape) == [length]
