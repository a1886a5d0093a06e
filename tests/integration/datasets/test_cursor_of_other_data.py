"""A cursor of a dataset that has changed since is refused with what changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_client import Loader
from gyre_client.errors import CursorRejected

from tests.conftest import StartDaemon

TABLE = {"format": "tokens", "dtype": "uint16", "sequence_length": 16}


def write(path: Path, first: int, count: int) -> None:
    path.write_bytes(np.arange(first, first + count, dtype=np.uint16).tobytes())


def test_what_changed_is_said_after_a_restart(gyred: StartDaemon, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for number, name in enumerate("abc"):
        write(folder / f"{name}.bin", 1000 * number, 160)
    daemon = gyred({"datasets": {"set": {"uri": str(folder), **TABLE}}})

    def loader() -> Loader:
        return Loader("set", batch_size=4, address=daemon.address)

    with loader() as first:
        next(first)
        state = first.state_dict()

    def grow() -> None:
        (folder / "c.bin").unlink()
        write(folder / "b.bin", 1000, 320)
        for name in "defg":
            write(folder / f"{name}.bin", 0, 160)

    def restore() -> None:
        for name in "defg":
            (folder / f"{name}.bin").unlink()
        write(folder / "b.bin", 1000, 160)
        write(folder / "c.bin", 7, 160)

    cases: list[tuple[Callable[[], Any], str]] = [
        (
            grow,
            r"added \(d.bin, .*, \.\.\.\) and removed \(c.bin\) and changed in size \(b.bin\); r",
        ),
        (restore, "the same names and sizes, but other contents or other options; restore"),
        (lambda: write(folder / "c.bin", 2000, 160), ""),
    ]
    for change, text in cases:
        daemon.stop()
        change()
        daemon.restart()
        with loader() as resumed:
            if text:
                with pytest.raises(CursorRejected, match=text):
                    resumed.load_state_dict(state)
            else:
                resumed.load_state_dict(state)
                assert next(resumed)["tokens"].shape == (4, 16)
