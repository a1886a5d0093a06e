"""What to do about a response, and what its error says."""

import ftplib

import pytest
from gyre_daemon.errors import (
    CorruptSample,
    GyreError,
    NotAllowed,
    ShardMissing,
    StorageUnavailable,
)
from gyre_daemon.storage.response import (
    ByteRange,
    Response,
    Verdict,
    classify,
    describe,
    final_error,
    response_from_error,
)
from gyre_daemon.storage.shard import Shard, Validators

SHARD = Shard("a/0.tar", 1000, '"v1"', validators=Validators('"v1"'))
WANTED = ByteRange([SHARD], 0, 100, 150)
WHOLE = ByteRange([SHARD], 0, 0, 1000)


@pytest.mark.parametrize(
    ("wanted", "answer", "means"),
    [
        (WANTED, Response(206, bytes(50)), Verdict.OK),
        (WANTED, Response(206, bytes(50), Validators('"v1"'), 1000), Verdict.OK),
        (WANTED, Response(206, bytes(50), Validators('W/"v1"'), 1000), Verdict.OK),
        (WANTED, Response(206, bytes(50), Validators("v1"), 1000), Verdict.OK),
        (WHOLE, Response(200, bytes(1000), Validators('"v1"')), Verdict.OK),
        (WANTED, Response(206, bytes(50), Validators('"v2"'), 1000), Verdict.FAILED),
        (WANTED, Response(206, bytes(50), Validators('"v1"'), 999), Verdict.FAILED),
        (WANTED, Response(200, bytes(50), Validators('"v1"')), Verdict.FAILED),
        (WANTED, Response(206, bytes(49), Validators('"v1"'), 1000), Verdict.RETRY),
        (WANTED, Response(206, bytes(51), Validators('"v1"'), 1000), Verdict.RETRY),
        (WANTED, Response(0, detail="reset"), Verdict.RETRY),
        (WANTED, Response(0, detail="no route", unreachable=True), Verdict.THROTTLED),
        (WANTED, Response(400, detail="<Code>ExpiredToken</Code>"), Verdict.REFRESH),
        *((WANTED, Response(status), Verdict.THROTTLED) for status in (429, 503)),
        *((WANTED, Response(status), Verdict.RETRY) for status in (408, 500, 502, 504)),
        *((WANTED, Response(status), Verdict.REFRESH) for status in (301, 307, 401, 403)),
        *((WANTED, Response(status), Verdict.FAILED) for status in (400, 404, 405, 410, 412, 416)),
    ],
)
def test_verdicts(wanted: ByteRange, answer: Response, means: Verdict) -> None:
    assert classify(wanted, answer, 1) is means


def test_a_body_that_stays_too_short_is_a_truncated_shard_unless_its_size_is_right() -> None:
    assert classify(WANTED, Response(206, bytes(49), Validators('"v1"'), 1000), 30) is Verdict.RETRY
    short = Response(206, bytes(49))
    assert [classify(WANTED, short, num_tries) for num_tries in (2, 3)] == [
        Verdict.RETRY,
        Verdict.FAILED,
    ]
    assert str(final_error(WANTED, short)).startswith(
        "shard a/0.tar is shorter than its index says: only 49 bytes of [100, 150)"
    )


def test_a_time_is_compared_with_times_alone() -> None:
    listed = Validators(modified="2026-01-01 00:00:00+00:00")
    wanted = ByteRange([Shard("a", 1000, listed.text, validators=listed)], 0, 100, 150)
    told = Response(206, bytes(50), Validators('"v2"'))
    assert classify(wanted, told, 1) is Verdict.OK
    told.told = Validators('"v2"', modified="Thu, 01 Jan 2026 00:00:00 GMT")
    assert classify(wanted, told, 1) is Verdict.OK
    told.told = Validators('"v2"', modified="Thu, 01 Jan 2026 00:00:01 GMT")
    assert classify(wanted, told, 1) is Verdict.FAILED


@pytest.mark.parametrize(
    ("answer", "error", "sentence"),
    [
        (Response(404), ShardMissing, "a/0.tar does not exist"),
        (Response(403), NotAllowed, "refused access to a/0.tar; check the daemon's credentials"),
        (
            Response(403, detail="<Error><Code>AccessDenied</Code></Error>"),
            NotAllowed,
            r"refused access to a/0.tar \(AccessDenied\); .* grant them .* `s3:ListBucket`",
        ),
        (
            Response(403, detail="<Error><Code>SignatureDoesNotMatch</Code><X>k</X></Error>"),
            NotAllowed,
            r"a/0.tar \(SignatureDoesNotMatch\); .* check `secret_access_key`",
        ),
        (
            Response(403, detail='{"error": {"errors": [{"reason": "forbidden"}], "code": 403}}'),
            NotAllowed,
            r"a/0.tar \(forbidden\); .* grant them",
        ),
        (
            Response(400, detail="<Error><Code>ExpiredToken</Code></Error>"),
            NotAllowed,
            r"a/0.tar \(ExpiredToken\); the session's token has expired",
        ),
        (
            Response(403, detail="<Error><Code>SomethingNew</Code></Error>"),
            NotAllowed,
            r"a/0.tar \(SomethingNew\); check the daemon's credentials",
        ),
        (Response(412), CorruptSample, "a/0.tar has changed"),
        (Response(206, bytes(50), Validators('"v2"')), CorruptSample, "a/0.tar has changed"),
        (Response(200, bytes(9)), StorageUnavailable, "whole objects where a range"),
        (Response(400, detail="what?\nmore"), StorageUnavailable, r"HTTP status 400 what\?$"),
        (Response(302), StorageUnavailable, "HTTP status 302$"),
    ],
)
def test_errors_name_the_shard(answer: Response, error: type[GyreError], sentence: str) -> None:
    with pytest.raises(error, match=sentence) as caught:
        raise final_error(WANTED, answer)
    assert caught.value.facts["shard"] == "a/0.tar"


def test_responses_from_driver_exceptions() -> None:
    class Odd(Exception):
        status = 503

    assert response_from_error(FileNotFoundError("x")).status == 404
    assert response_from_error(PermissionError("x")).status == 403
    assert response_from_error(Odd()).status == 503
    assert (
        response_from_error(ValueError("Client error with status code: 429 Too Many")).status == 429
    )
    assert response_from_error(ConnectionResetError("gone")) == Response(
        0, detail="ConnectionResetError: gone"
    )


def test_messages_contain_no_secrets_and_one_line() -> None:
    said = describe(
        response_from_error(
            OSError("GET http://me:secret@host/a?X-Amz-Signature=secret failed\nsecret")
        )
    )
    assert "secret" not in said
    assert said.startswith("OSError: GET http://***@host/a")


EVIL = "\x1b[2J\x9b31m\u202e"


@pytest.mark.parametrize(
    ("detail", "said"),
    [
        (f"no{EVIL}\rway", "HTTP status 400 no\\x1b[2J\\x9b31m\\u202e\\rway"),
        ("<E><Code>SlowDown</Code><Message>secret</Message></E>", "HTTP status 400 (SlowDown)"),
        ('<?xml version="1.0"?>\n<Error>\n<Code>Gone.1</Code>', "HTTP status 400 (Gone.1)"),
        (f"<Error><Code>Slow{EVIL}</Code></Error>", "HTTP status 400"),
        ('{"error": {"reason": "slowDown", "message": "secret"}}', "HTTP status 400 (slowDown)"),
        ("<html><body>secret</body></html>", "HTTP status 400"),
        ("x" * 5000, "HTTP status 400 " + "x" * 300),
    ],
)  # fmt: skip
def test_a_storages_words_are_shown_as_far_as_they_help(detail: str, said: str) -> None:
    assert describe(Response(400, detail=detail)) == said


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ftplib.error_perm("550 No such file or directory."), 404),
        (ftplib.error_perm("550 a.bin: Permission denied"), 403),
        (ftplib.error_perm("530 Authentication failed."), 403),
        (ftplib.error_temp("421 Too many connections."), 503),
        (ftplib.error_temp("450 Busy."), 0),
    ],
    ids=str,
)
def test_the_errors_of_drivers(error: Exception, status: int) -> None:
    assert response_from_error(error).status == status


def test_the_error_of_a_driver_that_reads_with_requests() -> None:
    import requests

    forbidden = requests.Response()
    forbidden.status_code = 403
    assert response_from_error(requests.HTTPError("no", response=forbidden)).status == 403


def test_an_error_of_the_archive_is_that_of_its_member() -> None:
    error = CorruptSample("x.zip has changed")
    response = response_from_error(error)
    assert classify(WANTED, response, 1) is Verdict.FAILED
    assert final_error(WANTED, response) is error


def test_a_driver_that_cannot_read_parts_is_not_asked_again() -> None:
    response = response_from_error(NotImplementedError())
    assert classify(WANTED, response, 1) is Verdict.FAILED
    with pytest.raises(NotAllowed, match="the storage's driver cannot read parts of files"):
        raise final_error(WANTED, response)
