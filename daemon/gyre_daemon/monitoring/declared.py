"""Metrics declared as fields of dataclasses, and the families made of them for Prometheus."""

from collections.abc import Iterator, Mapping
from dataclasses import field, fields, is_dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

_Family = CounterMetricFamily | GaugeMetricFamily

_METRIC, _LABELS = "metric", "labels"  # keys of a field's metadata


def counter(name: str, text: str, **labels: str) -> Any:
    """A field that counts from 0.

    Args:
        name: of the metric, without `_total`.
        text: its meaning.
        labels: that tell fields of one name apart.
    """
    return field(default=0, metadata={_METRIC: (CounterMetricFamily, name, text, labels)})


def gauge(name: str, text: str, default: float = 0, **labels: str) -> Any:
    """A field that is a present value; see `counter`."""
    return field(default=default, metadata={_METRIC: (GaugeMetricFamily, name, text, labels)})


def labelled(*names: str, of: Any = None) -> Any:
    """A mapping with a series for each key.

    Args:
        names: of the labels, whose values are the parts of a key.
        of: `counter(...)` or `gauge(...)` if the values are numbers; otherwise they are
            dataclasses with metrics.
    """
    metadata = {**(of.metadata if of else {}), _LABELS: names}
    return field(default_factory=dict, metadata=metadata)


def families_of(values: object) -> list[_Family]:
    """All metrics of a dataclass, in order of their first fields."""
    families: dict[str, _Family] = {}
    for (make, name, text, _), labels, value in _series(values, {}):
        if name not in families:
            families[name] = make(name, text, labels=list(labels))
        families[name].add_metric(list(labels.values()), float(value))
    return list(families.values())


def _series(values: Any, labels: Mapping[str, str]) -> Iterator[tuple[Any, dict[str, str], Any]]:
    for each in fields(values):
        value, names = getattr(values, each.name), each.metadata.get(_LABELS)
        if names is None:
            yield from _of_value(each.metadata.get(_METRIC), value, labels)
        else:
            for key, of_key in value.items():
                parts = key if isinstance(key, tuple) else (key,)
                own = dict(zip(names, map(str, parts), strict=True))
                yield from _of_value(each.metadata.get(_METRIC), of_key, {**labels, **own})


def _of_value(
    metric: Any, value: Any, labels: Mapping[str, str]
) -> Iterator[tuple[Any, dict[str, str], Any]]:
    if metric:
        yield metric, {**labels, **metric[3]}, value
    elif is_dataclass(value):
        yield from _series(value, labels)
