"""The progress bar: the part that is done, the rate of the last seconds, and the time left."""

from collections.abc import Sequence

import pytest
from gyre_client.display.terminal import ProgressBar


def lines_of(times_s: Sequence[float], done: Sequence[int], num_all: int = 10) -> list[str]:
    clock = iter([0.0, *times_s])
    lines: list[str] = []
    with ProgressBar("shards", lines.append, lambda: next(clock)) as bar:
        for number in done:
            bar.update(number, num_all, "a.tar")
    return lines


def test_a_bar_says_how_far_how_fast_and_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    first, second, last = lines_of([2.0, 4.0], [1, 5])
    assert first == "[##......................]  10% 1/10 shards, 0.5/s, 18.0 s left, a.tar"
    assert second == "[############............]  50% 5/10 shards, 1.2/s, 4.0 s left, a.tar"
    assert last == "", "the line is gone at the end"


def test_the_rate_is_that_of_the_last_seconds() -> None:
    *_, line, _ = lines_of([0.5, 100.0, 110.0], [500, 501, 502], 512)
    assert "0.1/s, 1 min 40 s left" in line, "500 shards had their index already"


def test_a_line_fits_the_terminal_and_comes_ten_times_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = lines_of([number / 1000 for number in range(1, 501)], range(1, 501), 500)
    assert len(lines) == 6 + 1  # five, the last one, and the empty one
    assert max(map(len, lines)) == 39


def test_nothing_to_do_is_done() -> None:
    assert "100% 0/0 shards" in lines_of([1.0], [0], 0)[0]
