"""SIGHUP: datasets are added, removed and changed under running jobs; a bad file does no harm."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_client import Loader
from gyre_client.errors import UnknownDataset
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection

from tests.conftest import Daemon, StartDaemon, to_toml

DEADLINE_S = 150.0


def tokens(folder: Path, first: int) -> dict[str, Any]:
    """A dataset of 100 samples of ten tokens; the tokens count up from `first`."""
    path = folder / f"from-{first}.bin"
    if not path.exists():
        np.arange(first, first + 1000, dtype=np.uint16).tofile(path)
    return {"uri": str(path), "format": "tokens", "dtype": "uint16", "sequence_length": 10}


def config(daemon: Daemon, datasets: Mapping[str, Any], **keys: Any) -> str:
    return to_toml(
        {"listen": [daemon.address], "drain_timeout_s": 3.0, **keys, "datasets": datasets}
    )


def served(daemon: Daemon) -> list[str]:
    with Connection(parse_address(daemon.address)) as connection:
        return [dataset.name for dataset in connection.list_datasets().datasets]


def smallest(daemon: Daemon, dataset: str) -> int:
    with Loader(dataset, batch_size=100, address=daemon.address) as loader:
        return int(next(loader)["tokens"].long().min())


def test_datasets_come_and_go_and_change_while_jobs_read(
    gyred: StartDaemon, tmp_path: Path
) -> None:
    first_of = {"stays": 0, "changes": 1000, "goes": 2000}
    daemon = gyred(
        {"datasets": {name: tokens(tmp_path, first) for name, first in first_of.items()}}
    )
    with contextlib.ExitStack() as stack:
        readers = {
            name: stack.enter_context(
                Loader(name, batch_size=100, prefetch_batches=1, address=daemon.address)
            )
            for name in first_of
        }
        for name, reader in readers.items():
            assert int(next(reader)["tokens"].long().min()) == first_of[name]
        datasets = {
            "stays": tokens(tmp_path, 0),
            "changes": tokens(tmp_path, 5000),
            "comes": tokens(tmp_path, 6000),
        }
        event = daemon.reconfigure(
            config(daemon, datasets, lease_s=7.0, index_dir=str(tmp_path / "elsewhere"))
        )
        assert event["event"] == "reloaded"
        assert (event["added"], event["removed"], event["changed"]) == (
            ["comes"],
            ["goes"],
            ["changes"],
        )
        assert event["need_restart"] == ["lease_s", "index_dir"]
        assert served(daemon) == ["changes", "comes", "stays"]
        assert [smallest(daemon, name) for name in ("stays", "changes", "comes")] == [0, 5000, 6000]
        with pytest.raises(UnknownDataset):
            Loader("goes", batch_size=100, address=daemon.address)
        for name, reader in readers.items():
            for _ in range(20):
                assert int(next(reader)["tokens"].long().min()) == first_of[name], (
                    "a session goes on with what it reads"
                )


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda text: text + "\n[", "is not valid TOML"),
        (lambda text: "", "the file has no dataset at all"),
        (lambda text: "\n", "the file has no dataset at all"),
        (lambda text: text.partition("\n[")[0], "the file has no dataset at all"),
        (lambda text: text[: text.rindex("uri") + 5], "is not valid TOML"),
        (
            lambda text: text.replace("sequence_length", "sequence_lenght"),
            "did you mean `sequence_length`?",
        ),
        (lambda text: "memory_bugdet = 1\n" + text, "did you mean `memory_budget`?"),
        (lambda text: "prefetch_batches = 1025\n" + text, "is 1025: expected `int` <= 1024"),
    ],
)
def test_a_bad_file_changes_nothing(
    gyred: StartDaemon, tmp_path: Path, spoil: Callable[[str], str], complaint: str
) -> None:
    daemon = gyred({"datasets": {"stays": tokens(tmp_path, 0)}})
    good = config(daemon, {"stays": tokens(tmp_path, 0), "comes": tokens(tmp_path, 1000)})
    event = daemon.reconfigure(spoil(good))
    assert event["event"] == "reload refused"
    assert complaint in event["reason"]
    assert event["kept"] == ["stays"]
    assert served(daemon) == ["stays"]
    assert smallest(daemon, "stays") == 0
    assert daemon.reconfigure(good)["added"] == ["comes"]
    assert served(daemon) == ["comes", "stays"]


def test_the_service_manager_is_notified_of_a_reload(gyred: StartDaemon, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(DEADLINE_S)
        daemon = gyred({}, {"NOTIFY_SOCKET": str(tmp_path / "notify")})
        assert manager.recv(100) == b"READY=1"
        for text in (config(daemon, {}), "nonsense"):
            began_us = time.monotonic_ns() // 1000
            daemon.reconfigure(text)
            state, _, moment = manager.recv(100).partition(b"\nMONOTONIC_USEC=")
            assert state == b"RELOADING=1"
            assert int(moment) >= began_us
            assert manager.recv(100) == b"READY=1"


def test_a_pipe_as_configuration_keeps_nobody_waiting(gyred: StartDaemon, tmp_path: Path) -> None:
    daemon = gyred({"datasets": {"set": tokens(tmp_path, 0)}})
    text = daemon.config_path.read_text()
    daemon.config_path.unlink()
    os.mkfifo(daemon.config_path)
    begin = daemon.log_path.stat().st_size
    assert daemon.process
    daemon.process.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + DEADLINE_S
    while not (told := [each for each in daemon.events(begin) if "reload" in each["event"]]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert told[0]["event"] == "reload refused"
    assert "it is a pipe, a socket or a device" in told[0]["reason"]
    assert served(daemon) == ["set"]
    daemon.config_path.unlink()
    assert daemon.reconfigure(text)["event"] == "reloaded"


def test_a_configuration_that_others_may_read_is_a_warning_at_start_and_at_reload(
    gyred: StartDaemon, tmp_path: Path
) -> None:
    secret = "wJalrXUtnFEMI-K7MDENG"
    storage = {"region": "x", "access_key_id": "x", "secret_access_key": secret}
    remote = {**tokens(tmp_path, 0), "uri": "s3://bucket/x.bin", "storage": storage}
    daemon = gyred({"datasets": {"remote": remote}}, {"GYRE_MEMORY_BUGDET": secret})
    (misspelt,) = [each for each in daemon.events() if each["event"] == "configuration warning"]
    assert "did you mean GYRE_MEMORY_BUDGET?" in misspelt["reason"]
    daemon.config_path.chmod(0o644)
    daemon.reconfigure(daemon.config_path.read_text())
    told = [each["reason"] for each in daemon.events() if each["event"] == "configuration warning"]
    assert any("all users may read it (mode 0644)" in reason for reason in told)
    assert secret not in daemon.log_path.read_text()
