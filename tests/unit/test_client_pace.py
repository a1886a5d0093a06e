"""From two answers of a daemon to what is shown: pace, its meaning in words, and tables that fit."""

import pytest
from gyre_client.pace import Pace, paces
from gyre_client.report import cut, fitted, printable, table, width
from gyre_client.status import Snapshot, full_text, screen
from gyre_protos.v1 import loader_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st


def answer(uptime_s: float, *sessions: pb.SessionState, pid: int = 7) -> pb.DaemonStatus:
    return pb.DaemonStatus(version="1.2.3", pid=pid, uptime_s=uptime_s, sessions=sessions, memory_budget_bytes=1 << 30)


def session(session_id: str = "a", job: str = "train", **fields: float) -> pb.SessionState:
    numbers = {name: int(value) if name.startswith("num_") else value for name, value in fields.items()}
    reader = pb.Reader(job=job, rank=1, world_size=2)
    return pb.SessionState(session_id=session_id, dataset="wiki", reader=reader, **numbers)  # type: ignore[arg-type]


def pace_between(before: pb.SessionState, after: pb.SessionState, elapsed_s: float = 2.0) -> Pace:
    return paces(answer(10.0, before), answer(10.0 + elapsed_s, after))["a"]


def test_rates_are_means_of_the_time_between_two_answers() -> None:
    before = session(num_batches_sent=100, num_bytes_sent=1000, window_ready_batch_s=5.0, window_size_batch_s=8.0)
    after = session(
        num_batches_sent=150,
        num_bytes_sent=5000,
        window_ready_batch_s=9.0,
        window_size_batch_s=16.0,
        wait_storage_s=0.5,
        wait_trainer_s=1.0,
        trainer_waited_s=0.25,
    )
    assert pace_between(before, after) == Pace(25.0, 2000.0, 0.5, 0.125, 0.25, 0.5)


@pytest.mark.parametrize(
    ("ready_s", "meaning"),
    [(0.0, "storage-bound"), (2.0, "storage-bound"), (4.0, "balanced"), (7.0, "trainer-bound"), (8.0, "trainer-bound")],
)
def test_what_a_window_means(ready_s: float, meaning: str) -> None:
    after = session(window_ready_batch_s=ready_s, window_size_batch_s=8.0)
    assert pace_between(session(), after).meaning == meaning


def test_a_session_at_its_end_is_idle() -> None:
    assert pace_between(session(window_size_batch_s=8.0), session(window_size_batch_s=8.0)).meaning == "idle"


def test_what_was_waited_before_an_answer_and_told_after_it_is_no_more_than_all_of_the_time() -> None:
    assert pace_between(session(), session(trainer_waited_s=100.0)).starved == 1.0


def test_who_is_new_has_no_pace_yet() -> None:
    before, after = answer(1.0, session("a")), answer(2.0, session("a"), session("b"))
    assert set(paces(before, after)) == {"a"}
    assert paces(before, answer(2.0, session("a"), pid=8)) == {}, "another daemon"
    assert paces(before, before) == {}
    text = full_text(Snapshot.between(before, after))
    assert [line.split()[4] for line in text.splitlines()[-2:]] == ["0.0", "-"]
    plain = Snapshot.between(before, after).to_plain()
    assert [item["pace"] and item["pace"]["meaning"] for item in plain["sessions"]] == ["idle", None]


def test_a_look_at_every_size_of_terminal_fits() -> None:
    sessions = [session(f"{n}", f"job {n} \u4e00\u4e8c", num_batches_sent=n, window_size_batch_s=1.0) for n in range(30)]
    snapshot = Snapshot.between(answer(1.0, *(session(f"{n}") for n in range(30))), answer(2.0, *sessions))
    for num_columns in range(1, 160):
        for num_lines in (1, 2, 3, 10, 100, None):
            lines = screen(snapshot, num_columns, num_lines)
            assert all(width(line) <= num_columns for line in lines)
            assert num_lines is None or len(lines) <= num_lines
    wide = "\n".join(screen(snapshot, 160, None))
    assert "JOB" in wide
    assert "BY" in wide
    narrow = screen(snapshot, 40, 10)
    assert narrow[3].split() == ["JOB", "BATCHES/S", "WINDOW"]
    assert narrow[-1] == "and 25 more"


def test_a_job_s_name_cannot_draw_on_the_terminal() -> None:
    hostile = session("a", "\x1b[2J\r\nroot# \u202e")
    snapshot = Snapshot.between(answer(1.0, hostile), answer(2.0, hostile))
    for text in (full_text(snapshot), *screen(snapshot, 100, 40)):
        assert "\x1b" not in text
        assert "\r" not in text
        assert "\u202e" not in text


TEXT = st.text(max_size=12)


@given(st.lists(st.tuples(TEXT, TEXT, TEXT), max_size=5), st.permutations(range(3)), st.integers(0, 40))
def test_tables_fit(rows: list[tuple[str, str, str]], ranks: list[int], num_columns: int) -> None:
    lines = fitted(("ONE", "TWO", "THREE"), rows, ranks, num_columns)
    assert len(lines) == 1 + len(rows)
    assert all(width(line) <= num_columns for line in lines)
    whole = fitted(("ONE", "TWO", "THREE"), rows, ranks, 1000)
    assert whole == table(("ONE", "TWO", "THREE"), rows).split("\n")


@given(TEXT, st.integers(0, 20))
def test_a_cut_line_begins_like_the_whole_one(text: str, num_columns: int) -> None:
    line = printable(text)
    found = cut(line, num_columns)
    assert found == line if width(line) <= num_columns else line.startswith(found.removesuffix("\u2026"))
    assert width(found) <= num_columns
