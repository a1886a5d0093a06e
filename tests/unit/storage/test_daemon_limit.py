"""The adaptive limit grows by trying, shrinks when throttled, and recovers."""

from gyre_daemon.storage.engine.policies import AdaptiveLimit


def play(
    limit: AdaptiveLimit, num_rounds: int, share_refused: float = 0.0, first_byte_s: float = 0.02
) -> None:
    """Play rounds in which the whole limit is in flight."""
    for _ in range(num_rounds):
        of_round, num_in_flight = limit.round, limit.limit
        num_refused = round(num_in_flight * share_refused)
        for number in range(num_in_flight):
            refused = (
                number * num_refused // num_in_flight != (number + 1) * num_refused // num_in_flight
            )
            limit.done(of_round, num_in_flight, None if refused else first_byte_s)


def test_it_doubles_until_the_ceiling() -> None:
    limit = AdaptiveLimit(1000)
    seen = []
    for _ in range(4):
        seen.append(limit.limit)
        play(limit, 1)
    assert seen == [256, 512, 1000, 1000]


def test_a_limit_that_is_not_used_is_not_raised() -> None:
    limit = AdaptiveLimit(1000)
    for _ in range(5000):
        limit.done(limit.round, 20, 0.02)
    assert limit.limit == 256


def test_a_throttled_round_leaves_what_got_through_and_growth_is_by_a_constant() -> None:
    limit = AdaptiveLimit(1000)
    play(limit, 1, share_refused=0.25)
    assert (limit.limit, limit.is_throttled) == (192, True)
    play(limit, 1)
    assert (limit.limit, limit.is_throttled) == (200, False)
    play(limit, 100)
    assert limit.limit == 1000


def test_it_finds_what_the_storage_takes_and_stays_near_it() -> None:
    limit, capacity = AdaptiveLimit(2000), 150
    for _ in range(300):
        play(limit, 1, share_refused=max(0.0, 1 - capacity / limit.limit))
    assert capacity * 0.9 <= limit.limit <= capacity * 1.1


def test_a_storm_takes_it_to_the_floor_at_once_and_its_end_lets_it_recover() -> None:
    limit = AdaptiveLimit(512)
    play(limit, 2)
    num_sent = limit.limit
    for _ in range(num_sent):  # all that was in flight is refused
        limit.done(2, num_sent, None)
    assert limit.limit == 4
    for number in range(1, 10):
        play(limit, 1, share_refused=1.0)
        assert limit.num_failed_rounds > number
    play(limit, 1)
    assert limit.num_failed_rounds == 0
    play(limit, 64)
    assert limit.limit == 512


def test_responses_to_requests_sent_before_it_was_lowered_are_ignored() -> None:
    limit = AdaptiveLimit(256)
    sent_in = limit.round
    for _ in range(128):
        limit.done(sent_in, 256, None)
    lowered = limit.limit
    for _ in range(128):
        assert not limit.done(sent_in, 256, None)
    assert limit.limit == lowered


def test_late_first_bytes_lower_it_slowly_and_never_far() -> None:
    limit = AdaptiveLimit(512)
    play(limit, 2, first_byte_s=0.02)
    assert limit.limit == 512
    play(limit, 1, first_byte_s=0.2)
    assert limit.limit == 460
    play(limit, 100, first_byte_s=0.2)
    assert limit.limit == 64
    assert not limit.is_throttled
    play(limit, 80, first_byte_s=0.02)
    assert limit.limit == 512


def test_the_delay_of_a_busy_processor_is_not_taken_for_a_slow_storage() -> None:
    limit = AdaptiveLimit(1024)
    play(limit, 2, first_byte_s=0.02)
    play(limit, 100, first_byte_s=0.09)
    assert limit.limit == 1024


def test_a_storage_that_is_slower_for_good_is_the_new_normal() -> None:
    limit = AdaptiveLimit(512)
    play(limit, 2, first_byte_s=0.02)
    play(limit, 1200, first_byte_s=0.2)
    assert limit.limit == 512


def test_it_grows_gently_where_latency_grows_with_it() -> None:
    limit = AdaptiveLimit(1000)
    play(limit, 1, first_byte_s=0.02)
    assert limit.limit == 512
    play(limit, 1, first_byte_s=0.04)
    assert limit.limit == 640
    play(limit, 1, first_byte_s=0.025)
    assert limit.limit == 1000


def test_a_round_counts_only_requests_sent_at_the_new_limit() -> None:
    limit = AdaptiveLimit(2000)
    play(limit, 1)
    for _ in range(256):  # sent before
        assert not limit.done(0, 512, 0.02)
    for _ in range(511):
        assert not limit.done(1, 512, 0.02)
    assert limit.done(1, 512, 0.02)
    assert limit.limit == 1024
