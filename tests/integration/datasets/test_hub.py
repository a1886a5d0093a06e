"""Datasets of the Hugging Face Hub, read from a server that speaks the hub's protocol."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gyre_client import Loader, objects
from gyre_client.errors import (
    ConfigError,
    CursorRejected,
    GyreError,
    InvalidRequest,
    NotAllowed,
    ShardMissing,
    StorageUnavailable,
)

from tests.conftest import Daemon, StartDaemon
from tests.hub_server import REPOSITORY, HubServer

TOKEN = "hf_secretOfTheDaemon"


def lines(first: int, count: int = 3) -> bytes:
    return b"".join(json.dumps({"id": first + k}).encode() + b"\n" for k in range(count))


FILES = {
    "README.md": b"songs",
    "data/0.jsonl": lines(0),
    "data/1.jsonl": lines(10),
    "data/2.jsonl": lines(20),
    "small/0.jsonl": lines(30),
}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    server = HubServer()
    server.large = {name for name in FILES if name.startswith("data/")}
    server.commit(FILES)
    yield server
    server.close()


def start(
    gyred: StartDaemon,
    hub: HubServer,
    path: str,
    *,
    storage: dict[str, Any] | None = None,
    data_format: str = "jsonl",
    **more: Any,
) -> Daemon:
    settings = {"endpoint": hub.url, "redirect_hosts": [hub.storage], **(storage or {})}
    uri = f"hf://datasets/{REPOSITORY}{path}"
    table = {"uri": uri, "format": data_format, "cache": False, "storage": settings}
    return gyred({"datasets": {"set": table}, **more})


def ids(daemon: Daemon, **options: Any) -> list[int]:
    with Loader(
        "set", batch_size=3, order="sequential", address=daemon.address, **options
    ) as loader:
        return [each["id"] for batch in loader for each in objects(batch, "json")]


@pytest.mark.parametrize("path", ["/data", "@main/data/*.jsonl", "/data/{0..2}.jsonl"])
def test_files_are_read_from_the_storage_behind_the_hub(
    path: str, gyred: StartDaemon, hub: HubServer, tmp_path: Path
) -> None:
    hub.token = TOKEN
    (tmp_path / "token").write_text(TOKEN + "\n")
    daemon = start(gyred, hub, path, storage={"token_file": str(tmp_path / "token")})
    assert ids(daemon) == [0, 1, 2, 10, 11, 12, 20, 21, 22]
    assert hub.num_requests("hub", "/resolve/") == 3, "the hub is asked once for each file"
    assert hub.num_requests("storage") > 3
    assert hub.tokens_at_storage == []
    assert TOKEN not in daemon.log_path.read_text()
    assert "signature" not in daemon.log_path.read_text()


def test_small_files_are_read_from_the_hub_with_the_token(
    gyred: StartDaemon, hub: HubServer, tmp_path: Path
) -> None:
    hub.token = TOKEN
    (tmp_path / "token").write_text(TOKEN)
    storage = {"token_file": str(tmp_path / "token"), "redirect_hosts": []}
    daemon = start(gyred, hub, "/small", storage=storage)
    assert ids(daemon) == [30, 31, 32]
    assert hub.num_requests("storage") == 0


def test_a_revision_is_resolved_once_and_the_fingerprint_covers_the_contents(
    gyred: StartDaemon, hub: HubServer
) -> None:
    daemon = start(gyred, hub, "/data")
    with Loader("set", batch_size=3, order="sequential", address=daemon.address) as loader:
        batches, before = iter(loader), loader.fingerprint
        found = [each["id"] for each in objects(next(batches), "json")]
        state = loader.state_dict()
        hub.commit({**FILES, "README.md": b"other", "data/0.jsonl": lines(5)})
        found += [each["id"] for batch in batches for each in objects(batch, "json")]
    assert found == [0, 1, 2, 10, 11, 12, 20, 21, 22], "an open dataset is one commit"
    daemon.stop()
    daemon = daemon.restart()
    with Loader("set", batch_size=3, order="sequential", address=daemon.address) as loader:
        assert loader.fingerprint != before, "as many bytes, but others"
        with pytest.raises(CursorRejected, match="the cursor belongs to other data"):
            loader.load_state_dict(state)
    hub.commit({**FILES, "README.md": b"newer"})
    daemon.stop()
    daemon = daemon.restart()
    with Loader("set", batch_size=3, order="sequential", address=daemon.address) as loader:
        assert loader.fingerprint == before, "files that are not read do not matter"


@pytest.mark.parametrize("refused", ["/revision/", "/tree/"])
def test_all_jobs_wait_as_long_as_the_hub_says(
    refused: str, gyred: StartDaemon, hub: HubServer
) -> None:
    hub.refusals, hub.refused = 2, refused
    daemon = start(gyred, hub, "/data")
    assert ids(daemon) == [0, 1, 2, 10, 11, 12, 20, 21, 22]
    assert hub.refusals == 0
    hub.refusals, hub.retry_after_s = 1, 4000
    daemon.stop()
    daemon = daemon.restart()
    for _ in range(2):
        before = len(hub.requests)
        with pytest.raises(
            GyreError, match=r"the hub was asked too often; it can be asked in \d+ s"
        ):
            ids(daemon, reattach_timeout_s=0.2)
    assert len(hub.requests) == before, "it is not asked again before"


def test_reads_from_the_hub_itself_fail_with_what_it_said(
    gyred: StartDaemon, hub: HubServer
) -> None:
    daemon = start(gyred, hub, "/small", read_deadline_s=1.0)
    with Loader("set", batch_size=3, address=daemon.address, reattach_timeout_s=0.2) as loader:
        hub.refusals, hub.retry_after_s = 1, 4000
        with pytest.raises(GyreError, match=r"the hub was asked too often"):
            list(loader)
    assert hub.refusals == 0


@pytest.mark.parametrize(
    ("path", "storage", "kind", "text"),
    [
        ("/other", {}, ShardMissing, "does not exist"),
        ("/data/3.jsonl", {}, ShardMissing, "does not exist"),
        ("@v2/data", {}, ShardMissing, "does not exist"),
        ("/data", {"revision": "v2"}, ShardMissing, "does not exist"),
        ("@main/data", {"revision": "v2"}, InvalidRequest, "leave one of them out"),
        ("/data", {"redirect_hosts": []}, NotAllowed, "redirects to another host or port"),
        (
            "/data",
            {"token": "x"},
            ConfigError,
            "`token` is unknown; known are endpoint, token_file",
        ),
        ("/data", {"token_file": "/no/such"}, ConfigError, "cannot be read: No such file"),
    ],
)
def test_what_cannot_be_read_is_refused(
    path: str,
    storage: dict[str, Any],
    kind: type[GyreError],
    text: str,
    gyred: StartDaemon,
    hub: HubServer,
) -> None:
    with pytest.raises(kind, match=text):
        ids(start(gyred, hub, path, storage=storage))


def fill_cache(hub: HubServer, home: Path) -> str:
    """Download one folder of the dataset as the hub's library does, and return the commit."""
    script = f"""
from huggingface_hub import snapshot_download
snapshot_download({REPOSITORY!r}, repo_type="dataset", allow_patterns="data/*", max_workers=1)
"""
    command = [sys.executable, "-c", script]
    variables = {"HF_HOME": str(home), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    subprocess.run(command, check=True, env={**os.environ, **variables}, timeout=120)
    return hub.branches["main"]


@pytest.mark.parametrize("why", ["HF_HUB_OFFLINE", "no route"])
def test_without_a_way_to_the_hub_its_cache_is_read(
    why: str, gyred: StartDaemon, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start(gyred, hub, "/data")
    with Loader("set", batch_size=3, order="sequential", address=daemon.address) as loader:
        batches, fingerprint = iter(loader), loader.fingerprint
        next(batches)
        state = loader.state_dict()
    daemon.stop()
    commit = fill_cache(hub, tmp_path / "home")
    hub.close()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    if why == "HF_HUB_OFFLINE":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    daemon = start(gyred, hub, "/data")
    with Loader("set", batch_size=3, order="sequential", address=daemon.address) as loader:
        assert loader.fingerprint == fingerprint
        loader.load_state_dict(state)
        found = [each["id"] for batch in loader for each in objects(batch, "json")]
    assert found == [10, 11, 12, 20, 21, 22]
    (told,) = [line for line in daemon.log_path.read_text().splitlines() if "hub's cache" in line]
    assert commit in told
    absent = ShardMissing if why == "HF_HUB_OFFLINE" else StorageUnavailable
    with pytest.raises(absent, match=f"at v2; it has the commits {commit}"):
        ids(start(gyred, hub, "@v2/data"), reattach_timeout_s=0.2)
    with pytest.raises(ShardMissing, match="no shard"):
        ids(start(gyred, hub, "/none"))


def test_a_folder_in_the_cache_is_read_as_its_library_describes_it(
    gyred: StartDaemon, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"x": list(range(6))}).save_to_disk(str(tmp_path / "saved"))
    files = {f"data/{path.name}": path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    (shard,) = (data for name, data in files.items() if name.endswith(".arrow"))
    hub.commit(files | {"data/cache-0123456789abcdef.arrow": shard})
    fill_cache(hub, tmp_path / "home")
    hub.close()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    daemon = start(gyred, hub, "/data", data_format="arrow")
    with Loader("set", batch_size=3, order="sequential", address=daemon.address) as loader:
        assert [x for batch in loader for x in batch["x"].tolist()] == list(range(6))


@pytest.mark.parametrize("is_next", [False, True], ids=["redirect", "next page"])
def test_a_listing_at_another_host_is_refused_and_gets_no_token(
    is_next: bool, gyred: StartDaemon, hub: HubServer, tmp_path: Path
) -> None:
    hub.token, hub.elsewhere = TOKEN, f"http://{hub.storage}/elsewhere"
    hub.elsewhere_is_next = is_next
    (tmp_path / "token").write_text(TOKEN)
    with pytest.raises(GyreError, match="redirects to another host"):
        ids(
            start(gyred, hub, "/data", storage={"token_file": str(tmp_path / "token")}),
            reattach_timeout_s=0.2,
        )
    assert hub.tokens_at_storage == []
    if is_next:
        assert hub.num_requests("storage") == 0


def test_a_token_that_is_missing_is_said(gyred: StartDaemon, hub: HubServer) -> None:
    hub.token = TOKEN
    with pytest.raises(NotAllowed, match="check the daemon's credentials"):
        ids(start(gyred, hub, "/data"))
