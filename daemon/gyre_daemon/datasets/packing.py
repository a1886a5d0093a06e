"""Packed datasets: the samples of another one are documents, and a sample is a whole sequence.

A packed dataset has the documents' storage and index, and other fields. `order.sequences` says
which documents share a sequence; here their lengths come from the index, so nothing is read.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import NoReturn

import numpy as np
from msgspec import Struct

from gyre_daemon.config import PackConfig
from gyre_daemon.datasets.formats import FieldSpec, SampleIndex, stored_fields
from gyre_daemon.datasets.formats.concat import SOURCE
from gyre_daemon.datasets.formats.sample_table import column_of_all
from gyre_daemon.errors import InvalidRequest
from gyre_daemon.order.mixture import MixedSource, Mixture
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.order.planner import NO_SAMPLES
from gyre_daemon.order.sequences import PACKING_VERSION, PackRule, Sequences, pack_documents

# Fields that a packed dataset adds to the packed one.
POSITION, LOSS_MASK = "position", "loss_mask"
DOCUMENT_ID, CU_SEQLENS = "document_id", "cu_seqlens"
_PACKABLE = ("bytes", "ids", "text", "npy")


@dataclass(frozen=True, eq=False)
class Packed:
    """The packing of a dataset.

    Attributes:
        config: the options asked for.
        stored: the field of the documents that is packed, as it is stored.
        column: its number among the stored fields.
        sequences: which documents are in which sequence.
        mask_column: the number of the documents' own loss mask, which a transform made, among the
            stored fields; None where they have none.
        mixed: facts of a mixture's documents; None for those of one dataset.
    """

    config: PackConfig
    stored: FieldSpec
    column: int
    sequences: Sequences
    mask_column: int | None = None
    mixed: "MixedSequences | None" = None

    @property
    def num_samples(self) -> int:
        """P, the number of sequences."""
        return self.sequences.num_samples

    @cached_property
    def read(self) -> dict[int, FieldSpec]:
        """The fields of documents to read, by their numbers."""
        read = {self.column: self.stored}
        if self.mask_column is not None:
            read[self.mask_column] = replace(self.stored, name=LOSS_MASK, dtype=np.dtype(np.bool_))
        return read

    @cached_property
    def fields(self) -> Sequence[FieldSpec]:
        """The tensors of a sample of L tokens; only the first is read."""
        row = (self.config.length,)
        int32, int64 = np.dtype("<i4"), np.dtype("<i8")
        source = [self.mixed.field] if self.mixed else []
        return [
            replace(self.stored, shape=row, ragged=False, length=0),
            FieldSpec(POSITION, int32, row, ragged=False, codec="indexed"),
            FieldSpec(LOSS_MASK, np.dtype(np.bool_), row, ragged=False, codec="indexed"),
            FieldSpec(DOCUMENT_ID, int64, (), ragged=True, codec="indexed"),
            FieldSpec(CU_SEQLENS, int32, (), ragged=True, codec="indexed"),
            *source,
        ]

    def most_parts(self, num_samples: int) -> int:
        """An upper bound of the parts of documents in a batch of so many samples."""
        if self.mixed:  # a small source may come often
            return num_samples * int(np.diff(self.sequences.bounds).max())
        return self.sequences.most_parts(num_samples)

    @property
    def efficiency(self) -> float:
        """The part of all places in sequences that has a token and no padding."""
        return self.sequences.num_tokens / (self.num_samples * self.config.length)

    def blocks(self, io_block_bytes: int) -> NoReturn:
        """See `BlockIndex.blocks`: the documents of a sequence lie all over the dataset."""
        raise InvalidRequest(
            "a packed dataset has no blocks: the documents of a sequence come from all over it. "
            "Use the order `full` or `sequential`."
        )

    def fingerprint(self, documents: str, transforms: str) -> str:
        """The identity of the packed data, from that of its documents and the rule."""
        parts = [
            documents,
            PACKING_VERSION,
            asdict(self.config),
            *([transforms] if transforms else []),
        ]
        said = json.dumps(parts, sort_keys=True)
        return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()


def pack(
    index: SampleIndex,
    fields: Sequence[FieldSpec],
    num_made: int,
    corrupt: Int64Array,
    config: PackConfig,
    mixture: Mixture | None = None,
) -> Packed:
    """Pack the samples of a dataset; waits a quarter of a second for a million.

    Args:
        index: of the documents.
        fields: theirs.
        num_made: how many of these transforms make, which come first; 0 where any may be packed.
        corrupt: int64 [C], documents to leave out, in rising order.
        config: how.
        mixture: of which these are the documents; None for those of one dataset.

    Raises:
        InvalidRequest: there is no such field, it cannot be packed, or as `pack_documents`.
    """
    spec = _field(fields, config)
    column = [each.name for each in stored_fields(fields)].index(spec.name)
    if num_made and column >= num_made:
        raise InvalidRequest(
            f"`pack` names the field {spec.name!r:.100}, which no transform makes; behind "
            "transforms only what they make can be packed"
        )
    mask_column = _mask_column(fields, num_made)

    def lengths_of(documents: Int64Array) -> Int64Array:
        sizes = column_of_all(index, documents, lambda found: found.tensor_bytes[:, column])
        lengths = sizes // spec.dtype.itemsize
        if mask_column is not None:
            masks = column_of_all(index, documents, lambda its: its.tensor_bytes[:, mask_column])
            _check_masks(documents, lengths, masks)
        return lengths

    rule = PackRule(config.length, config.overlong, config.window, config.seed)
    mixed = None
    if mixture:
        names = next(spec.categories for spec in fields if spec.name == SOURCE)
        sequences, mixed = pack_sources(mixture, names, lengths_of, rule, corrupt)
    else:
        sequences = pack_documents(index.num_samples, lengths_of, rule, corrupt)
    if sequences.begins is not None and spec.codec == "text":
        spec = replace(spec, codec="bytes")  # a cut may go through a character
    return Packed(config, spec, column, sequences, mask_column, mixed)


def _mask_column(fields: Sequence[FieldSpec], num_made: int) -> int | None:
    """Where the documents' own loss mask is among the fields that transforms make."""
    names = [spec.name for spec in stored_fields(fields)]
    if all(spec.name != LOSS_MASK for spec in fields):
        return None
    if LOSS_MASK in names[:num_made]:
        column = names.index(LOSS_MASK)
        spec = stored_fields(fields)[column]
        if spec.ragged and not spec.shape and spec.dtype == np.bool_:
            return column
    raise InvalidRequest(
        f"the samples have a field {LOSS_MASK!r} that is no mask of a transform such as `chat`, "
        "and packed batches have their own. Leave it out with `columns`, or rename it."
    )


def _check_masks(documents: Int64Array, lengths: Int64Array, masks: Int64Array) -> None:
    """Refuse a document whose loss mask has not one value for each token."""
    wrong = np.flatnonzero(lengths != masks)
    if len(wrong):
        raise InvalidRequest(
            f"sample {documents[wrong[0]]} has {lengths[wrong[0]]} tokens and {masks[wrong[0]]} "
            f"values of {LOSS_MASK!r}; only a mask of the same length can be packed with them"
        )


def _field(fields: Sequence[FieldSpec], config: PackConfig) -> FieldSpec:
    known = [_uniform(spec) for spec in stored_fields(fields)]
    named = [spec for spec in known if spec.name == config.field]
    ragged = [spec.name for spec in known if _is_packable(spec)]
    if not named or not _is_packable(named[0]):
        which = f"there are {', '.join(ragged)}" if ragged else "this dataset has none"
        raise InvalidRequest(
            f"`pack` names the field {config.field!r:.100}; only a field of whole numbers whose "
            f"samples differ in length can be packed, and {which}"
        )
    spec = named[0]
    if spec.name in (POSITION, LOSS_MASK, DOCUMENT_ID, CU_SEQLENS):
        raise InvalidRequest(
            f"a packed dataset has its own field {spec.name!r}; give the packed one "
            "another name with `rename`"
        )
    if config.overlong in ("split", "truncate") and spec.codec == "npy":
        raise InvalidRequest(
            f"documents of the field {spec.name!r:.100} are npy files, which cannot be cut; choose "
            "fail or drop as `overlong`"
        )
    limits = np.iinfo(spec.dtype)  # type: ignore[type-var]  # of an integer: see `_is_packable`
    if not limits.min <= config.padding_id <= limits.max:
        raise InvalidRequest(
            f"padding_id is {config.padding_id}, which does not fit into {spec.dtype}, the type of "
            f"{spec.name!r:.100}"
        )
    return spec


def _uniform(spec: FieldSpec) -> FieldSpec:
    """A field as all schemas of the shards store it, where they store it alike."""
    forms = [replace(form, name=spec.name, media_type="", forms=()) for form in spec.forms]
    is_one = forms and all(form == forms[0] for form in forms)
    return replace(forms[0], media_type=spec.media_type) if is_one else spec


def _is_packable(spec: FieldSpec) -> bool:
    is_flat = spec.ragged and not spec.shape and spec.dtype.kind in "iu"
    return is_flat and spec.codec in _PACKABLE and len(spec.forms) <= 1


class MixedSequences(Struct, frozen=True, eq=False):
    """The facts of packed sequences that come from several sources.

    Attributes:
        mixture: of the sequences.
        names: S, of the datasets with documents of their own.
        bounds: int64 [S + 1], the first sequence of each, and P.
    """

    mixture: Mixture
    names: tuple[str, ...]
    bounds: Int64Array

    @property
    def field(self) -> FieldSpec:
        """Of each sequence, the number of its source."""
        int32 = np.dtype("<i4")
        return FieldSpec(SOURCE, int32, (), ragged=False, codec="indexed", categories=self.names)

    def source_of(self, sequences: Int64Array) -> Int64Array:
        """The numbers of the sources of sequences; both int64 [n]."""
        return np.searchsorted(self.bounds, sequences, side="right") - 1


class _Counted(Struct, frozen=True):
    """So many sequences, for an order to go through."""

    num_samples: int

    def blocks(self, io_block_bytes: int) -> NoReturn:
        """See `BlockIndex.blocks`: an order of blocks is refused for the mixture."""
        raise AssertionError


def pack_sources(
    mixture: Mixture,
    names: tuple[str, ...],
    lengths_of: Callable[[Int64Array], Int64Array],
    rule: PackRule,
    left_out: Int64Array,
) -> tuple[Sequences, MixedSequences]:
    """Pack the documents of each source of a mixture.

    Args:
        mixture: of the documents.
        names: S, of the datasets with documents of their own, in the order of the documents.
        lengths_of: see `pack_documents`.
        rule: how.
        left_out: see `pack_documents`.

    Raises:
        InvalidRequest: the documents of a source cannot be packed; names it.
    """
    packed: list[Sequences] = []
    for name, (first, stop) in zip(names, _ranges(mixture, 0), strict=True):
        some = left_out[slice(*np.searchsorted(left_out, (first, stop)))]

        def own_lengths(documents: Int64Array, first: int = first) -> Int64Array:
            return lengths_of(documents + first)

        try:
            its = pack_documents(stop - first, own_lengths, rule, some - first)
        except InvalidRequest as error:
            raise InvalidRequest(f"the source `{name}`: {error}") from error
        packed.append(replace(its, documents=its.documents + first))
    counts = [its.num_samples for its in packed]
    bounds = np.concatenate(([0], np.cumsum(counts)))
    mixed, _ = _mixed(mixture, iter(counts))
    return _joined(packed), MixedSequences(mixed, names, bounds)


def _ranges(mixture: Mixture, first_id: int) -> Iterator[tuple[int, int]]:
    """The documents `[first, stop)` of each dataset with its own documents."""
    for source in mixture.sources:
        begin = first_id + source.first_id
        if isinstance(source.ordered, Mixture):
            yield from _ranges(source.ordered, begin)
        else:
            yield begin, begin + source.ordered.num_samples


def _mixed(mixture: Mixture, counts: Iterator[int]) -> tuple[Mixture, int]:
    """The same mixture, of so many sequences of each dataset, and their number."""
    sources: list[MixedSource] = []
    first_id = 0
    for each in mixture.sources:
        if isinstance(each.ordered, Mixture):
            nested, count = _mixed(each.ordered, counts)
            its = replace(each, ordered=nested)
        else:
            count = next(counts)
            its = replace(each, ordered=_Counted(count))
        sources.append(replace(its, corrupt=NO_SAMPLES, first_id=first_id))
        first_id += count
    return mixture.of(sources), first_id


def _joined(packed: Sequence[Sequences]) -> Sequences:
    """All sequences, source after source."""
    begins = None
    if any(its.begins is not None for its in packed):
        begins = np.concatenate(
            [np.zeros_like(its.documents) if its.begins is None else its.begins for its in packed]
        )
    parts = np.cumsum([0, *(len(its.documents) for its in packed)])
    bounds = [its.bounds[:-1] + first for its, first in zip(packed, parts, strict=False)]
    return Sequences(
        np.concatenate([its.documents for its in packed]),
        begins,
        np.concatenate([its.lengths for its in packed]),
        np.concatenate([*bounds, parts[-1:]]),
        sum(its.num_empty for its in packed),
        sum(its.num_overlong for its in packed),
    )
