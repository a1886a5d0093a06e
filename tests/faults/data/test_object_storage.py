"""A daemon that reads from an object storage in trouble.

No batch is wrong, little is asked twice, and it recovers.
"""

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_client import Loader
from gyre_client.errors import CorruptSample, NotAllowed, ShardMissing, StorageUnavailable
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1 import loader_pb2_grpc as pb_grpc
from prometheus_client.parser import text_string_to_metric_families

from tests.channels import identified_channel
from tests.conftest import Daemon, StartDaemon
from tests.daemons import status
from tests.object_server.process import ObjectServerProcess, object_server
from tests.object_server.script import Rule, Script

LENGTH = 128  # tokens of a sample
NUM_SHARDS, SHARD_SAMPLES = 4, 600
NUM_SAMPLES = NUM_SHARDS * SHARD_SAMPLES
# each shard's head is looked at, and its middle for the fingerprint
NUM_READS = NUM_SAMPLES + 2 * NUM_SHARDS
MAX_REQUESTS = 64
TOKENS = (
    (np.arange(NUM_SAMPLES * LENGTH, dtype=np.uint32) * 2654435761).astype(np.uint32).view(np.int32)
)


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServerProcess]:
    with object_server() as process:
        yield process


@pytest.fixture(autouse=True)
def _sound(server: ObjectServerProcess) -> None:
    server.follow(Script())
    for number, shard in enumerate(np.split(TOKENS, NUM_SHARDS)):
        server.put(f"/data/{number}.bin", shard.tobytes())


@pytest.fixture
def daemon(gyred: StartDaemon, server: ObjectServerProcess) -> Daemon:
    return start(gyred, server.storage_settings)


def start(gyred: StartDaemon, settings: Mapping[str, str], **more: Any) -> Daemon:
    about = {
        "format": "tokens",
        "dtype": "int32",
        "sequence_length": LENGTH,
        "cache": False,
        "storage": settings,
    }
    limits = {"max_requests": MAX_REQUESTS, "read_deadline_s": 20.0, "prefetch_batches": 8}
    return gyred({**limits, **more, "datasets": {"tokens": {"uri": "s3://data/*.bin", **about}}})


def slow(rules: list[Rule]) -> Script:
    return Script(first_byte_p50_s=0.005, first_byte_p99_s=0.02, rules=rules)


def loader(daemon: Daemon, epochs: int | None = 1) -> Loader:
    common: dict[str, Any] = {
        "batch_size": 50,
        "seed": 1,
        "address": daemon.address,
        "reattach_timeout_s": 1.0,
    }
    return Loader("tokens", **common, epochs=epochs, restart=True)


def check_epoch(loader: Loader, trouble: Mapping[int, Callable[[], None]] | None = None) -> None:
    """Read an epoch, and check that every sample comes once with its own bytes.

    Each value of `trouble` is called when the batch of that number has been read.
    """
    seen: list[int] = []
    for number, batch in enumerate(loader):
        ids = batch["sample_id"].numpy()
        np.testing.assert_array_equal(batch["tokens"].numpy(), TOKENS.reshape(-1, LENGTH)[ids])
        seen += ids.tolist()
        if trouble and number in trouble:
            trouble[number]()
    assert sorted(seen) == list(range(NUM_SAMPLES))


def outcomes(daemon: Daemon) -> dict[str, int]:
    return {
        count.outcome: count.num_requests
        for count in status(daemon).storage
        if count.kind == "read"
    }


def check_polite(
    daemon: Daemon, server: ObjectServerProcess, num_wanted: int, share: float = 0.2
) -> dict[str, int]:
    """No more requests than the budget allows, each of them counted.

    Gives the counts by outcome.
    """
    counted, answered = outcomes(daemon), server.counts()["reads"]
    # requests on connections that were reset, or were still being opened
    num_unheard = sum(counted.values()) - answered
    assert 0 <= num_unheard <= MAX_REQUESTS
    assert counted["ok"] == num_wanted
    assert "error" not in counted
    assert answered - num_wanted <= share * num_wanted
    return counted


def after(condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_storm_of_503_passes_and_every_sample_arrives(
    daemon: Daemon, server: ObjectServerProcess
) -> None:
    with loader(daemon, epochs=2) as reading:
        batches = iter(reading)
        for _ in range(5):
            next(batches)
        server.misbehave(Rule("status", status=503))
        server.forget()
        after(lambda: status(daemon).endpoints[0].limit <= 4)
        time.sleep(1.0)  # nothing gets through, and hardly anything is asked
        assert server.counts()["reads"] < 4 * MAX_REQUESTS
        server.misbehave()
        for batch in batches:
            ids = batch["sample_id"].numpy()
            np.testing.assert_array_equal(batch["tokens"].numpy(), TOKENS.reshape(-1, LENGTH)[ids])
    counted = outcomes(daemon)
    # two steps that wait for the same range share one request
    assert NUM_READS < counted["ok"] <= NUM_READS + NUM_SAMPLES
    assert 0 < counted["refused"] <= 0.2 * 2 * NUM_SAMPLES
    assert set(counted) <= {"ok", "refused", "hedged"}
    assert status(daemon).endpoints[0].limit == MAX_REQUESTS


def test_a_storage_that_throttles_gets_fewer_requests_at_once(
    daemon: Daemon, server: ObjectServerProcess
) -> None:
    with loader(daemon) as reading:
        next(iter(reading))
    refused_before = outcomes(daemon).get("refused", 0)
    server.follow(slow([Rule("status", share=0.2, status=429, count=100)]))
    with loader(daemon) as reading:
        check_epoch(reading)
    assert outcomes(daemon)["refused"] - refused_before <= 100


def test_stragglers_are_overtaken(daemon: Daemon, server: ObjectServerProcess) -> None:
    server.follow(slow([Rule("delay", share=0.01, delay_s=5.0)]))
    server.forget()
    began = time.monotonic()
    with loader(daemon) as reading:
        check_epoch(reading)
    assert server.counts()["faults"]["delay"] > 5
    counted = outcomes(daemon)
    assert counted["hedged"] >= server.counts()["faults"]["delay"] / 2, time.monotonic() - began
    assert server.counts()["reads"] <= 1.06 * (NUM_SAMPLES + 16)
    timings = [explain(daemon, step) for step in range(NUM_SAMPLES // 50)]
    assert sum(timing.num_hedges for timing in timings) >= counted["hedged"]
    assert all(timing.num_requests == 50 for timing in timings)
    assert all(
        timing.total_s >= timing.read_s >= timing.slowest.first_byte_s > 0 for timing in timings
    )


def explain(daemon: Daemon, step: int) -> pb.BatchTiming:
    with identified_channel(daemon.address) as channel:
        request = pb.ExplainStepRequest(dataset=pb.DatasetRef(name="tokens"), step=step)
        (timing,) = pb_grpc.LoaderStub(channel).ExplainStep(request, timeout=120).timings
        return timing


def test_failures_are_counted_and_shown(gyred: StartDaemon, server: ObjectServerProcess) -> None:
    """The metrics, `gyre status` and, for each batch, `gyre why` show the same numbers."""
    daemon = start(gyred, server.storage_settings, metrics_listen="tcp:127.0.0.1:0", hedge=False)
    rules = [
        Rule("status", share=0.05, count=60),
        Rule("reset", share=0.02),
        Rule("delay", share=0.1, delay_s=0.1),
    ]
    with loader(daemon) as reading:
        # probes of shards belong to no batch
        check_epoch(reading, {0: lambda: server.follow(slow(rules))})
    counted = outcomes(daemon)
    assert counted["refused"] > 10
    assert counted["retried"] > 10
    (url,) = (event["metrics"] for event in daemon.events() if event["event"] == "ready")
    with urllib.request.urlopen(
        f"http://{url.removeprefix('tcp:')}/metrics", timeout=120
    ) as response:
        families = text_string_to_metric_families(response.read().decode())
        (family,) = (family for family in families if family.name == "gyre_storage_requests")
        reads = [sample for sample in family.samples if sample.labels["kind"] == "read"]
    assert {sample.labels["outcome"]: sample.value for sample in reads if sample.value} == counted
    shown = json.loads(gyre(daemon, "status", "--json"))
    assert {
        each["outcome"]: int(each["num_requests"])
        for each in shown["storage"]
        if each["kind"] == "read"
    } == counted
    timings = {step: explain(daemon, step) for step in range(NUM_SAMPLES // 50)}
    assert sum(timing.num_refused for timing in timings.values()) == counted["refused"]
    assert (
        sum(timing.num_retries for timing in timings.values())
        == counted["refused"] + counted["retried"]
    )
    worst = max(timings, key=lambda step: timings[step].num_refused)
    told = gyre(daemon, "why", "tokens", "--step", str(worst))
    assert (
        f"{timings[worst].num_refused} times refused, {timings[worst].num_retries} sent again"
        in told
    )
    parts = ("in the queue", "in failed tries and pauses", "until the first byte", "for the body")
    assert re.search(
        "slowest +[^:]+: " + ", ".join(rf"\S+ ms {part}" for part in parts), " ".join(told.split())
    )


def gyre(daemon: Daemon, *command: str) -> str:
    line = [sys.executable, "-m", "gyre_client", *command, "--address", daemon.address]
    return subprocess.run(line, capture_output=True, text=True, check=True, timeout=120).stdout


def test_broken_bodies_are_read_again(daemon: Daemon, server: ObjectServerProcess) -> None:
    server.follow(
        Script(
            rules=[Rule(fault, share=0.02) for fault in ("reset", "truncate", "short", "status")]
        )
    )
    server.forget()
    with loader(daemon) as reading:
        check_epoch(reading, {20: server.hang_up})
    counted = check_polite(daemon, server, NUM_READS)
    assert counted["retried"] > 10
    assert set(server.counts()["faults"]) == {"reset", "truncate", "short", "status"}


def test_expired_credentials_are_refreshed(gyred: StartDaemon, server: ObjectServerProcess) -> None:
    """The instance's metadata service has newer credentials by then."""
    server.follow(Script(accepted_key="first", issued_key="first"))
    settings = {key: value for key, value in server.storage_settings.items() if "key" not in key}
    daemon = start(gyred, {**settings, "metadata_endpoint": server.url, "imdsv1_fallback": "true"})
    with loader(daemon) as reading:
        check_epoch(
            reading, {5: lambda: server.follow(Script(accepted_key="second", issued_key="second"))}
        )
    assert outcomes(daemon)["retried"] > 0
    server.follow(Script(accepted_key="third", issued_key="second"))
    with (
        loader(daemon) as reading,
        pytest.raises(NotAllowed, match=r"refused access to \d\.bin \(InvalidAccessKeyId\); check"),
    ):
        check_epoch(reading)
    server.follow(Script(accepted_key="third", issued_key="third"))
    with loader(daemon) as reading:
        check_epoch(reading)


@pytest.mark.parametrize("change", ["vanished", "replaced", "no etags", "grown", "lies"])
def test_an_object_that_is_no_longer_what_was_listed(
    daemon: Daemon, server: ObjectServerProcess, change: str
) -> None:
    changes: dict[str, Any] = {
        "vanished": lambda: server.delete("/data/2.bin"),
        "replaced": lambda: server.put("/data/2.bin", bytes(SHARD_SAMPLES * LENGTH * 4)),
        "no etags": lambda: server.put("/data/2.bin", bytes(SHARD_SAMPLES * LENGTH * 4)),
        "grown": lambda: server.put("/data/2.bin", bytes(SHARD_SAMPLES * LENGTH * 4 + 1)),
        "lies": lambda: server.misbehave(Rule("other etag", match="/2.bin")),
    }
    if change == "no etags":
        server.follow(Script(tells=["modified"]))
    error = ShardMissing if change == "vanished" else CorruptSample
    sentence = r"2\.bin does not exist" if change == "vanished" else r"2\.bin has changed"
    with loader(daemon) as reading, pytest.raises(error, match=sentence) as caught:
        check_epoch(reading, {0: changes[change]})
    assert caught.value.facts["shard"] == "2.bin"
    assert outcomes(daemon)["error"] >= 1


def test_a_lost_endpoint_is_an_error_that_says_what_was_tried_until_it_returns(
    gyred: StartDaemon, tmp_path: Path
) -> None:
    (tmp_path / "objects/data").mkdir(parents=True)
    for number, shard in enumerate(np.split(TOKENS, NUM_SHARDS)):
        (tmp_path / f"objects/data/{number}.bin").write_bytes(shard.tobytes())
    with object_server(tmp_path / "objects") as server:
        daemon = start(gyred, server.storage_settings, read_deadline_s=1.5, prefetch_batches=2)
        with loader(daemon) as reading:
            check_epoch(reading)
    with (
        loader(daemon) as reading,
        pytest.raises(StorageUnavailable, match=r"storage at http\S+ did not answer") as caught,
    ):
        check_epoch(reading)
    assert "requests were sent" in str(caught.value)
    assert "Connection refused" in str(caught.value)
    before = outcomes(daemon)
    with (
        object_server(tmp_path / "objects", port=int(server.url.rpartition(":")[2])),
        loader(daemon) as reading,
    ):
        check_epoch(reading)
    assert outcomes(daemon)["ok"] - before["ok"] == NUM_SAMPLES
