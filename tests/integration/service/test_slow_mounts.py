"""Jobs on a slow file system of FUSE, whose server counts what it is asked for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_client import Loader

from tests.conftest import Daemon, StartDaemon
from tests.daemons import status
from tests.fuse_folder import FuseFolder, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

NUM_FILES, BATCH = 1280, 64
TOKENS = {"format": "tokens", "dtype": "uint16", "sequence_length": 2048}
FILES = {"format": "files", "extensions": ["bin"]}
NUM_SEQUENCES = 2048


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[FuseFolder]:
    source = tmp_path / "source"
    for name in ("files", "tokens"):
        (source / name).mkdir(parents=True)
    for number in range(NUM_FILES):
        (source / "files" / f"{number:04}.bin").write_bytes(b"%04d" % number * 100)
    tokens = np.arange(NUM_SEQUENCES, dtype=np.uint16).repeat(2048)
    tokens.tofile(source / "tokens" / "a.bin")
    (tmp_path / "mount").mkdir()
    with FuseFolder(source, tmp_path / "mount", is_direct=1) as folder:
        yield folder


@pytest.fixture
def daemon(gyred: StartDaemon, mount: FuseFolder) -> Daemon:
    kinds: dict[str, dict[str, Any]] = {"files": FILES, "tokens": TOKENS}
    tables = {name: {"uri": str(mount.path / name), **keys} for name, keys in kinds.items()}
    past = {f"{name} past": {**table, "cache": False} for name, table in tables.items()}
    return gyred({"datasets": tables | past, "mount_threads": 64, "hedge": False})


def epoch(daemon: Daemon, name: str, **arguments: Any) -> list[int]:
    """The samples of an epoch, each checked."""
    found = []
    with Loader(name, batch_size=BATCH, seed=1, address=daemon.address, **arguments) as loader:
        for batch in loader:
            ids = batch["sample_id"].tolist()
            if "tokens" in batch:
                assert batch["tokens"][:, 0].tolist() == batch["tokens"][:, -1].tolist() == ids
            else:
                (name,) = (each for each in batch if f"{each}.offsets" in batch)
                begins = batch[f"{name}.offsets"].numpy()[:-1, None]
                firsts = batch[name].numpy()[begins + range(4)]
                assert [int(bytes(first)) for first in firsts] == ids
            found += ids
    return found


@pytest.mark.parametrize("name", ["files past", "tokens past"])
def test_a_first_batch_waits_for_few_reads_besides_its_own(
    daemon: Daemon, mount: FuseFolder, name: str
) -> None:
    with Loader(name, batch_size=BATCH, address=daemon.address):
        pass
    mount.behave(delay_s=0.5)
    before = mount.behave()
    with Loader(name, batch_size=BATCH, seed=1, address=daemon.address) as loader:
        next(iter(loader))
        counts = mount.behave(delay_s=0)
    assert counts["read"] - before["read"] <= 4 * BATCH
    assert 16 < counts["most_reads"] <= 2 * 64, "late reads leave their turns to others"


@pytest.mark.parametrize(("name", "num"), [("files", NUM_FILES), ("tokens", NUM_SEQUENCES)])
def test_a_second_epoch_reads_nothing_from_the_mount(
    daemon: Daemon, mount: FuseFolder, name: str, num: int
) -> None:
    mount.behave(delay_s=0.01)
    first = epoch(daemon, name)
    before = mount.behave()
    second = epoch(daemon, name, order="sequential")
    assert sorted(first) == second == list(range(num))
    counts = mount.behave()
    assert {each: counts[each] - before[each] for each in ("read", "open")} == {
        "read": 0,
        "open": 0,
    }


def test_the_status_tells_guess_and_measure(daemon: Daemon, mount: FuseFolder) -> None:
    mount.behave(delay_s=0.02)
    with Loader("files", batch_size=BATCH, address=daemon.address) as loader:
        next(iter(loader))
        (state,) = (each for each in status(daemon).mounts if each.path == str(mount.path))
        assert (state.file_system, state.guessed_slow, state.slow) == ("fuse.test", True, True)
        assert state.read_s > 0.01
        (endpoint,) = (each for each in status(daemon).endpoints if each.name == str(mount.path))
        assert endpoint.limit == 64
