"""What an answer means, and what its error says."""

import pytest
from gyre_daemon.errors import CorruptSample, GyreError, NotAllowed, ShardMissing, StorageUnavailable
from gyre_daemon.storage.answer import Answer, Meaning, Range, failure, final_error, meaning, told
from gyre_daemon.storage.shard import Shard

SHARD = Shard("a/0.tar", 1000, '"v1"')
WANTED = Range(SHARD, 100, 150)
WHOLE = Range(SHARD, 0, 1000)


@pytest.mark.parametrize(
    ("wanted", "answer", "means"),
    [
        (WANTED, Answer(206, bytes(50)), Meaning.GOOD),
        (WANTED, Answer(206, bytes(50), '"v1"', 1000), Meaning.GOOD),
        (WANTED, Answer(206, bytes(50), 'W/"v1"', 1000), Meaning.GOOD),
        (WANTED, Answer(206, bytes(50), "v1", 1000), Meaning.GOOD),
        (WHOLE, Answer(200, bytes(1000), '"v1"'), Meaning.GOOD),
        (WANTED, Answer(206, bytes(50), '"v2"', 1000), Meaning.FINAL),
        (WANTED, Answer(206, bytes(50), '"v1"', 999), Meaning.FINAL),
        (WANTED, Answer(200, bytes(50), '"v1"'), Meaning.FINAL),
        (WANTED, Answer(206, bytes(49), '"v1"', 1000), Meaning.AGAIN),
        (WANTED, Answer(206, bytes(51), '"v1"', 1000), Meaning.AGAIN),
        (WANTED, Answer(0, detail="reset"), Meaning.AGAIN),
        (WANTED, Answer(0, detail="no route", unreachable=True), Meaning.REFUSED),
        (WANTED, Answer(400, detail="<Code>ExpiredToken</Code>"), Meaning.REFRESH),
        *((WANTED, Answer(status), Meaning.REFUSED) for status in (429, 503)),
        *((WANTED, Answer(status), Meaning.AGAIN) for status in (408, 500, 502, 504)),
        *((WANTED, Answer(status), Meaning.REFRESH) for status in (301, 307, 401, 403)),
        *((WANTED, Answer(status), Meaning.FINAL) for status in (400, 404, 405, 410, 412, 416)),
    ],
)
def test_meanings(wanted: Range, answer: Answer, means: Meaning) -> None:
    assert meaning(wanted, answer, 1) is means


def test_an_answer_that_is_always_too_short_is_believed_at_last_unless_the_size_speaks_against_it() -> None:
    assert meaning(WANTED, Answer(206, bytes(49), '"v1"', 1000), 30) is Meaning.AGAIN
    short = Answer(206, bytes(49))
    assert [meaning(WANTED, short, num_tries) for num_tries in (2, 3)] == [Meaning.AGAIN, Meaning.FINAL]
    assert str(final_error(WANTED, short)).startswith("shard a/0.tar is shorter than its index says: bytes [100, 150) were")


def test_a_version_that_is_a_time_is_no_etag() -> None:
    wanted = Range(Shard("a", 1000, "2026-01-01 00:00:00"), 100, 150)
    assert meaning(wanted, Answer(206, bytes(50), '"v2"'), 1) is Meaning.GOOD


@pytest.mark.parametrize(
    ("answer", "error", "sentence"),
    [
        (Answer(404), ShardMissing, "a/0.tar does not exist"),
        (Answer(403), NotAllowed, "refused access to a/0.tar; check the daemon's credentials"),
        (Answer(412), CorruptSample, "a/0.tar has changed"),
        (Answer(206, bytes(50), '"v2"'), CorruptSample, "a/0.tar has changed"),
        (Answer(200, bytes(9)), StorageUnavailable, "whole objects where a range"),
        (Answer(400, detail="what?\nmore"), StorageUnavailable, r"HTTP status 400 what\?$"),
        (Answer(302), StorageUnavailable, "HTTP status 302$"),
    ],
)
def test_errors_name_the_shard(answer: Answer, error: type[GyreError], sentence: str) -> None:
    with pytest.raises(error, match=sentence) as caught:
        raise final_error(WANTED, answer)
    assert caught.value.facts["shard"] == "a/0.tar"


def test_what_drivers_raise() -> None:
    class Odd(Exception):
        status = 503

    assert failure(FileNotFoundError("x")).status == 404
    assert failure(PermissionError("x")).status == 403
    assert failure(Odd()).status == 503
    assert failure(ValueError("Client error with status code: 429 Too Many")).status == 429
    assert failure(ConnectionResetError("gone")) == Answer(0, detail="ConnectionResetError: gone")


def test_secrets_and_further_lines_are_not_repeated() -> None:
    said = told(failure(OSError("GET http://me:secret@host/a?X-Amz-Signature=secret failed\nsecret")))
    assert "secret" not in said
    assert said.startswith("OSError: GET http://***@host/a")
