"""Finds the cursor and the samples at which a session begins.

[Note: How a dataset grows] A dataset with `append = true` may get shards behind all others. A
cursor of such a dataset says how many shards its job reads, with their fingerprint. The daemon
compares that with the fingerprint of as many of the first shards that it has. If a client resumes
from a saved state, it asks to grow: then the epochs that begin from there on have all samples, and
the cursor says so from then on (`Stages.grown`). If it opens a session again within its run, it
does not ask, and the job keeps its samples. So the samples of a job are decided once, where all of
its ranks are given the same state, and never by the moment at which one rank loses its daemon.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gyre_protos.text import counted

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.catalog.catalog import Catalog
from gyre_daemon.datasets.dataset import Dataset, Prefix
from gyre_daemon.datasets.formats import FieldSpec
from gyre_daemon.errors import CursorRejected
from gyre_daemon.order.cursor import Cursor, check_cursor, check_transforms, decode_cursor
from gyre_daemon.order.mixture_state import MixtureState, check_mixture
from gyre_daemon.order.planner import Order, stages_of
from gyre_daemon.order.stages import MAX_STAGES, Stage


@dataclass(frozen=True, slots=True)
class Resumption:
    """Finds where a session on one dataset begins.

    Attributes:
        catalog: has the dataset.
        name: of the dataset in the catalog.
        config: of the dataset.
        dataset: open, without transforms.
    """

    catalog: Catalog
    name: str
    config: DatasetConfig
    dataset: Dataset

    async def cursor(
        self, order: Order, data: bytes, transforms: str, *, grow: bool, changed_transforms: bool
    ) -> Cursor:
        """The cursor at which a session begins.

        Args:
            order: that was asked for.
            data: the client's cursor; empty for the beginning.
            transforms: identifies the transforms of the samples.
            grow: whether epochs that have not begun get the shards that were added since.
            changed_transforms: whether the cursor may belong to samples that were transformed
                otherwise; never where their lengths decide the order.

        Raises:
            CursorRejected: the client's cursor is of other data, another order or other transforms.
            InvalidRequest: the order does not fit the dataset.
            GyreError: as `Catalog.open`.
        """
        its = self.dataset
        if not data:
            mixture = MixtureState.of(its.mixture) if its.mixture else None
            start = Cursor(its.fingerprint, order, 0, transforms=transforms, mixture=mixture)
            return self._with_all(start) if its.grows else start
        cursor = decode_cursor(data)
        changed = await self._changed_source(cursor)
        check_mixture(cursor.mixture, its.mixture, its.name, lambda *_: changed)
        first = None if cursor.fingerprint == its.fingerprint else await self._first_shards(cursor)
        wanted = first.fingerprint if first else its.fingerprint
        changed = "" if cursor.fingerprint == wanted else await its.what_changed(cursor.fingerprint)
        check_cursor(cursor, its.name, wanted, order, lambda _: changed)
        if not changed_transforms or order.bucket:
            check_transforms(cursor, transforms)
        cursor = replace(cursor, transforms=transforms)
        num_samples = first.num_samples if first else its.num_samples
        if its.grows and not cursor.stages:
            num_shards = await self._num_shards(cursor) if first else len(its.shards)
            cursor = replace(cursor, stages=(Stage(0, num_samples),), num_shards=num_shards)
        if cursor.stages and cursor.stages[-1].num_samples != num_samples:
            raise CursorRejected(
                "the state says that its data has "
                f"{counted(cursor.stages[-1].num_samples, 'sample')}, but it has "
                f"{num_samples}; pass the state as state_dict() gave it"
            )
        if not grow or not its.grows:
            return cursor
        stages = stages_of(order, cursor.stages).grown(cursor.position, its.num_samples)
        if len(stages) > MAX_STAGES:
            raise CursorRejected(
                f"the job's dataset `{its.name}` has grown {MAX_STAGES} times, and a state holds "
                "no more; begin a new run"
            )
        return replace(self._with_all(cursor), stages=stages)

    async def _changed_source(self, cursor: Cursor) -> str:
        """How the data of a mixture's first source that differs were when the cursor was made."""
        now = dict(MixtureState.of(self.dataset.mixture).sources) if self.dataset.mixture else {}
        for source, fingerprint in cursor.mixture.sources if cursor.mixture else ():
            opened = self.catalog.source_of(self.name, source)
            if opened and now.get(source, fingerprint) != fingerprint:
                return await opened.what_changed(fingerprint)
        return ""

    def _with_all(self, cursor: Cursor) -> Cursor:
        """The cursor, of all samples of the dataset."""
        its = self.dataset
        stages = (Stage(0, its.num_samples),)
        return replace(
            cursor, fingerprint=its.fingerprint, stages=stages, num_shards=len(its.shards)
        )

    async def _num_shards(self, cursor: Cursor) -> int:
        """The number of shards that a cursor covers; 0 if unknown.

        One from before its dataset could grow does not say it, but the daemon may remember.
        """
        remembered = self.catalog.num_shards_then
        return cursor.num_shards or await remembered(self.dataset, cursor.fingerprint)

    async def _first_shards(self, cursor: Cursor) -> Prefix | None:
        """The first shards of a grown dataset, if a cursor covers just these.

        Raises:
            CursorRejected: it is of more shards than there are, or their samples have other fields.
        """
        its = self.dataset
        if not its.grows:
            return None
        num_shards = await self._num_shards(cursor)
        if num_shards > len(its.shards):
            raise CursorRejected(
                f"the state is of {counted(num_shards, 'shard')} of `{its.name}`, and this daemon "
                f"has opened it with {len(its.shards)}; if the others were added since, "
                "`gyre index` finds them, otherwise restore them",
                {"differs": "fingerprint"},
            )
        if not 0 < num_shards < len(its.shards):
            return None
        prefix = await self.catalog.prefix(self.name, self.config, its, num_shards)
        if prefix.fingerprint != cursor.fingerprint:
            return None
        then, now = _by_name(prefix.fields), _by_name(its.fields)
        if then != now:
            others = [name for name in then | now if then.get(name) != now.get(name)]
            raise CursorRejected(
                f"the shards that were added to `{its.name}` change the fields of a sample: "
                f"{', '.join(others)}. Name the fields to serve in the dataset's table, or begin "
                "a new run.",
                {"differs": "fields"},
            )
        return prefix


def _by_name(fields: Sequence[FieldSpec]) -> dict[str, tuple[object, ...]]:
    """The properties of each field of a sample that a job sees, in the fields' order."""
    return {
        each.name: (place, each.dtype, each.shape, each.ragged, each.categories)
        for place, each in enumerate(fields)
    }
