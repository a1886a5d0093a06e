"""How far the indexing of a dataset is."""

from collections.abc import Set
from dataclasses import dataclass, replace

from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.datasets.indexing.changes import Change, PreviousIndex
from gyre_daemon.datasets.indexing.shards import IndexedShard
from gyre_daemon.datasets.indexing.unpacked import is_compressed, unpacked_name


@dataclass(frozen=True, slots=True)
class IndexProgress:
    """One more shard of a dataset has its index.

    The last progress of a dataset also has the results for the whole dataset.

    Attributes:
        num_done: shards so far.
        num_shards: of the dataset.
        num_samples: in the scanned shards so far; at last, in the dataset.
        shard: the one just done.
        reused: whether its sidecar was fresh, or it is unchanged and nothing is scanned.
        change: its difference from the last index.
        fingerprint: at last, of the dataset.
        fingerprint_before: at last, of the dataset as it was; empty if it was never indexed.
        removed: at last, the shards that the dataset no longer has.
        was_appended: at last, whether the dataset as it was is the first shards of what it is now,
            and cursors of it fit because of `append`.
    """

    num_done: int
    num_shards: int
    num_samples: int
    shard: str
    reused: bool
    change: Change
    fingerprint: str = ""
    fingerprint_before: str = ""
    removed: tuple[str, ...] = ()
    was_appended: bool = False

    def after(self, name: str, indexed: IndexedShard) -> "IndexProgress":
        """The progress after one more shard, which has this name."""
        return IndexProgress(
            self.num_done + 1,
            self.num_shards,
            self.num_samples + indexed.num_samples,
            name,
            indexed.reused,
            indexed.change or "indexed",
        )

    def finished(
        self, dataset: Dataset, previous: PreviousIndex, names: Set[str], *, was_appended: bool
    ) -> "IndexProgress":
        """The last progress, of a dataset whose shards have these names.

        An earlier index may know a compressed shard by its name, or by that of the unpacked one.
        """
        names = names | {unpacked_name(name) for name in names if is_compressed(name)}
        return replace(
            self,
            num_samples=dataset.num_samples,
            fingerprint=dataset.fingerprint,
            fingerprint_before=previous.fingerprint,
            removed=tuple(sorted(previous.shards.keys() - names)),
            was_appended=was_appended,
        )
