"""Reads the tables `mixtures`: datasets whose samples are those of other datasets."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gyre_daemon.config.schema import DatasetConfig, MixtureConfig
from gyre_daemon.config.tables import build, convert
from gyre_daemon.errors import ConfigError

FORMAT = "mixture"  # as which a mixture is listed
KEYS_OF_DATASETS = ("allow", "transforms", "pack")  # keys that a mixture has like any dataset
_MAX_SOURCES = 32  # a cursor has a place for each, with its fingerprint


def parse_mixture(name: str, table: object) -> DatasetConfig:
    """Check one mixture by itself; `check_sources` checks it against its sources.

    Raises:
        ConfigError: a key is unknown, has the wrong type, or does not fit the others.
    """
    where = f"mixtures.{name}"
    rest = dict(convert(table, dict[str, Any], where))
    common = {key: rest.pop(key) for key in KEYS_OF_DATASETS if key in rest}
    mixture = build(MixtureConfig, rest, where)
    given = [key for key in ("weights", "epochs", "temperature") if getattr(mixture, key)]
    if len(given) != 1:
        raise ConfigError(
            f"{where} has {' and '.join(given) or 'no weights'}; give it one of `weights`, "
            "`epochs` and `temperature`"
        )
    sources = mixture.sources or tuple(mixture.weights or mixture.epochs)
    if not 1 <= len(sources) <= _MAX_SOURCES or len(set(sources)) < len(sources):
        raise ConfigError(
            f"{where} names {len(sources)} sources; 1 to {_MAX_SOURCES} are possible, each once"
        )
    tables = {"weights": mixture.weights, "epochs": mixture.epochs}
    tables |= {f"schedule from step {each.step}": each.weights for each in mixture.schedule}
    for key, values in tables.items():
        _check_values(f"{where}.{key}", values, sources)
    steps = [each.step for each in mixture.schedule]
    if steps != sorted(set(steps)):
        raise ConfigError(f"{where}.schedule has the steps {steps}; they must rise")
    config = build(DatasetConfig, common | {"uri": f"{FORMAT}:{name}"}, where)
    return replace(config, format=FORMAT, mixture=replace(mixture, sources=sources))


def _check_values(where: str, values: Mapping[str, float], sources: tuple[str, ...]) -> None:
    for name, value in values.items():
        if name not in sources:
            raise ConfigError(
                f"{where} has `{name}`, which is none of the sources {', '.join(sources)}"
            )
        if not 0 <= value < 1e9:
            raise ConfigError(f"{where}.{name} is {value}: expected a number of at least 0")
    if values and not any(values.values()):
        raise ConfigError(f"{where} is 0 for every source; one must be above 0")


def check_sources(datasets: Mapping[str, DatasetConfig]) -> None:
    """Refuse mixtures whose sources are missing, are themselves, or cannot be mixed.

    Raises:
        ConfigError: names the mixture and the source.
    """
    for name, config in datasets.items():
        if config.mixture:
            _check_source(name, datasets, (name,))


def sources_below(name: str, datasets: Mapping[str, DatasetConfig]) -> tuple[str, ...]:
    """The sources of a mixture, with those of its sources; none of any other dataset."""
    mixture = datasets[name].mixture
    own = mixture.sources if mixture else ()
    return tuple(each for source in own for each in (source, *sources_below(source, datasets)))


def mixture_height(config: DatasetConfig, datasets: Mapping[str, DatasetConfig]) -> int:
    """The depth of nested mixtures in a dataset: 0 for any other dataset."""
    if not config.mixture:
        return 0
    sources = [datasets[each] for each in config.mixture.sources if each in datasets]
    return 1 + max((mixture_height(each, datasets) for each in sources), default=0)


def _check_source(name: str, datasets: Mapping[str, DatasetConfig], above: tuple[str, ...]) -> None:
    mixture = datasets[name].mixture
    for source in mixture.sources if mixture else ():
        where = f"mixtures.{name}"
        if source in above:
            raise ConfigError(f"{where} is a source of itself: {' > '.join((*above, source))}")
        if source not in datasets:
            raise ConfigError(
                f"{where} names the source `{source}`, and no dataset or mixture has this name"
            )
        config = datasets[source]
        if config.mixture and config.mixture.schedule:
            raise ConfigError(
                f"{where} has the source `{source}`, a mixture with a schedule, whose steps would "
                f"be none of the job's. Put the schedule into {where}"
            )
        if config.pack:
            raise ConfigError(
                f"{where} has the source `{source}` with `pack`, which cannot be mixed. Name it a "
                f"second time without it, and give {where} `pack`."
            )
        _check_source(source, datasets, (*above, source))
