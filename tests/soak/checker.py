"""Reads the histories of a run and decides whether everything was as promised.

For each rank: every step of the job is read exactly once in the history that its checkpoints
commit, each sample of an epoch comes once, and every byte is the expected one. For each job: all
ranks end at one step. For each daemon: memory stays within the budget, and memory, descriptors and
arenas go back to what they were. For the run: errors only while a fault explains them, everybody
reads on after each fault, and nothing is left.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.soak import history
from tests.soak.contents import Expected, Int64Array
from tests.soak.history import Line
from tests.soak.plan import Job

# What a daemon may have beside its budget while it works, and more than at its base when it is
# idle: the interpreter's own memory is never given back to the byte.
WORKING_BYTES, IDLE_BYTES = 192 << 20, 48 << 20
IDLE_DESCRIPTORS = 16  # connections to storage that are kept open, and shards
_MOST_PROBLEMS = 20  # of one file

# Which errors a rank may get, by the fault. Everything else must not be seen by a training script.
_DATA = frozenset({"CorruptSample", "ShardMissing", "StorageUnavailable"})
EXPLAINED = {
    "shard truncated": _DATA,
    "shard replaced": _DATA,
    "shard removed": _DATA,
    "storage troubled": _DATA,
}
# Batches that were read before the fault come first, so its error may come after it was mended.
_LATE_ERROR_S = 60.0


@dataclass
class Report:
    """What was found.

    Attributes:
        problems: One sentence each; none if all holds.
        num_samples: Samples whose number and bytes were compared.
        num_batches: Batches that were read, those read again after a kill included.
        num_lost: Steps that a rank's history skips.
        num_doubled: Steps that it has twice without a kill between.
        num_wrong: Batches with other samples or bytes than expected.
        num_errors: Errors that ranks got.
        faults: How often each fault was made.
    """

    problems: list[str] = field(default_factory=list)
    num_samples: int = 0
    num_batches: int = 0
    num_lost: int = 0
    num_doubled: int = 0
    num_wrong: int = 0
    num_errors: int = 0
    faults: dict[str, int] = field(default_factory=dict)


def check(folder: Path) -> Report:
    """Checks the histories of a folder."""
    driver = list(history.read(folder / history.DRIVER))
    ranks = {path.name: history.read(path) for path in sorted(folder.glob("*.*.jsonl"))}
    return check_lines(driver, lambda name: ranks.get(name, iter(())))


def check_lines(driver: Sequence[Line], rank_lines: Callable[[str], Iterator[Line]]) -> Report:
    """Checks lines, wherever they come from.

    Args:
        driver: The lines of the driver.
        rank_lines: Returns the lines of a rank's file by its name.
    """
    report = Report()
    if not driver or driver[0]["event"] != "plan":
        report.problems.append("the driver's history does not begin with its plan")
        return report
    jobs = [Job.from_json(each) for each in driver[0]["jobs"]]
    check_driver(driver, report)
    excuses = excuses_of(driver)
    for job in jobs:
        ends = []
        for rank in range(job.world_size):
            lines = rank_lines(history.of_rank(job.name, rank))
            ends.append(check_rank(job, rank, excuses, lines, report))
        if len(set(ends)) > 1:
            report.problems.append(f"the ranks of {job.name} end at different steps: {ends}")
    return report


def check_driver(driver: Sequence[Line], report: Report) -> None:
    """Checks the driver's lines, of which the first is its plan."""
    daemons = {number for job in driver[0]["jobs"] for number in job["daemons"]}
    _DriverCheck(driver, report).run(daemons)


def check_rank(
    job: Job, rank: int, excuses: "Sequence[Excuse]", lines: Iterator[Line], report: Report
) -> int:
    """Checks a rank's lines, and returns the step at which it ended; -1 if it did not."""
    return _RankCheck(job, rank, excuses, report).run(lines)


@dataclass(frozen=True)
class Excuse:
    """The time in which errors of some classes are explained by a fault."""

    begin_s: float
    end_s: float
    errors: frozenset[str]


def excuses_of(driver: Sequence[Line]) -> list[Excuse]:
    """Returns the times in which errors are explained."""
    excuses, begin_s, name = [], 0.0, ""
    for line in driver:
        if line["event"] == "fault":
            begin_s, name = line["t"], line["name"]
        elif line["event"] == "running" and name in EXPLAINED:
            excuses.append(Excuse(begin_s, line["t"] + _LATE_ERROR_S, EXPLAINED[name]))
    return excuses


class _Numbers:
    """Checks that a file has all of its lines, in their order."""

    def __init__(self, name: str, report: Report) -> None:
        self.name, self._problems = name, report.problems
        self._next = self._num_told = 0

    def check(self, line: Line) -> None:
        if line["n"] != self._next:
            self.tell(line, f"is not line {self._next}")
        self._next = line["n"] + 1

    def tell(self, line: Line | None, what: str) -> None:
        where = f"{self.name}, line {line['n']} ({line['event']})" if line else self.name
        self._num_told += 1
        if self._num_told <= _MOST_PROBLEMS:
            self._problems.append(f"{where}: {what}")


class _RankCheck:
    """The history of one rank."""

    def __init__(self, job: Job, rank: int, excuses: Sequence[Excuse], report: Report) -> None:
        self._job, self._excuses, self._report = job, excuses, report
        self._expected = Expected(job, rank)
        self._numbers = _Numbers(history.of_rank(job.name, rank), report)
        self._step = 0  # the next one
        self._checkpoints = [0, 0]  # the steps of the last two
        self._before = ""  # the event of the line before
        self._epochs = _EpochCount(self._expected, job, rank)

    def run(self, lines: Iterator[Line]) -> int:
        """Returns the step at which the rank ended; -1 if it did not."""
        for line in lines:
            self._numbers.check(line)
            if self._before == "end":
                self._numbers.tell(line, "comes after the end")
            if (self._before in ("", "error")) != (line["event"] == "begin") and (
                self._before in ("", "error")
            ):
                self._numbers.tell(line, "a `begin` is missing before it")
            getattr(self, f"_on_{line['event']}")(line)
            self._before = line["event"]
        if self._before != "end":
            self._numbers.tell(None, "the rank did not come to its end")
            return -1
        return self._step

    def _on_begin(self, line: Line) -> None:
        last, before = self._checkpoints[-1], self._checkpoints[-2]
        allowed = {last}
        if self._before == "checkpoint":  # killed before the new one replaced the old one
            allowed.add(before)
            self._checkpoints.pop() if line["step"] == before else None
        if self._before == "error":
            allowed.add(self._step)
        if self._is_checkpoint_due(line):
            self._numbers.tell(line, f"the checkpoint of step {self._step} is missing before it")
        if line["step"] not in allowed:
            self._numbers.tell(line, f"begins at step {line['step']}, not at one of {allowed}")
            self._report.num_lost += line["step"] > self._step
        self._step = line["step"]
        self._epochs.go_to(self._step)

    def _on_batch(self, line: Line) -> None:
        step, report = line["step"], self._report
        if self._is_checkpoint_due(line):
            self._numbers.tell(line, f"the checkpoint of step {self._step} is missing before it")
        if step != self._step:
            is_lost = step > self._step
            report.num_lost += is_lost
            report.num_doubled += not is_lost
            what = "lost" if is_lost else "doubled"
            self._numbers.tell(line, f"step {min(step, self._step)} is {what}")
            self._epochs.go_to(step)
        if line["digest"] != self._expected.digest(step):
            report.num_wrong += 1
            self._numbers.tell(line, f"step {step} has wrong samples or bytes")
        if problem := self._epochs.take(step):
            self._numbers.tell(line, problem)
        report.num_batches += 1
        report.num_samples += self._job.batch_size // self._job.world_size
        self._step = step + 1

    def _on_checkpoint(self, line: Line) -> None:
        if not self._is_checkpoint_due(None) or line["step"] != self._step:
            self._numbers.tell(line, f"a checkpoint of step {line['step']} has no place here")
        self._checkpoints.append(line["step"])

    def _on_error(self, line: Line) -> None:
        self._report.num_errors += 1
        if line["step"] != self._step:
            self._numbers.tell(line, f"is an error of another step than {self._step}")
        is_explained = any(
            each.begin_s <= line["t"] <= each.end_s and line["error"] in each.errors
            for each in self._excuses
        )
        if not is_explained:
            self._numbers.tell(line, f"no fault explains {line['error']}: {line.get('text')}")

    def _on_end(self, line: Line) -> None:
        if self._is_checkpoint_due(line):
            self._numbers.tell(line, f"the checkpoint of step {self._step} is missing before it")
        if line["step"] != self._step:
            self._numbers.tell(line, f"ends at step {line['step']} and has read to {self._step}")

    def _is_checkpoint_due(self, line: Line | None) -> bool:
        """Whether the next line must be a checkpoint, unless a new process begins there."""
        is_due = self._before == "batch" and self._step % self._job.checkpoint_steps == 0
        return is_due and (line is None or line["event"] != "begin")


class _EpochCount:
    """Counts the samples of each epoch, for jobs of one rank: each comes once.

    Where several ranks read, each has a part of the epoch that only its order knows.
    """

    def __init__(self, expected: Expected, job: Job, rank: int) -> None:
        self._expected, self._size = expected, job.batch_size // job.world_size
        self._first = rank * self._size
        self._batch_size = job.batch_size
        self._seen: dict[int, Int64Array] = {}

    def go_to(self, step: int) -> None:
        """Forgets what is read again from a step on."""
        self._seen = {}
        self._from = step

    def take(self, step: int) -> str:
        """Counts a batch; returns what is wrong, or nothing."""
        ids, mask = self._expected.sample_ids(step)
        position = step * self._batch_size + self._first
        epochs = (position + np.arange(len(ids))) // self._expected.epoch_length
        for epoch in np.unique(epochs).tolist():
            chosen = (epochs == epoch) & (mask if mask is not None else True)
            seen = self._seen.get(epoch)
            if seen is None:
                seen = self._seen[epoch] = np.zeros(self._expected.num_samples, np.int64)
                self._seen.pop(epoch - 2, None)
            np.add.at(seen, ids[chosen], 1)
            if seen.max() > 1:
                return f"sample {int(seen.argmax())} comes twice in epoch {epoch}"
        return ""


class _DriverCheck:
    """The history of the driver: faults, daemons, and what is left."""

    def __init__(self, lines: Sequence[Line], report: Report) -> None:
        self._lines, self._report = lines, report
        self._numbers = _Numbers(history.DRIVER, report)
        self._bases: dict[int, Line] = {}
        self._idle: set[int] = set()
        self._stopped: set[int] = set()
        self._fault, self._stage = "", "running"
        self._num_left = self._num_plans = 0
        self._must_stop = False

    def run(self, daemons: set[int]) -> None:
        for line in self._lines:
            self._numbers.check(line)
            if line.get("daemon", 0) not in daemons:
                self._numbers.tell(line, f"there is no daemon {line['daemon']}")
            getattr(self, f"_on_{line['event']}")(line)
        for what, seen in (
            ("base", self._bases),
            ("idle", self._idle),
            ("stopped", self._stopped),
        ):
            if missing := daemons - set(seen):
                self._numbers.tell(None, f"there is no `{what}` of daemons {missing}")
        if self._num_left != 1:
            self._numbers.tell(None, "nobody looked for what is left")
        if self._stage != "running":
            self._numbers.tell(None, f"the fault `{self._fault}` has no end")

    def _on_plan(self, line: Line) -> None:
        self._num_plans += 1
        if self._num_plans > 1:
            self._numbers.tell(line, "is a second plan")
        self._budget_bytes = line["budget_bytes"]

    def _on_base(self, line: Line) -> None:
        if line["daemon"] in self._bases:
            self._numbers.tell(line, "is a second base")
        self._bases[line["daemon"]] = line
        self._check_released(line)

    def _on_fault(self, line: Line) -> None:
        self._enter("running", "fault", line)
        self._fault = line["name"]
        self._must_stop = self._fault == "daemon stopped"
        self._report.faults[self._fault] = self._report.faults.get(self._fault, 0) + 1

    def _on_mended(self, line: Line) -> None:
        self._enter("fault", "mended", line)
        if line["name"] != self._fault:
            self._numbers.tell(line, f"the fault was `{self._fault}`")
        if self._must_stop:
            self._numbers.tell(line, "no daemon was stopped")

    def _on_running(self, line: Line) -> None:
        self._enter("mended", "running", line)

    def _enter(self, before: str, stage: str, line: Line) -> None:
        if self._stage != before:
            self._numbers.tell(line, f"follows `{self._stage}`, not `{before}`")
        self._stage = stage

    def _on_memory(self, line: Line) -> None:
        most = self._budget_bytes + WORKING_BYTES
        if line["memory_bytes"] > most:
            self._numbers.tell(line, f"{line['memory_bytes']} bytes of memory, more than {most}")

    def _on_stopped(self, line: Line) -> None:
        if line["status"] != 0:
            self._numbers.tell(line, f"a daemon ended with status {line['status']} after SIGTERM")
        if self._stage == "fault" and not self._must_stop:
            self._numbers.tell(line, "a daemon was stopped by another fault")
        if self._stage == "fault":
            self._must_stop = False
        elif line["daemon"] in self._stopped:
            self._numbers.tell(line, "is stopped twice")
        else:
            self._stopped.add(line["daemon"])

    def _on_idle(self, line: Line) -> None:
        if line["daemon"] in self._idle:
            self._numbers.tell(line, "is idle twice")
        self._idle.add(line["daemon"])
        self._check_released(line)
        base = self._bases.get(line["daemon"])
        if base is None:
            return
        for key, slack in (("memory_bytes", IDLE_BYTES), ("descriptors", IDLE_DESCRIPTORS)):
            if line[key] > base[key] + slack:
                text = f"{key} is {line[key]} without clients and was {base[key]} at the base"
                self._numbers.tell(line, text)

    def _check_released(self, line: Line) -> None:
        for key in ("arenas", "reserved_bytes", "abandoned_bytes", "sessions"):
            if line[key]:
                self._numbers.tell(line, f"{key} is {line[key]} without clients")

    def _on_left(self, line: Line) -> None:
        self._num_left += 1
        for kind in ("processes", "files"):
            if line[kind]:
                self._numbers.tell(line, f"these {kind} are left: {line[kind]}")
