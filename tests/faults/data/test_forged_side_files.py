"""A daemon opens a dataset whose stored indexes are forged: it scans the shards again."""

from pathlib import Path
from typing import Any

from gyre_client import Loader
from gyre_daemon.datasets.sidecars import SUFFIX, decode, encode

from tests.conftest import Daemon, StartDaemon
from tests.forged_indexes import FORGED, TAR

# Contents of stored indexes that are damaged as a whole.
DAMAGED = {"empty": b"", "cut": b"GYREIDX", "text": b"an index" * 100}
KINDS = [*FORGED, *DAMAGED]


def samples(daemon: Daemon) -> list[dict[str, Any]]:
    """All batches of an epoch."""
    with Loader("tar", batch_size=8, seed=1, epochs=1, address=daemon.address) as loader:
        return [{name: _plain(value) for name, value in batch.items()} for batch in loader]


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def thrown_away(daemon: Daemon, begin: int) -> list[dict[str, Any]]:
    events = daemon.events(begin)
    assert "INTERNAL" not in str(events)
    assert "internal error" not in str(events)
    return [each for each in events if each["event"] == "index thrown away"]


def test_each_forged_index_is_thrown_away_with_a_warning(
    gyred: StartDaemon, tmp_path: Path
) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(len(KINDS)):
        (folder / f"{number:02}.tar").write_bytes(TAR)
    tar = {"uri": str(folder), "format": "webdataset"}
    daemon = gyred(
        {"index_dir": "", "datasets": {"tar": tar}}, {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    )
    wanted = samples(daemon)
    assert daemon.stop() == 0
    (joined,) = (tmp_path / "cache").rglob(f"*{SUFFIX}")
    joined.unlink()  # it would be read in place of them
    for number, kind in enumerate(KINDS):
        path = folder / f"{number:02}.tar{SUFFIX}"
        key, arrays = decode(path.read_bytes())
        if kind in DAMAGED:
            path.write_bytes(DAMAGED[kind])
        else:
            path.write_bytes(encode(key, {**arrays, **FORGED[kind]}))
    begin = daemon.log_path.stat().st_size
    daemon.start()
    assert samples(daemon) == wanted
    warnings = thrown_away(daemon, begin)
    assert sorted(each["shard"] for each in warnings) == [
        f"{number:02}.tar" for number in range(len(KINDS))
    ]
    assert all(each["reason"] for each in warnings)
    assert daemon.stop() == 0
    begin = daemon.log_path.stat().st_size
    daemon.start()
    assert samples(daemon) == wanted
    assert not thrown_away(daemon, begin), "the shards' indexes were stored again"
