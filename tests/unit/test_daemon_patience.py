from gyre_daemon.patience import Patience


def test_patience_runs_out_with_the_time_that_is_lost() -> None:
    patience = Patience(limit_s=0.05, forgiven=0.05)
    assert patience.left_s(100.0) == 0.05
    patience.lose(100.0, 100.02)
    assert round(patience.left_s(100.02), 6) == 0.03
    patience.lose(100.02, 100.06)
    assert patience.left_s(100.06) == 0


def test_little_is_forgiven_for_ever_and_much_is_not() -> None:
    little, much = Patience(0.05, 0.05), Patience(0.05, 0.05)
    for second in range(1000):
        little.lose(second, second + 0.04)  # four hundredths of the time
        if second < 20:
            much.lose(second, second + 0.08)
    assert little.left_s(1000.0) > 0
    assert much.left_s(20.0) == 0


def test_long_ago_is_forgotten() -> None:
    patience = Patience(0.05, 0.05)
    patience.lose(0.0, 1.0)
    assert patience.left_s(1.0) == 0
    assert patience.left_s(1000.0) == 0.05
