"""Metrics and session states of a daemon that loaders read from."""

import shutil
import subprocess
import time
import urllib.request
from functools import partial
from pathlib import Path

import pytest
from gyre_client import Loader
from gyre_client.errors import UnknownDataset
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection
from gyre_protos.v1 import loader_pb2 as pb
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import Daemon, GyredCommand, StartDaemon
from tests.waiting import until

DEADLINE_S = 150.0


@pytest.fixture
def daemon(gyred: StartDaemon, token_files: Path) -> Daemon:
    dataset = {
        "uri": str(token_files),
        "format": "tokens",
        "dtype": "uint16",
        "sequence_length": 10,
    }
    return gyred({"metrics_listen": "tcp:127.0.0.1:0", "datasets": {"tokens": dataset}})


def metrics_url(daemon: Daemon) -> str:
    ready = next(event for event in daemon.events() if event["event"] == "ready")
    return f"http://{ready['metrics'].removeprefix('tcp:')}/metrics"


def scrape(daemon: Daemon) -> str:
    with urllib.request.urlopen(metrics_url(daemon), timeout=120) as response:
        text: str = response.read().decode()
        return text


def of_job(daemon: Daemon, job: str) -> dict[str, float]:
    """A job's metrics, without the common prefix of their names."""
    families = text_string_to_metric_families(scrape(daemon))
    samples = [
        sample
        for family in families
        for sample in family.samples
        if sample.labels.get("job_name") == job
    ]
    return {sample.name.removeprefix("gyre_job_"): sample.value for sample in samples}


def state(daemon: Daemon) -> pb.SessionState:
    with Connection(parse_address(daemon.address)) as connection:
        (session,) = connection.status().sessions
    return session


def test_a_job_s_counters_outlive_its_sessions(daemon: Daemon) -> None:
    for num_batches in (30, 50):
        with Loader(
            "tokens", batch_size=20, prefetch_batches=4, job="train", address=daemon.address
        ) as loader:  # its wait for the first batch comes with the next credit
            taken = [next(loader) for _ in range(num_batches)]
            until(lambda: of_job(daemon, "train")["sessions"] == 1)
            assert of_job(daemon, "train")["memory_reserved_bytes"] > 0
            its = {name.removeprefix("gyre_job_") for name in state(daemon).metrics}
            assert its | {"sessions", "shuffle_quality"} == of_job(daemon, "train").keys()
        del taken
        until(lambda: of_job(daemon, "train")["sessions"] == 0)
    found = of_job(daemon, "train")
    assert found["batches_sent_total"] >= 80
    assert found["sent_bytes_total"] >= 80 * 20 * (10 * 2 + 8)
    assert found["memory_reserved_bytes"] == found["memory_bytes"] == found["held_batches"] == 0
    assert 0 < found["window_ready_batch_seconds_total"] <= found["window_size_batch_seconds_total"]
    assert found["trainer_starved_seconds_total"] > 0, (
        "a trainer waits for its first batch at least"
    )


def test_a_trainer_that_takes_nothing_fills_its_window(daemon: Daemon) -> None:
    with Loader(
        "tokens", batch_size=20, prefetch_batches=4, job="slow", address=daemon.address
    ) as loader:
        next(loader)
        seen: list[pb.SessionState] = []

        def is_full() -> bool:
            """Whether the window was full between two looks; the client's queue fills first."""
            seen.append(state(daemon))
            before, after = seen[-2:] if len(seen) > 1 else (seen[0], seen[0])
            size_s = after.window_size_batch_s - before.window_size_batch_s
            ready_s = after.window_ready_batch_s - before.window_ready_batch_s
            return size_s > 0 and ready_s == pytest.approx(size_s)

        until(is_full)
        before, after = seen[-2:]
        assert after.wait_trainer_s > before.wait_trainer_s, "time that is still going on counts"
        assert after.wait_storage_s == before.wait_storage_s
        assert after.trainer_waited_s == before.trainer_waited_s


def test_an_idle_daemon_has_its_metrics_and_none_of_a_job(daemon: Daemon) -> None:
    first, second = (
        {line.split()[0] for line in scrape(daemon).splitlines() if line[0] != "#"}
        for _ in range(2)
    )
    assert first == second
    assert {
        "gyre_sessions",
        "gyre_memory_budget_bytes",
        "gyre_event_loop_lag_seconds_count",
        "process_open_fds",
    } <= first
    assert not any("job_name=" in name for name in first)


def test_errors_are_counted_by_kind_and_reloads_by_outcome(daemon: Daemon) -> None:
    def value(series: str) -> float:
        (line,) = (line for line in scrape(daemon).splitlines() if line.startswith(f"{series} "))
        return float(line.split()[-1])

    def after_reload(since: float, is_good: float) -> bool:
        at = value("gyre_last_reload_timestamp_seconds")
        return at >= since and value("gyre_last_reload_successful") == is_good

    unknown = 'gyre_errors_total{kind="UnknownDataset"}'
    assert value(unknown) == value("gyre_last_reload_timestamp_seconds") == 0
    with pytest.raises(UnknownDataset):
        next(Loader("unknown", batch_size=20, address=daemon.address))
    assert value(unknown) == 1
    assert value("gyre_last_reload_successful") == 1
    text = daemon.config_path.read_text()
    for config, is_good in (("memory_bugdet = 1", 0.0), (text, 1.0)):
        before = time.time()
        daemon.reconfigure(config)  # the log has it a moment before the metrics
        until(partial(after_reload, before, is_good))


@pytest.mark.skipif(
    not shutil.which("promtool"), reason="promtool comes with Debian's package prometheus"
)
def test_promtool_accepts_the_metrics(daemon: Daemon) -> None:
    with Loader("tokens", batch_size=20, job='a "job" with \\', address=daemon.address) as loader:
        next(loader)
        text = scrape(daemon)
    assert 'job_name="a \\"job\\" with \\\\"' in text
    checked = subprocess.run(
        ["promtool", "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_metrics_for_other_hosts_must_be_asked_for(
    tmp_path: Path, gyred_command: GyredCommand
) -> None:
    path = tmp_path / "gyre.toml"
    path.write_text('metrics_listen = "tcp:0.0.0.0:9847"')
    for command in ("check-config", "serve"):
        refused = gyred_command(command, "--config", str(path))
        assert refused.returncode == 2
        assert "metrics_public = true" in refused.stderr
    path.write_text('metrics_listen = "tcp:0.0.0.0:9847"\nmetrics_public = true')
    assert gyred_command("check-config", "--config", str(path)).returncode == 0


def test_a_port_in_use_ends_the_daemon_before_it_serves(
    daemon: Daemon, tmp_path: Path, gyred_command: GyredCommand
) -> None:
    port = metrics_url(daemon).removesuffix("/metrics").rpartition(":")[2]
    path = tmp_path / "gyre.toml"
    path.write_text(
        f'listen = ["unix:{tmp_path}/second.sock"]\nmetrics_listen = "tcp:127.0.0.1:{port}"'
    )
    refused = gyred_command("serve", "--config", str(path))
    assert refused.returncode == 2
    assert f"metrics_listen: cannot listen on 127.0.0.1:{port}" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "second.sock").exists()
