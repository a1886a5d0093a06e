"""Indexes, measures and checks the shards of a dataset in ranges, as units on Ray."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from google.protobuf.json_format import MessageToDict, ParseDict
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client import __version__
from gyre_client.errors import InvalidRequest
from gyre_client.prepare.units import Daemons, Engine, UnitFolder, opened, run_units
from gyre_client.transport.connection import Connection

INDEX_DIR = "GYRE_INDEX_DIR"
# Each unit lists all shards, so that there are not as many units as shards of a large dataset.
_MAX_UNITS = 1000
_SUMS = "num_samples", "num_bytes", "num_decoded", "num_left_out", "num_damaged"
Work = Literal["index", "measure", "lint"]


@dataclass(frozen=True, slots=True)
class ShardUnit:
    """The shards `[first, stop)` of a dataset; see `units.Unit`."""

    number: int
    first: int
    stop: int
    work: Work
    dataset: pb.DatasetRef
    transforms: pb.TransformList | None

    def run(self, connection: Connection, advance: Callable[[int, int], None]) -> dict[str, Any]:
        """Does the work on the shards, whose result is in files of the daemon, or findings."""
        shards = pb.ShardRange(first=self.first, stop=self.stop)
        if self.work == "lint":
            found = findings_of(connection.lint(self.dataset, shards), lambda *_: None)
            return {"samples": self.stop - self.first, "found": MessageToDict(found)}
        measures = self.work == "measure"
        progress = connection.index(
            self.dataset, shards=shards, transforms=self.transforms, measures=measures
        )
        for _ in progress:
            pass
        return {"samples": self.stop - self.first}


def findings_of(
    messages: Iterable[pb.LintProgress], show: Callable[[pb.LintProgress, int], None]
) -> pb.LintProgress:
    """Returns the last message with the findings of all; `show` is told how many there are."""
    last, findings, num_left_out = pb.LintProgress(), list[pb.LintFinding](), 0
    for last in messages:
        findings += last.findings
        num_left_out += last.num_left_out
        show(last, len(findings) + num_left_out)
    del last.findings[:]
    last.findings.extend(findings)
    last.num_left_out = num_left_out
    return last


def run_on_shards(
    works: Sequence[Work],
    connection: Connection,
    dataset: pb.DatasetRef,
    transforms: pb.TransformList | None,
    engine: str,
    daemons: Daemons,
    show: Callable[[int, int, str], None],
) -> Mapping[int, Any]:
    """Does one kind of work after the other on all shards, by tasks of Ray.

    Args:
        works: The kinds.
        connection: To the daemon of this process, which counts the shards.
        dataset: The dataset, as requests name it.
        transforms: To measure; None for those of its definition.
        engine: See `units.opened`.
        daemons: See `run_units`.
        show: Is told how many shards are done, how many there are, and the kind of work.

    Returns:
        The results of the last kind, by the numbers of its units.

    Raises:
        InvalidRequest: There is no folder that all nodes see.
        GyreError: As `run_units`.
    """
    path = os.environ.get(INDEX_DIR)
    if not path:
        raise InvalidRequest(
            f"--engine: {INDEX_DIR} is not set. Set it to a folder of indexes that all nodes see."
        )
    counted = next(connection.index(dataset, shards=pb.ShardRange()), pb.IndexProgress())
    results: Mapping[int, Any] = {}
    with opened(engine) as doing:
        for work in works:

            def told(num_done: int, work: Work = work) -> None:
                show(num_done, counted.num_shards, work)

            units = _units(work, counted.num_shards, dataset, transforms)
            results = _results(units, Path(path).absolute(), doing, connection, daemons, told)
    return results


def _units(
    work: Work, num_shards: int, dataset: pb.DatasetRef, transforms: pb.TransformList | None
) -> list[ShardUnit]:
    step = -(-num_shards // _MAX_UNITS)
    return [
        ShardUnit(number, first, min(first + step, num_shards), work, dataset, transforms)
        for number, first in enumerate(range(0, num_shards, step))
    ]


def _results(
    units: list[ShardUnit],
    path: Path,
    engine: Engine,
    connection: Connection,
    daemons: Daemons,
    show: Callable[[int], None],
) -> Mapping[int, Any]:
    """Does the units, and returns their results; until all are done, a folder keeps them."""
    one = units[-1]
    chain = one.transforms.SerializeToString(deterministic=True) if one.transforms else b""
    job = {
        "command": one.work,
        "dataset": one.dataset.SerializeToString(deterministic=True).hex(),
        "transforms": chain.hex(),
        "shards": one.stop,
        "gyre": __version__,
    }
    digest = hashlib.sha256(json.dumps(job).encode()).hexdigest()[:16]
    with UnitFolder(path / f"units-{digest}", job) as folder:
        num_done = sum(each["samples"] for each in folder.results().values())

        def advance(num: int, _: int) -> None:
            nonlocal num_done
            num_done += num
            show(num_done)

        run_units(units, folder, engine, connection, daemons, advance)
        results = folder.results()
        folder.remove()
    return results


def merged_findings(results: Mapping[int, Any]) -> pb.LintProgress:
    """Returns the findings in all shards, as one call about all of them would."""
    whole = pb.LintProgress()
    for _, result in sorted(results.items()):
        part = ParseDict(result["found"], pb.LintProgress())
        for finding in part.findings:
            if finding.HasField("sample_id"):
                finding.sample_id += whole.num_samples
        whole.findings.extend(part.findings)
        for reason, num in part.not_decoded.items():
            whole.not_decoded[reason] += num
        for name in _SUMS:
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
        whole.num_shards += result["samples"]
    if whole.num_damaged:  # ids behind an unread shard are not known
        for finding in whole.findings:
            finding.ClearField("sample_id")
    return whole
