"""The checker finds nothing in a recorded run, and notices every change to any of its lines.

`recorded/` has the histories of a real run of four faults, with two jobs of ten steps and more.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.soak import checker, history
from tests.soak.checker import Report, check_lines
from tests.soak.contents import Expected
from tests.soak.history import DRIVER, Line
from tests.soak.plan import Job

RECORDED = Path(__file__).with_name("recorded")
NAMES = sorted(path.name for path in RECORDED.glob("*.jsonl"))
Files = dict[str, list[Line]]


@pytest.fixture(scope="module")
def recorded() -> Files:
    return {name: list(history.read(RECORDED / name)) for name in NAMES}


@pytest.fixture(scope="module", autouse=True)
def computed_once() -> Iterator[None]:
    """What a rank must read is computed once, and not for every change."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checker, "Expected", functools.cache(Computed))
        yield


class Computed(Expected):
    """Remembers what it computed."""

    @functools.cache  # noqa: B019  # it lives as long as the module's tests
    def sample_ids(self, step: int) -> Any:
        return super().sample_ids(step)

    @functools.cache  # noqa: B019
    def digest(self, step: int) -> int:
        return super().digest(step)


def problems_of(files: Files) -> Report:
    return check_lines(files[DRIVER], lambda name: iter(files[name]))


def has_problems(files: Files, name: str, lines: list[Line]) -> bool:
    """Whether the checker finds something in a changed file; the others are as recorded."""
    report = Report()
    if name == DRIVER:
        report = check_lines(lines, lambda other: iter(files[other]))
    else:
        job, rank, _ = name.split(".")
        plan = {each["name"]: Job.from_json(each) for each in files[DRIVER][0]["jobs"]}
        checker.check_rank(
            plan[job], int(rank), checker.excuses_of(files[DRIVER]), iter(lines), report
        )
    return bool(report.problems)


def with_lines(files: Files, name: str, lines: list[Line]) -> Files:
    return {**files, name: lines}


def renumbered(lines: list[Line]) -> list[Line]:
    return [{**line, "n": number} for number, line in enumerate(lines)]


def dropped(lines: list[Line], at: int) -> list[Line]:
    return [*lines[:at], *lines[at + 1 :]]


def doubled(lines: list[Line], at: int) -> list[Line]:
    return [*lines[: at + 1], *lines[at:]]


def swapped(lines: list[Line], at: int) -> list[Line]:
    return [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]


def altered(line: Line) -> Iterator[Line]:
    """Yields the line with each of its values changed."""
    for key, value in line.items():
        changed = copy.deepcopy(line)
        match key, value:
            case (("n" | "t" | "event" | "text" | "what" | "seed"), _):
                continue
            case "daemon", int():
                changed[key] = value + 7
            case (("budget_bytes" | "status" | "step" | "digest"), int()):
                changed[key] = value - 1 if key == "budget_bytes" else value + 1
            case _, int():  # what a daemon has
                changed[key] = value + (1 << 30)
            case _, str():
                changed[key] = "another"
            case "jobs", list():
                changed[key][0]["seed"] += 1
            case _, list():
                changed[key] = ["something"]
        if key != "budget_bytes" and not (line["event"] == "base" and key in CEILINGS):
            yield changed


CEILINGS = {"memory_bytes", "descriptors"}  # a higher base only allows more


def test_nothing_is_found_in_what_was_recorded(recorded: Files) -> None:
    report = problems_of(recorded)
    assert report.problems == []
    assert report.num_batches > 100
    assert report.num_samples > 2000
    assert report.num_errors >= 1
    assert len(report.faults) == 4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", [dropped, doubled, swapped])
def test_every_line_that_is_dropped_doubled_or_swapped_is_noticed(
    recorded: Files, name: str, change: Callable[[list[Line], int], list[Line]]
) -> None:
    lines = recorded[name]
    for at in range(len(lines) - (change is swapped)):
        assert has_problems(recorded, name, change(lines, at)), lines[at]


@pytest.mark.parametrize("name", NAMES)
def test_every_value_that_is_altered_is_noticed(recorded: Files, name: str) -> None:
    lines = recorded[name]
    num_changes = 0
    for at, line in enumerate(lines):
        for changed in altered(line):
            mutated = [*lines[:at], changed, *lines[at + 1 :]]
            assert has_problems(recorded, name, mutated), changed
            num_changes += 1
    assert num_changes > len(lines)


RANKS = [name for name in NAMES if name != DRIVER]


@pytest.mark.parametrize("name", RANKS)
def test_a_batch_that_was_never_read_is_lost_and_one_read_again_is_doubled(
    recorded: Files, name: str
) -> None:
    """Even where the lines are numbered as if nothing were amiss."""
    lines = recorded[name]
    batches = [at for at, line in enumerate(lines) if line["event"] == "batch"]
    for at in batches:
        twice = problems_of(with_lines(recorded, name, renumbered(doubled(lines, at))))
        assert twice.num_doubled >= 1, lines[at]
        if lines[at + 1]["event"] in ("batch", "end", "checkpoint", "error"):
            once = problems_of(with_lines(recorded, name, renumbered(dropped(lines, at))))
            assert once.problems, lines[at]
            assert once.num_lost == 1 or lines[at + 1]["event"] != "batch", lines[at]


def test_a_wrong_byte_is_counted(recorded: Files) -> None:
    lines = copy.deepcopy(recorded[RANKS[0]])
    wrong = [line for line in lines if line["event"] == "batch"][5:8]
    for line in wrong:
        line["digest"] ^= 1
    assert problems_of(with_lines(recorded, RANKS[0], lines)).num_wrong == 3


def test_a_step_that_one_rank_does_not_take_is_noticed(recorded: Files) -> None:
    lines = recorded["pair.1.jsonl"]
    end, last = lines[-1], lines[-2]
    assert (end["event"], last["event"]) == ("end", "batch")
    earlier = renumbered([*lines[:-2], {**end, "step": last["step"]}])
    (problem,) = problems_of(with_lines(recorded, "pair.1.jsonl", earlier)).problems
    assert "the ranks of pair end at different steps" in problem


@pytest.mark.parametrize("key", ["memory_bytes", "descriptors"])
def test_memory_and_descriptors_that_grow_are_noticed(recorded: Files, key: str) -> None:
    lines = copy.deepcopy(recorded[DRIVER])
    (idle,) = (line for line in lines if line["event"] == "idle" and line["daemon"] == 1)
    idle[key] += {"memory_bytes": 64 << 20, "descriptors": 300}[key]
    (problem,) = problems_of(with_lines(recorded, DRIVER, lines)).problems
    assert key in problem


def test_an_error_that_no_fault_explains_is_noticed(recorded: Files) -> None:
    calm = [
        {**line, "name": "client killed"} if line.get("name") == "shard truncated" else line
        for line in recorded[DRIVER]
    ]
    problems = problems_of({**recorded, DRIVER: calm}).problems
    assert problems
    assert all("no fault explains" in problem for problem in problems)
