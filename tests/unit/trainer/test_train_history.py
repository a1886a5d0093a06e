import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from gyre_trainer.errors import RecordsFailed
from gyre_trainer.training import history as history_module
from gyre_trainer.training.history import History, StepRecord, digest, read

RECORD = StepRecord(0, 0, 2.5, 1e-3, 64, 0.5, 0.1, digest([1, 2]))


def records(start: int, stop: int, loss: float = 2.5) -> list[StepRecord]:
    return [replace(RECORD, step=step, loss=loss) for step in range(start, stop)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.jsonl"


def write(path: Path, resumed_at: int | None, lines: list[StepRecord]) -> None:
    history = History(path)
    if resumed_at is not None:
        history.resume_at(resumed_at)
    history.append(lines)
    history.sync()
    history.close()


def test_written_records_are_read_back(path: Path) -> None:
    write(path, None, records(0, 5))
    assert read(path).steps == records(0, 5)
    assert read(path).resumed_at == []


def test_a_history_has_one_writer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "_WRITER_ENDS_S", 0.0)
    first = History(path)
    with path.open("a") as file:
        file.write('{"step": 7')  # a line that the first writer has not finished
    with pytest.raises(RecordsFailed, match="another run goes on in"):
        History(path)
    assert path.read_text() == '{"step": 7'
    first.close()
    History(path).close()
    assert path.read_text() == ""


def test_steps_lost_before_a_resume_are_not_committed(path: Path) -> None:
    write(path, None, records(0, 7))
    write(path, 4, records(4, 9, loss=1.0))
    write(path, 6, records(6, 8, loss=0.5))
    assert read(path).steps == records(0, 4) + records(4, 6, loss=1.0) + records(6, 8, loss=0.5)
    assert read(path).resumed_at == [4, 6]


def test_written_lines_are_never_rewritten(path: Path) -> None:
    write(path, None, records(0, 7))
    before = path.read_bytes()
    write(path, 4, records(4, 9))
    assert path.read_bytes().startswith(before)


@pytest.mark.parametrize("num_bytes_lost", [1, 20])
def test_a_line_torn_by_a_kill_is_left_out_and_cut_off_by_the_next_run(
    path: Path, num_bytes_lost: int
) -> None:
    write(path, None, records(0, 3))
    path.write_bytes(path.read_bytes()[:-num_bytes_lost])
    assert read(path).steps == records(0, 2)
    write(path, 2, records(2, 4))
    assert read(path).steps == records(0, 4)


def test_the_digest_depends_on_the_ids_and_their_order() -> None:
    assert digest([12, 3]) == hashlib.sha256(b"12\n3\n").hexdigest()[:16]
    assert len({digest([12, 3]), digest([3, 12]), digest([1, 23]), digest([12]), digest([])}) == 5
