from gyre_daemon.sessions.patience import Patience


def test_patience_runs_out_with_the_time_that_is_lost() -> None:
    patience = Patience([(0.05, 0.05)])
    assert patience.left_s(100.0) == 0.05
    patience.lose(100.0, 100.02)
    assert round(patience.left_s(100.02), 6) == 0.03
    patience.lose(100.02, 100.06)
    assert patience.left_s(100.06) == 0


def test_little_is_forgiven_for_ever_and_much_is_not() -> None:
    little, much = Patience([(0.05, 0.05)]), Patience([(0.05, 0.05)])
    for second in range(1000):
        little.lose(second, second + 0.04)  # four hundredths of the time
        if second < 20:
            much.lose(second, second + 0.08)
    assert little.left_s(1000.0) > 0
    assert much.left_s(20.0) == 0


def test_long_ago_is_forgotten() -> None:
    patience = Patience([(0.05, 0.05)])
    patience.lose(0.0, 1.0)
    assert patience.left_s(1.0) == 0
    assert patience.left_s(1000.0) == 0.05


def test_more_is_forgiven_for_a_while_than_in_the_long_run() -> None:
    patience = Patience([(0.25, 0.25), (1.0, 0.05)])
    for turn in range(100):
        assert (patience.left_s(turn * 0.1) > 0.19) == (turn < 51), "a fifth of the time, but not for more than some seconds"
        patience.lose(turn * 0.1, turn * 0.1 + 0.02)
    assert patience.left_s(10.0) == 0
    assert patience.left_s(1000.0) == 0.25


def test_who_loses_as_much_as_it_costs_is_forgiven_all() -> None:
    patience = Patience([(0.25, 1.0), (1.0, 0.05)])
    for turn in range(100):
        began = turn * 0.2
        assert patience.left_s(began) == 0.25
        patience.lose(began, began + 0.1)
        patience.regain(began + 0.1, began + 0.2)


def test_nothing_is_forgiven_in_advance() -> None:
    patience = Patience([(0.25, 0.0)])
    patience.regain(0.0, 5.0)
    patience.lose(5.0, 5.2)
    assert round(patience.left_s(5.2), 6) == 0.05


def test_losses_that_overlap_are_no_more_than_their_sum() -> None:
    patience = Patience([(1.0, 1.0)])
    patience.lose(0.0, 0.3)
    patience.lose(0.1, 0.4)
    assert round(patience.left_s(0.4), 6) == 0.4
