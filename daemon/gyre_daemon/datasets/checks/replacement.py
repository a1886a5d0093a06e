"""Corrupt samples that others replace: how many a dataset may have, and the report of them."""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gyre_protos.text import printable

from gyre_daemon.errors import CorruptSample, Overloaded
from gyre_daemon.runtime.ownership import make_folder, open_ours
from gyre_daemon.storage.mounts import MOUNTS

# Lines of a report, and characters of a text in it: 10 MiB at most. Beyond it, the last line says
# how many samples it leaves out.
MAX_LINES, _MAX_CHARS = 10_000, 500
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class CorruptRecord:
    """One corrupt sample.

    Attributes:
        shard: the name of its shard, or of its file where samples are single files.
        offset: the byte of that at which it, or its corrupt field, begins.
        sample_id: its id in the dataset.
        reason: the problem.
    """

    shard: str
    offset: int
    sample_id: int
    reason: str


class CorruptReports:
    """The folder of all reports: a file for each dataset, for the daemon's user alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def write(self, name: str, identity: str, corrupt: Sequence[CorruptRecord]) -> Path:
        """Write a dataset's report, whole or not at all, and return its path.

        It is JSON Lines: `shard`, `offset`, `sample_id` and `reason` of each corrupt sample, in the
        order of their ids and in visible ASCII. A dataset without any has no report.

        Args:
            name: of the dataset.
            identity: distinguishes it from others of this name.
            corrupt: its corrupt samples.

        Raises:
            Overloaded: it cannot be written.
        """
        digest = hashlib.blake2b(f"{name}\n{identity}".encode(), digest_size=8).hexdigest()
        stem = f"{name}-{digest}" if _PLAIN.fullmatch(name) else digest
        path = self._folder / f"{stem}.jsonl"
        try:
            await MOUNTS.answered(self._folder, _write, path, corrupt)
        except OSError as error:
            raise Overloaded(
                f"the report of corrupt samples cannot be written to {path}: "
                f"{error.strerror or error}; free some space, or set `report_dir`",
                {"path": path, "reason": error.strerror or "unknown"},
            ) from error
        return path


def _write(path: Path, corrupt: Sequence[CorruptRecord]) -> None:
    if not corrupt:
        path.unlink(missing_ok=True)
        return
    make_folder(path.parent)
    unfinished = path.with_name(f"{path.name}.{os.urandom(8).hex()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        with os.fdopen(open_ours(unfinished, flags), "wb") as file:
            file.writelines(_lines(corrupt))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def check_limit(
    name: str,
    corrupt: Sequence[CorruptRecord],
    num_samples: int,
    max_corrupt: float,
    num_more: int = 0,
) -> None:
    """Refuse a dataset with too many corrupt samples.

    Args:
        name: of the dataset.
        corrupt: its corrupt samples.
        num_samples: N.
        max_corrupt: how many there may be; a fraction of N if it is no integer. Half of all is the
            most in any case, since each good sample stands in for one other at most.
        num_more: corrupt samples that were found before.

    Raises:
        CorruptSample: there are more; names the first.
    """
    limit = max_corrupt if isinstance(max_corrupt, int) else int(max_corrupt * num_samples)
    limit = min(limit, num_samples // 2)
    num = len(corrupt) + num_more
    if num <= limit:
        return
    first = corrupt[0]
    raise CorruptSample(
        f"dataset `{name}` has {num} corrupt samples of {num_samples}, and max_corrupt = "
        f"{max_corrupt} allows {limit}; the first is sample {first.sample_id} (shard "
        f"{first.shard}, byte {first.offset}): {first.reason}. Repair the shards, or raise "
        "max_corrupt.",
        {
            "dataset": name,
            "num_corrupt": num,
            "limit": limit,
            **asdict(first),
        },
    )


def _lines(corrupt: Sequence[CorruptRecord]) -> list[bytes]:
    lines = []
    for each in corrupt[:MAX_LINES]:
        texts = {
            key: printable(getattr(each, key)[:_MAX_CHARS])[:_MAX_CHARS]
            for key in ("shard", "reason")
        }
        lines.append(json.dumps(asdict(each) | texts))
    if len(corrupt) > MAX_LINES:
        lines.append(json.dumps({"num_left_out": len(corrupt) - MAX_LINES}))
    return [f"{line}\n".encode() for line in lines]
