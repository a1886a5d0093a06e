"""Samples of a batch group while they are read: where they lie, and how they are stored."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.codecs import CODECS, Codec
from gyre_daemon.datasets.formats import Extents, FieldSpec
from gyre_daemon.fetching.batch_group import Place
from gyre_daemon.fetching.layout import GroupLayout
from gyre_daemon.order.shuffle.permutation import Int64Array


@dataclass(frozen=True, slots=True)
class Samples:
    """n consecutive samples of a batch group with F stored fields, across its batches.

    Attributes:
        sample_ids: int64 [n].
        slot: the memory that the samples go to.
        shard: int64 [n], the number of each sample's shard.
        start: int64 [n, F], the byte of the shard at which each stored field begins.
        stored: int64 [n, F], the sizes of the stored fields in bytes.
        target: int64 [n, F], the addresses of the fields in the slot.
        reserved: int64 [n, F], the bytes reserved for each field in the slot.
        absent: bool [n, F], which samples lack which fields; None if no field is optional.
        schema: int64 [n], the number of the schema of each; None if there is only one.
    """

    sample_ids: Int64Array
    slot: Place
    shard: Int64Array
    start: Int64Array
    stored: Int64Array
    target: Int64Array
    reserved: Int64Array
    absent: npt.NDArray[np.bool_] | None
    schema: Int64Array | None

    @classmethod
    def of(
        cls, ids: Int64Array, all_extents: Extents, layout: GroupLayout, slot: Place, some: slice
    ) -> "Samples":
        """Some samples of a batch group that is laid out; `ids` are those of all."""
        destinations, extents = layout.destinations[some], all_extents.part(some)
        return cls(
            ids[some],
            slot,
            extents.shard,
            extents.start,
            extents.size,
            destinations[:, :, 0] + slot.address,
            destinations[:, :, 1] - destinations[:, :, 0],
            extents.absent,
            extents.schema,
        )

    def lacking(self, column: int) -> npt.NDArray[np.bool_] | None:
        """Bool [n], which samples lack a field; None if none does."""
        if self.absent is None or not self.absent[:, column].any():
            return None
        return self.absent[:, column]

    def offsets(self, column: int) -> list[int]:
        """Where a field's bytes begin in the slot, for each sample."""
        offsets: list[int] = (self.target[:, column] - self.slot.address).tolist()
        return offsets

    def clear(self, column: int, lacking: npt.NDArray[np.bool_]) -> None:
        """Write zeros for samples that lack a field."""
        offsets, sizes = self.offsets(column), self.reserved[:, column].tolist()
        for sample in np.flatnonzero(lacking).tolist():
            begin, size = offsets[sample], sizes[sample]
            self.slot.memory[begin : begin + size] = bytes(size)


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory for stored bytes of one field that are not part of its tensor, such as a header.

    Attributes:
        memory: uint8.
        ends: int64 [n + 1]; sample i has the bytes `[ends[i], ends[i + 1])` of the memory.
    """

    memory: npt.NDArray[np.uint8]
    ends: Int64Array


@dataclass(frozen=True, slots=True)
class StoredField:
    """How a stored field lies in its shards.

    Attributes:
        forms: the field as each schema stores it, with its codec; one if all store it alike.
    """

    forms: Sequence[tuple[FieldSpec, Codec]]

    @classmethod
    def of(cls, spec: FieldSpec) -> "StoredField":
        """From the field of a dataset."""
        forms = [spec.form(number) for number in range(max(1, len(spec.forms)))]
        return cls([(form, CODECS[form.codec]) for form in forms])

    @property
    def finishes(self) -> bool:
        """Whether bytes must be checked or converted once they are there."""
        return any(codec.finish or spec.codec == "ids" for spec, codec in self.forms)

    def misfits(self, samples: Samples, column: int) -> npt.NDArray[np.bool_]:
        """Bool [n], which samples cannot be such a field; see `Codec.misfits`."""
        stored, reserved = samples.stored[:, column], samples.reserved[:, column]
        if len(self.forms) == 1:
            return self.forms[0][1].misfits(stored, reserved)
        found = np.zeros(len(stored), np.bool_)
        for codec, some in self._by_schema(samples):
            found[some] = codec.misfits(stored[some], reserved[some])
        return found

    def scratch_bytes(self, samples: Samples, column: int) -> Int64Array | None:
        """Int64 [n], see `Codec.scratch_bytes`."""
        stored, reserved = samples.stored[:, column], samples.reserved[:, column]
        if len(self.forms) == 1:
            codec = self.forms[0][1]
            return codec.scratch_bytes(stored, reserved) if codec.scratch_bytes else None
        found = np.zeros(len(stored), np.int64)
        for codec, some in self._by_schema(samples):
            if codec.scratch_bytes:
                found[some] = codec.scratch_bytes(stored[some], reserved[some])
        return found

    def of_each(self, samples: Samples) -> Iterable[tuple[FieldSpec, Codec]]:
        """How each sample stores the field."""
        if len(self.forms) == 1:
            return itertools.repeat(self.forms[0], len(samples.shard))
        assert samples.schema is not None
        return (self.forms[number] for number in samples.schema.tolist())

    def _by_schema(self, samples: Samples) -> Iterator[tuple[Codec, Int64Array]]:
        """The samples of each schema, and how these store the field."""
        assert samples.schema is not None
        for number in np.unique(samples.schema).tolist():
            yield self.forms[number][1], np.flatnonzero(samples.schema == number)
