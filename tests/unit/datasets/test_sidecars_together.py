"""Sidecars of several shards, loaded together."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_daemon.datasets.sidecars import Arrays, SidecarKey, SidecarOf, SidecarStore
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.mounts import Mount, Mounts


def _of(folder: Path, number: int, check: Callable[[Arrays], object], version: str) -> SidecarOf:
    key = SidecarKey(str(folder), f"{number}.bin", 4, version, "kind/1")
    return SidecarOf(key, LocalFile.of(folder / f"{number}.bin"), check)


@pytest.mark.parametrize(("is_slow", "num_threads"), [(False, 1), (True, 2)])
def test_sidecars_are_loaded_together_as_one_by_one(
    is_slow: bool, num_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside their shards and in the other folder; stale, damaged and absent ones count alone.

    Several threads share them out where the mount is slow.
    """
    num_calls = 0
    run = Mount.run

    async def counted(self: Mount, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return await run(self, *args, **kwargs)

    def check(arrays: Arrays) -> None:
        if arrays["number"][0] == 3:
            raise ValueError("it is forged")

    data, other = tmp_path / "data", tmp_path / "other"
    data.mkdir()
    other.mkdir()
    store, elsewhere = SidecarStore("", other), SidecarStore(str(other), other)

    async def load() -> None:
        wanted = [_of(data, number, check, "1") for number in range(6)]
        for number, each in enumerate(wanted[:5]):
            stale = _of(data, number, check, "0").key if number == 2 else each.key
            to = elsewhere if number == 4 else store
            await to.save(stale, each.local, {"number": np.array([number])})
        alone = [(await store.load_all([each]))[0] for each in wanted]
        monkeypatch.setattr(Mount, "run", counted)
        together = await store.load_all(wanted)
        assert num_calls == num_threads
        shown = [each and (int(each[0]["number"][0]), each[1]) for each in together]
        assert shown == [(0, True), (1, True), (2, False), None, (4, True), None]
        assert shown == [each and (int(each[0]["number"][0]), each[1]) for each in alone]

    mounts = Mounts()
    mounts.at(data).latency.is_slow = is_slow
    monkeypatch.setattr("gyre_daemon.datasets.sidecars.MOUNTS", mounts)
    asyncio.run(load())
