"""A daemon's metrics as Prometheus and `gyre status` show them, from the fields of `metrics`.

Prometheus' library is imported with the first reader of them.
"""

import asyncio
import gzip
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from http import HTTPStatus

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from gyre_daemon.monitoring.http_ports import Answer, Application
from gyre_daemon.monitoring.metrics import BOUNDS_S, Census, LoopLag, readings
from gyre_daemon.runtime.events import log_event

_Family = CounterMetricFamily | GaugeMetricFamily
_KINDS: Mapping[str, type[_Family]] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
_LOOP_DEADLINE_S = 5.0  # a loop later than this has worse trouble than a missing scrape


def families_of(values: object) -> list[_Family]:
    """All metrics of a dataclass, in order of their first fields."""
    families: dict[str, _Family] = {}
    for metric, labels, value in readings(values):
        if metric.name not in families:
            families[metric.name] = _KINDS[metric.kind](
                metric.name, metric.meaning, labels=list(labels)
            )
        families[metric.name].add_metric(list(labels.values()), float(value))
    return list(families.values())


def families(census: Census) -> Iterator[Metric]:
    """All metrics of a daemon except those of its process."""
    yield InfoMetricFamily("gyre_build", "The version of Gyre.", {"version": census.version})
    yield from families_of(census)
    yield _loop_lag(census.loop_lag)


def _loop_lag(lag: LoopLag) -> Metric:
    bounds = [*map(str, BOUNDS_S), "+Inf"]
    buckets = list(zip(bounds, [*lag.at_most, lag.num_timers], strict=True))
    return HistogramMetricFamily(
        "gyre_event_loop_lag_seconds",
        "How late a timer of the daemon's event loop is.",
        buckets,
        lag.sum_s,
    )


class DaemonCollector(Collector):
    """Collects a daemon's metrics; may be asked in any thread but that of the event loop."""

    def __init__(self, take_census: Callable[[], Census]) -> None:
        """Made on the event loop, which then takes each census."""
        self._take_census = take_census
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterable[Metric]:
        """The families as of now.

        Raises:
            TimeoutError: the event loop did not answer in time.
        """
        taken = asyncio.run_coroutine_threadsafe(self._take(), self._loop)
        return taken.result(_LOOP_DEADLINE_S)

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not take a census."""
        return []

    async def _take(self) -> list[Metric]:
        return list(families(self._take_census()))


def new_registry(take_census: Callable[[], Census]) -> CollectorRegistry:
    """The metrics of a daemon and of its process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(DaemonCollector(take_census))
    return registry


def metrics_application(registry: CollectorRegistry) -> Application:
    """Answers every path with the metrics, in the form that the scraper accepts."""

    def answer(_: str, fields: Mapping[str, str]) -> Answer:
        try:
            encode, content_type = choose_encoder(fields.get("accept", ""))
            body = encode(registry)
        except Exception as error:
            log_event("scrape failed", {"error": repr(error)}, logging.ERROR)
            text = b"the metrics could not be collected; see the daemon's log\n"
            return Answer(HTTPStatus.INTERNAL_SERVER_ERROR, text)
        if "gzip" in fields.get("accept-encoding", ""):
            return Answer(HTTPStatus.OK, gzip.compress(body), content_type, "gzip")
        return Answer(HTTPStatus.OK, body, content_type)

    return answer
