"""The metrics of a daemon, read by the Prometheus library's own parsers."""

import asyncio
from dataclasses import dataclass, replace

import pytest
from gyre_client.command.status import full_text
from gyre_daemon.monitoring.http_ports import new_registry
from gyre_daemon.monitoring.metrics import (
    BOUNDS_S,
    Census,
    JobKey,
    LoopLag,
    Metrics,
    RequestCount,
    RequestLabels,
    SessionGauges,
    SessionTotals,
    WindowTimes,
    counter,
    series_of,
)
from gyre_daemon.service.replies import from_census
from gyre_protos.v1 import loader_pb2 as pb
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families as parse_text

TRAIN = JobKey("uid:1004", "train")
HOSTILE = 'a "quoted" \\ back\nnew line {} \u2028 \x1b[31m'


def late(*delays_s: float) -> LoopLag:
    lag = LoopLag()
    for delay_s in delays_s:
        lag.note(delay_s)
    return lag


CENSUS = Census(
    version="1.2.3",
    counts=Metrics(
        num_batches_sent=12,
        num_bytes_sent=3400,
        num_substitutes_sent=5,
        storage={
            RequestLabels("s3", "read", "error"): RequestCount(2, 0),
            RequestLabels("file", "read", "ok"): RequestCount(7, 4096),
        },
    ),
    is_draining=False,
    memory_budget_bytes=1000,
    memory_reserved_bytes=600,
    num_sessions=2,
    totals={
        TRAIN: SessionTotals(10, 3000, WindowTimes(6.0, 8.0, 0.5, 2.0, 0.75), 0.25, 4),
        JobKey("uid:9", HOSTILE): SessionTotals(2, 400),
    },
    jobs={
        TRAIN: SessionGauges(3, 1, 8, 300, 600),
        JobKey("uid:9", HOSTILE): SessionGauges(),
    },
    num_job_sessions={TRAIN: 2, JobKey("uid:9", HOSTILE): 0},
    loop_lag=late(-0.1, 0.0, 0.003, 0.0025, 100.0),
)


def samples(text: str) -> dict[tuple[str, str], float]:
    """By name and the value of the label `job_name`."""
    return {
        (sample.name, sample.labels.get("job_name", "")): sample.value
        for family in parse_text(text)
        for sample in family.samples
        if not sample.name.startswith("gyre_event_loop_lag_seconds_bucket")
    }


def rendered(census: Census) -> str:
    """A daemon's registry, rendered in another thread than that of the event loop."""

    async def scrape() -> bytes:
        return await asyncio.to_thread(generate_latest, new_registry(lambda: census))

    return asyncio.run(scrape()).decode()


def test_jobs_of_one_name_and_two_users_are_two_series() -> None:
    """Prometheus refuses an answer that has a series twice."""
    totals = {JobKey(f"uid:{number}", "train"): SessionTotals(number) for number in (1, 2)}
    text = rendered(replace(CENSUS, totals=totals, jobs={}))
    for number in (1, 2):
        series = f'gyre_job_batches_sent_total{{job_name="train",user="uid:{number}"}}'
        assert f"{series} {number}.0\n" in text


def test_metrics_are_the_numbers_of_the_census() -> None:
    found = samples(rendered(CENSUS))
    assert found["gyre_memory_budget_bytes", ""] == 1000
    assert found["gyre_memory_reserved_bytes", ""] == 600
    assert found["gyre_sessions", ""] == 2
    assert found["gyre_batches_sent_total", ""] == 12
    assert found["gyre_sent_bytes_total", ""] == 3400
    assert found["gyre_substitutes_sent_total", ""] == 5
    assert found["gyre_draining", ""] == 0
    of_job = {
        name.removeprefix("gyre_job_"): value
        for (name, job), value in found.items()
        if job == "train"
    }
    assert of_job == {
        "batches_sent_total": 10,
        "sent_bytes_total": 3000,
        "window_ready_batch_seconds_total": 6.0,
        "window_size_batch_seconds_total": 8.0,
        "wait_for_storage_seconds_total": 0.5,
        "wait_for_processor_seconds_total": 0.75,
        "wait_for_trainer_seconds_total": 2.0,
        "trainer_starved_seconds_total": 0.25,
        "substitutes_sent_total": 4,
        "sessions": 2,
        "window_ready_batches": 3,
        "window_size_batches": 8,
        "held_batches": 1,
        "memory_bytes": 300,
        "memory_reserved_bytes": 600,
    }
    assert found["gyre_job_batches_sent_total", HOSTILE] == 2, "any name of a job is escaped"
    assert found["gyre_job_sessions", HOSTILE] == 0, "a job without a session keeps its counters"
    assert found["process_open_fds", ""] > 0


@dataclass(slots=True)
class _MoreCounts(Metrics):
    num_new: int = counter("gyre_new_things", "Things that are new.")


@dataclass(frozen=True, slots=True)
class _MoreTotals(SessionTotals):
    num_new: int = counter("gyre_job_new_things", "Things of a job that are new.")


def test_a_declared_metric_is_scraped_and_in_the_status_of_any_client() -> None:
    totals = _MoreTotals(num_new=1234)
    census = replace(CENSUS, counts=_MoreCounts(num_new=56), totals={TRAIN: totals})
    found = samples(rendered(census))
    assert found["gyre_new_things_total", ""] == 56
    assert found["gyre_job_new_things_total", "train"] == 1234
    status = from_census(census, has_cache=False)
    metrics = {each.name: each.value for each in series_of(totals)}
    status.sessions.add(reader=pb.Reader(job="train"), metrics=metrics)
    read = pb.DaemonStatus.FromString(status.SerializeToString())
    text = full_text(read, 300)
    assert "56  gyre_new_things_total" in text
    assert "NEW THINGS" in text
    assert "1,234" in text
    assert not any("job_name" in each.name for each in read.metrics)
    assert [each.meaning for each in read.metrics if each.name == "gyre_new_things_total"] == [
        "Things that are new."
    ]


def test_storage_requests_are_told_apart_by_kind_and_outcome() -> None:
    (family,) = (
        family for family in parse_text(rendered(CENSUS)) if family.name == "gyre_storage_requests"
    )
    assert [
        ([sample.labels[name] for name in RequestLabels._fields], sample.value)
        for sample in family.samples
    ] == [(["s3", "read", "error"], 2.0), (["file", "read", "ok"], 7.0)]


def test_shuffle_quality_is_told_by_what_is_measured() -> None:
    qualities = {(*TRAIN, of): value for of, value in (("displacement", 0.9), ("mixing", 1.0))}
    text = rendered(replace(CENSUS, qualities=qualities))
    for (_, _, of), value in qualities.items():
        labels = f'job_name="train",of="{of}",user="uid:1004"'
        assert f"gyre_job_shuffle_quality{{{labels}}} {value}\n" in text


def test_lag_is_a_histogram() -> None:
    (family,) = (
        family
        for family in parse_text(rendered(CENSUS))
        if family.name == "gyre_event_loop_lag_seconds"
    )
    by_bound = {
        sample.labels["le"]: sample.value
        for sample in family.samples
        if sample.name.endswith("_bucket")
    }
    assert len(by_bound) == len(BOUNDS_S) + 1
    assert (
        by_bound["0.001"],
        by_bound["0.0025"],
        by_bound["0.005"],
        by_bound["5.0"],
        by_bound["+Inf"],
    ) == (2, 3, 4, 4, 5)
    assert CENSUS.loop_lag.sum_s == pytest.approx(100.0055)
