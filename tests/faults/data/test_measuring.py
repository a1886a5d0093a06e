"""What happens to measuring when the daemon is killed, shards change, or samples are damaged."""

import json
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from gyre_client import Loader
from gyre_client.command.cli import main
from gyre_client.errors import CorruptSample, StorageUnavailable
from gyre_client.loader import place
from gyre_client.transport import connection

from tests.conftest import Daemon, to_toml
from tests.daemons import status
from tests.probe_transforms import install
from tests.waiting import until

PER_SHARD = 40
TEXTS = [f"document {number} " * (1 + number % 7) for number in range(3 * PER_SHARD)]


def write(folder: Path, number: int, texts: Sequence[object]) -> None:
    lines = "".join(json.dumps({"text": each}) + "\n" for each in texts)
    (folder / f"{number}.jsonl").write_text(lines)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon that packs text; the last shard cannot be measured until `open` exists."""
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(3):
        write(folder, number, TEXTS[number * PER_SHARD : (number + 1) * PER_SHARD])
    gate = {"name": "gate", "field": "json", "word": "document 100 ", "file": f"{tmp_path}/open"}
    chain = [gate, {"name": "tokenize", "field": "json", "key": "text", "tokenizer": "bytes"}]
    pack = {"field": "tokens", "length": 256}
    chance = [{"name": "growing", "field": "json"}]
    tables = {
        "texts": {"uri": str(folder), "transforms": chain, "pack": pack},
        "chance": {"uri": str(folder), "transforms": chance},
    }
    config, address = tmp_path / "gyre.toml", f"unix:{tmp_path}/run/gyre.sock"
    values = {
        "listen": [address],
        "index_dir": str(tmp_path / "index"),
        "drain_timeout_s": 3.0,
        "installed_transforms": ["gate", "growing"],
        "datasets": tables,
    }
    config.write_text(to_toml(values))
    environment = {"PYTHONPATH": str(install(tmp_path / "packages"))}
    daemon = Daemon(config, address, tmp_path / "log", environment)
    daemon.start()
    yield daemon
    daemon.stop()


def measured(daemon: Daemon, begin: int = 0) -> list[str]:
    return [each["shard"] for each in daemon.events(begin) if each["event"] == "shard measured"]


def test_a_daemon_that_is_killed_measures_only_the_shard_in_hand_again(
    served: Daemon, tmp_path: Path
) -> None:
    lengths = []

    def read() -> None:
        with Loader("texts", batch_size=4, address=served.address) as loader:
            lengths.append(len(loader))
            next(loader)

    reader = threading.Thread(target=read)
    reader.start()  # it waits for the daemon that is started again, and opens there
    until(lambda: len(measured(served)) == 2)
    served.kill()
    begin = served.log_path.stat().st_size
    (tmp_path / "open").touch()
    served.restart()
    reader.join(120)
    assert lengths
    assert measured(served, begin) == ["2.jsonl"]
    write(tmp_path / "data", 1, ["something else"] * 30)
    begin = served.log_path.stat().st_size
    served.stop()
    served.restart()
    with Loader("texts", batch_size=4, address=served.address) as loader:
        next(loader)
    assert measured(served, begin) == ["1.jsonl"]


def test_a_sample_that_cannot_be_measured_or_changes_its_length_is_named(
    served: Daemon, tmp_path: Path
) -> None:
    (tmp_path / "open").touch()
    write(tmp_path / "data", 2, [*TEXTS[80:100], 17, *TEXTS[101:]])
    with pytest.raises(CorruptSample, match=r"sample 100 .*2\.jsonl, byte \d+.* tokenize: .*key"):
        Loader("texts", batch_size=4, address=served.address)
    assert measured(served) == ["0.jsonl", "1.jsonl"]
    write(tmp_path / "data", 2, TEXTS[80:])
    served.stop()
    served.restart()
    with Loader("texts", batch_size=4, address=served.address) as loader:
        next(loader)
    with (
        Loader("chance", batch_size=4, seed=1, address=served.address) as loader,
        pytest.raises(CorruptSample, match="must not depend on chance"),
    ):
        next(loader)


def test_a_job_that_waits_says_how_far_measuring_is(
    served: Daemon,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other 39 samples of the last shard are measured, and the one at the gate is not."""
    monkeypatch.setattr(place, "FIRST_LOOK_S", 0.05)
    for timeout_s in (3.0, 60.0):  # on busy cores the daemon tells nothing within the first
        monkeypatch.setattr(connection, "OPEN_TIMEOUT_S", timeout_s)
        with pytest.raises(StorageUnavailable) as raised:
            Loader("texts", batch_size=4, address=served.address, reattach_timeout_s=0.1)
        if "measures" in str(raised.value):
            break
    assert re.search(r"measures, texts: \d+ of 120 samples \(\d", str(raised.value))
    assert "waiting until samples are measured: texts: " in caplog.text
    assert main(["status", "--address", served.address]) == 0
    (line,) = [each for each in capsys.readouterr().out.splitlines() if "measuring" in each]
    shown = r"texts: (8|9|10|11)\d of 120 samples \(\d+\.\d%\), [\d,]+/s, [\d,]+ s left"
    assert re.search(shown, line), line
    (tmp_path / "open").touch()
    with Loader("texts", batch_size=4, address=served.address):
        assert not status(served).measurings
