"""The mixtures of a daemon: datasets made of other open ones."""

import hashlib
import json
from collections.abc import Sequence
from functools import partial

import numpy as np

from gyre_daemon.config import DatasetConfig, MixtureConfig
from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.datasets.mixing import MixedIndex, Part
from gyre_daemon.errors import ConfigError
from gyre_daemon.order.mixture import MixedSource, Mixture, source_seed
from gyre_daemon.order.planner import NO_SAMPLES
from gyre_daemon.order.quotas import Phase, whole_weights
from gyre_daemon.storage.unions import MixedStorage

Sources = Sequence[tuple[str, Dataset]]


class Mixtures:
    """Mixes each mixture once, and again when one of its sources was opened again."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[MixtureConfig, list[Dataset], Dataset]] = {}

    def of(self, name: str, config: DatasetConfig, sources: Sources) -> Dataset:
        """The dataset of a mixture.

        Args:
            name: of the mixture.
            config: of the mixture.
            sources: its open sources, by name.

        Raises:
            ConfigError: they cannot be mixed.
        """
        assert config.mixture
        opened = [dataset for _, dataset in sources]
        if name in self._kept:
            how, before, mixed = self._kept[name]
            same = [one is other for one, other in zip(before, opened, strict=False)]
            if how == config.mixture and len(before) == len(opened) and all(same):
                return mixed
        mixed = _mixed(name, config.mixture, sources)
        self._kept[name] = config.mixture, opened, mixed
        return mixed

    def source(self, name: str, source: str) -> Dataset | None:
        """The source of this name of a mixture; None if there is none."""
        if name not in self._kept:
            return None
        config, opened, _ = self._kept[name]
        return dict(zip(config.sources, opened, strict=True)).get(source)

    def clear(self) -> None:
        """Forget all of them."""
        self._kept.clear()


def _mixed(name: str, config: MixtureConfig, sources: Sources) -> Dataset:
    parts = [Part(each, its.index, its.fields, its.source_names) for each, its in sources]
    try:
        index = MixedIndex(parts).with_shards([len(its.storage.shards) for _, its in sources])
    except ConfigError as error:
        raise ConfigError(f"mixtures.{name}: {error}") from error
    first_ids = index.first_ids
    mixed = tuple(
        MixedSource(each, its.fingerprint, its.ordered, its.corrupt, first)
        for (each, its), first in zip(sources, first_ids, strict=False)
    )
    shares = partial(_phases, config)
    phases, num_samples = shares([its.num_samples for _, its in sources])
    fingerprints = [(each.name, each.fingerprint) for each in mixed]
    said = json.dumps([fingerprints, config.block, num_samples]).encode()
    corrupt = [each.corrupt + each.first_id for each in mixed]
    return Dataset(
        name=name,
        format="mixture",
        uri=f"mixture:{name}",
        storage=MixedStorage(
            [its.storage for _, its in sources],
            [partial(source_seed, name=each) if its.drawing else None for each, its in sources],
        ),
        shards=[shard for _, its in sources for shard in its.shards],
        index=index,
        fingerprint=hashlib.blake2b(said, digest_size=16, person=b"gyre.mixture").hexdigest(),
        corrupt=np.concatenate([NO_SAMPLES, *corrupt]),
        num_left_out=sum(its.num_left_out for _, its in sources),
        drawing=tuple(name for _, its in sources for name in its.drawing),
        mixture=Mixture(mixed, phases, config.block, num_samples, shares),
        source_names=tuple(name for part in parts for name in part.source_names),
    )


def _phases(config: MixtureConfig, sizes: Sequence[int]) -> tuple[tuple[Phase, ...], int]:
    """The phases of a definition, and the samples of an epoch."""
    names = config.sources
    num_samples = sum(sizes)
    if config.epochs:
        dues = [config.epochs.get(name, 0) * size for name, size in zip(names, sizes, strict=True)]
        first, num_samples = dues, max(1, round(sum(dues)))
    elif config.temperature:
        greatest = max(sizes)
        first = [round((size / greatest) ** (1 / config.temperature), 9) for size in sizes]
    else:
        first = [config.weights.get(name, 0) for name in names]
    phases = [Phase(0, whole_weights(first))]
    for each in config.schedule:
        weights = whole_weights([each.weights.get(name, 0) for name in names])
        phases.append(Phase(each.step, weights))
    return tuple(phases), num_samples
