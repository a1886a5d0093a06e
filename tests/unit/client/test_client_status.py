"""What `gyre status` and `gyre top` show: rates, their meaning, tables that fit, colours."""

import io
import re

import pytest
from gyre_client.command.output import cut, painted, stacked, table, width
from gyre_client.command.status import full_text, summary_lines, to_plain
from gyre_client.page.watch import SessionRates, session_rates
from gyre_protos.text import printable
from gyre_protos.v1 import loader_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st


def answer(*sessions: pb.SessionState) -> pb.DaemonStatus:
    return pb.DaemonStatus(
        version="1.2.3", pid=7, uptime_s=9.0, sessions=sessions, memory_budget_bytes=1 << 30
    )


def session(
    handle: str = "a", job: str = "train", elapsed_s: float = 2.0, **lately: float
) -> pb.SessionState:
    reader = pb.Reader(job=job, rank=1, world_size=2)
    its = pb.Lately(elapsed_s=elapsed_s, **lately)
    return pb.SessionState(handle=handle, dataset="wiki", reader=reader, lately=its)


def test_the_last_seconds_of_a_session() -> None:
    found = session(
        batches_per_s=25.0,
        bytes_per_s=2000.0,
        window_ready_batch_s=4.0,
        window_size_batch_s=8.0,
        wait_storage_s=0.5,
        wait_processor_s=0.1,
        wait_trainer_s=1.0,
        trainer_waited_s=0.25,
    )
    assert session_rates(found) == SessionRates(25.0, 2000.0, 0.5, 0.125, 0.25, 0.05, 0.5)


def test_a_mount_that_hangs_is_named() -> None:
    found = answer()
    found.mounts.add(path="/data", file_system="ext4")
    assert "hangs" not in full_text(found, 100)
    found.mounts.add(path="/mnt/\x1b[31m", file_system="nfs4", hangs_since_s=83.0)
    line = r"hangs +/mnt/\\x1b\[31m \(nfs4\) has not answered for 1 min 23 s"
    assert re.search(line, full_text(found, 100))


@pytest.mark.parametrize(
    ("ready_s", "processor_s", "starved_s", "meaning"),
    [
        (0.0, 0.1, 0.2, "storage-bound"),
        (2.0, 0.1, 0.2, "storage-bound"),
        (2.0, 0.3, 0.2, "processor-bound"),
        (2.0, 0.3, 0.05, "trainer-bound"),
        (4.0, 0.3, 0.2, "balanced"),
        (7.0, 0.3, 0.2, "trainer-bound"),
        (8.0, 0.0, 0.0, "trainer-bound"),
    ],
)
def test_the_occupancy_of_the_window_tells_the_bottleneck(
    ready_s: float, processor_s: float, starved_s: float, meaning: str
) -> None:
    found = session_rates(
        session(
            window_ready_batch_s=ready_s,
            window_size_batch_s=8.0,
            wait_storage_s=0.2,
            wait_processor_s=processor_s,
            trainer_waited_s=starved_s,
        )
    )
    assert found
    assert found.meaning == meaning


def test_peers_are_shown_where_there_are_some() -> None:
    first, second, alone = session("a"), session("b"), session("c", job="other")
    first.reader.peer, second.reader.peer = 5, 3
    lines = full_text(answer(alone, first, second), 300).splitlines()
    begin = next(number for number, line in enumerate(lines) if line.endswith("PEER"))
    assert [line.split()[-1] for line in lines[begin + 1 : begin + 4]] == ["-", "3", "5"]
    assert "PEER" not in full_text(answer(alone), 300)


def test_a_metric_of_sessions_is_a_column_in_the_unit_of_its_name() -> None:
    first, second = session("a"), session("b", job="trial")
    first.metrics["gyre_job_new_things_total"] = 1234
    first.metrics["gyre_job_new_bytes"] = 3 << 20
    first.metrics["gyre_job_old_things_total"] = 0
    lines = full_text(answer(first, second), 300).splitlines()
    assert lines[-3].split()[-3:] == ["NEW", "NEW", "THINGS"]
    assert lines[-2].split()[-3:] == ["3.0", "MiB", "1,234"]
    assert lines[-1].split()[-3:] == ["0", "B", "0"]
    metrics = to_plain(answer(first))["sessions"][0]["metrics"]
    assert metrics["gyre_job_new_things_total"] == 1234


@pytest.mark.parametrize(("batches_per_s", "meaning"), [(1.0, "trainer-bound"), (0.0, "idle")])
def test_a_session_without_a_window_waits_for_nothing(batches_per_s: float, meaning: str) -> None:
    """Its client has the last batches, and its trainer still takes them or is gone."""
    found = session_rates(session(batches_per_s=batches_per_s))
    assert found
    assert found.meaning == meaning


def test_a_share_of_the_time_never_exceeds_one() -> None:
    found = session_rates(session(trainer_waited_s=100.0))
    assert found
    assert found.starved == 1.0


def test_a_new_session_has_no_rates_yet() -> None:
    status = answer(session("a"), session("b", elapsed_s=0.01))
    text = full_text(status, 200)
    assert [line.split()[2] for line in text.splitlines()[-2:]] == ["0.0", "-"]
    assert [
        item["rates"] and item["rates"]["meaning"] for item in to_plain(status)["sessions"]
    ] == [
        "idle",
        None,
    ]


def crowded() -> pb.DaemonStatus:
    """Long names, large numbers, every kind of table."""
    status = answer(
        *(
            session(str(n), f"job-{n}-" + "x" * 90, batches_per_s=1e7, bytes_per_s=1e12)
            for n in range(3)
        )
    )
    status.cache.CopyFrom(
        pb.CacheCount(
            num_hits=10**9, num_misses=10**9, num_joined=10**9, num_past=10**9, num_evicted=10**9
        )
    )
    for each in status.sessions:
        each.metrics["gyre_job_held_batches"] = 10**9
        each.metrics["gyre_job_wait_for_processor_seconds_total"] = 1e7
    status.storage.add(
        scheme="s3",
        kind="read",
        outcome="abandoned",
        num_requests=10**12,
        num_bytes=10**15,
        first_byte_s=1.0,
    )
    status.endpoints.add(
        name="https://storage.example.com/" + "bucket" * 20, limit=1024, num_waiting=10**6
    )
    status.mounts.add(
        path="/mnt/" + "folder" * 20, file_system="fuse.s3fs", guessed_slow=True, read_s=0.0123
    )
    return status


@pytest.mark.parametrize("num_columns", [60, 80, 100, 300])
def test_a_status_fits_a_page_and_leaves_nothing_out(num_columns: int) -> None:
    text = full_text(crowded(), num_columns)
    assert max(map(width, text.split("\n"))) <= num_columns
    for name in (
        "BATCHES/S",
        "MEANING",
        "STARVED",
        "MEMORY",
        "HELD BATCHES",
        "WAIT FOR PROCESSOR",
        "2777 h 46 min",
        "OUTCOME",
        "RETRIES LEFT",
        "MEDIAN READ",
        "12.3 ms",
    ):
        assert name in text
    assert text.count("MEANING") == 1


class Output(io.StringIO):
    """What is written to, a terminal or not."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    text = full_text(answer(session(window_size_batch_s=8.0, trainer_waited_s=1.0)), 80)
    shown = painted(text, Output(is_terminal=True))
    assert "\x1b[33mstorage-bound\x1b[0m" in shown
    assert re.sub(r"\x1b\[\d+m", "", shown) == text
    assert painted(text, Output(is_terminal=False)) == text
    monkeypatch.setenv("NO_COLOR", "1")
    assert painted(text, Output(is_terminal=True)) == text
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "dumb")
    assert painted(text, Output(is_terminal=True)) == text


def test_a_look_at_every_size_of_terminal_fits() -> None:
    sessions = [
        session(f"{n}", f"job {n} \u4e00\u4e8c", batches_per_s=n, window_size_batch_s=1.0)
        for n in range(30)
    ]
    snapshot = answer(*sessions)
    for num_columns in (*range(1, 80), *range(80, 160, 10)):
        for num_lines in (1, 3, 10, None):
            lines = summary_lines(snapshot, num_columns, num_lines)
            assert all(width(line) <= num_columns for line in lines)
            assert num_lines is None or len(lines) <= num_lines
    wide = "\n".join(summary_lines(snapshot, 160, None))
    assert "JOB" in wide
    assert "BY" in wide
    narrow = summary_lines(snapshot, 40, 10)
    assert narrow[3].split() == ["JOB", "RANK", "BATCHES/S"]
    assert narrow[-1] == "and 25 more"


def test_a_job_s_name_cannot_draw_on_the_terminal() -> None:
    hostile = session("a", "\x1b[2J\r\nroot# \u202e")
    snapshot = answer(hostile)
    for text in (full_text(snapshot, 80), *summary_lines(snapshot, 100, 40)):
        assert "\x1b" not in text
        assert "\r" not in text
        assert "\u202e" not in text


TEXT = st.text(max_size=12)


@given(st.lists(st.tuples(TEXT, TEXT, TEXT), max_size=5), st.integers(0, 3), st.integers(0, 40))
def test_tables_fit(rows: list[tuple[str, str, str]], num_keys: int, num_columns: int) -> None:
    tables = stacked(("ONE", "TWO", "THREE"), rows, num_keys, num_columns)
    for each in tables:
        lines = each.split("\n")
        assert len(lines) == 1 + len(rows)
        assert all(width(line) <= num_columns for line in lines)
    assert len(tables) <= max(1, 3 - num_keys)
    whole = stacked(("ONE", "TWO", "THREE"), rows, num_keys, 1000)
    assert whole == [table(("ONE", "TWO", "THREE"), rows)]


@given(TEXT, st.integers(0, 20))
def test_a_cut_line_begins_like_the_whole_one(text: str, num_columns: int) -> None:
    line = printable(text)
    found = cut(line, num_columns)
    assert (
        found == line
        if width(line) <= num_columns
        else line.startswith(found.removesuffix("\u2026"))
    )
    assert width(found) <= num_columns


def test_how_a_dataset_has_grown_is_a_column() -> None:
    state = session("a")
    assert "SAMPLES" not in full_text(answer(state), 200)
    state.stages.add(num_samples=5000)
    state.stages.add(first_epoch=3, num_samples=8000)
    text = full_text(answer(state, session("b")), 80)
    assert "5,000, 8,000 from epoch 3" in text


def test_the_sessions_of_others_are_counted() -> None:
    status = pb.DaemonStatus(num_hidden_sessions=3)
    assert "0 sessions and 3 of other users" in full_text(status, 100)
    assert summary_lines(status, 100, None)[1].startswith("0 sessions and 3 of other users, ")
