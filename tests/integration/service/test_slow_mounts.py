"""Jobs on a slow file system of FUSE, whose server counts what it is asked for."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_client import Loader
from gyre_client.errors import GyreError
from PIL import Image

from tests.conftest import Daemon, StartDaemon
from tests.daemons import status
from tests.fuse_folder import FuseFolder, why_not
from tests.waiting import until

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

NUM_FILES, BATCH = 1280, 64
TOKENS = {"format": "tokens", "dtype": "uint16", "sequence_length": 2048}
FILES = {"format": "files", "extensions": ["bin"]}
IMAGES = {"format": "files", "extensions": ["png"]}
NUM_IMAGES = 256
DECODE = [{"name": "decode_image", "field": "file"}, {"name": "resize", "size": [8, 8]}]
NUM_SEQUENCES = 2048


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[FuseFolder]:
    source = tmp_path / "source"
    for name in ("files", "images", "tokens"):
        (source / name).mkdir(parents=True)
    for number in range(NUM_FILES):
        (source / "files" / f"{number:04}.bin").write_bytes(b"%04d" % number * 100)
    for number in range(NUM_IMAGES):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(source / "images" / f"{number:03}.png")
    tokens = np.arange(NUM_SEQUENCES, dtype=np.uint16).repeat(2048)
    tokens.tofile(source / "tokens" / "a.bin")
    (tmp_path / "mount").mkdir()
    with FuseFolder(source, tmp_path / "mount", is_direct=1) as folder:
        yield folder


@pytest.fixture
def daemon(gyred: StartDaemon, mount: FuseFolder) -> Daemon:
    kinds: dict[str, dict[str, Any]] = {"files": FILES, "images": IMAGES, "tokens": TOKENS}
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
    assert 16 < counts["most_reads"] <= 64


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


@pytest.mark.parametrize("name", ["images", "images past"])
def test_samples_are_decoded_while_others_of_their_batch_are_late(
    daemon: Daemon, mount: FuseFolder, name: str
) -> None:
    arguments: dict[str, Any] = {"address": daemon.address, "transform": DECODE, "batch_size": 16}
    mount.behave(delay_s=0.01)  # otherwise the mount is fast by then
    with Loader(name, prefetch_batches=1, seed=2, **arguments) as loader:
        next(iter(loader))
    mount.behave(tail_s=3600, tail_share=0.2)
    before = status(daemon).num_samples_transformed
    with Loader(name, prefetch_batches=8, seed=1, **arguments) as loader:

        def take() -> None:
            with contextlib.suppress(GyreError):  # the loader is closed first
                next(iter(loader))

        taking = threading.Thread(target=take, daemon=True)
        taking.start()
        # of 32: two batches are read until one of them is there
        until(lambda: status(daemon).num_samples_transformed - before > 16)
    taking.join(60)


def test_late_samples_change_neither_order_nor_bytes(daemon: Daemon, mount: FuseFolder) -> None:
    mount.behave(delay_s=0.01, tail_s=0.2, tail_share=0.05)
    found = []
    arguments: dict[str, Any] = {"seed": 1, "address": daemon.address, "transform": DECODE}
    for name in ("images past", "images", "images"):
        with Loader(name, batch_size=16, **arguments) as loader:
            for batch in loader:
                ids = batch["sample_id"].tolist()
                assert batch["image"][:, 0, 0, 0].tolist() == ids
                found += ids
    assert sorted(found[:NUM_IMAGES]) == [*range(NUM_IMAGES)]
    assert found == 3 * found[:NUM_IMAGES]


def test_the_status_tells_guess_and_measure(daemon: Daemon, mount: FuseFolder) -> None:
    mount.behave(delay_s=0.02)
    with Loader("files", batch_size=BATCH, address=daemon.address) as loader:
        next(iter(loader))
        (state,) = (each for each in status(daemon).mounts if each.path == str(mount.path))
        assert (state.file_system, state.guessed_slow, state.slow) == ("fuse.test", True, True)
        assert state.read_s > 0.01
        (endpoint,) = (each for each in status(daemon).endpoints if each.name == str(mount.path))
        assert endpoint.limit == 64
