"""Requests and responses between the engine and a `Source`, and the errors they mean. Pure."""

import ftplib
import mmap
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol

from gyre_protos.text import printable
from msgspec import Struct

from gyre_daemon.errors import (
    CorruptSample,
    GyreError,
    InvalidRequest,
    NotAllowed,
    ShardMissing,
    StorageUnavailable,
)
from gyre_daemon.storage.location import redact
from gyre_daemon.storage.shard import UNKNOWN, Shard, Validators, changed, is_same, truncated

_BAD_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")  # as obstore writes it
_AUTHORITY_AS_SERVER = "CaUsedAsEndEntity"
_STATUS = re.compile(r"status code: (\d{3})")
# What an XML or JSON body of a storage says in one word, such as `SlowDown`; the rest of the body
# repeats the request, credentials included.
_CODE = re.compile(r"""<Code>\s*([A-Za-z0-9.]{1,64})\s*<|"(?:reason|code)"\s*:\s*"(\w{1,64})\"""")
_MARKUP = re.compile(r"[<{]")
_EXPIRED = ("ExpiredToken", "TokenRefreshRequired")  # S3 reports these with status 400
_USUAL_FIX = "check the daemon's credentials"
_NO_PERMISSION = (
    "the credentials are valid but may not read it: grant them reading of objects and listing (on "
    "S3 `s3:GetObject` and `s3:ListBucket`)"
)
_WRONG_SECRET = (
    "the secret does not fit the key: check `secret_access_key`, `region` and `endpoint` of the "
    "dataset's `storage` table"
)
_RENEW = "the session's token has expired: give the daemon a new one, or a role that renews it"
_CLOCK = "the clock of this machine is wrong: set it, for example with `timedatectl set-ntp true`"
# Actions for a storage's own codes: those of S3, of Google's XML interface, and of Azure.
_FIXES = {
    "AccessDenied": _NO_PERMISSION,
    "AllAccessDisabled": "the owner has closed the bucket: ask there",
    "AccountProblem": "the storage account has a problem: ask the provider",
    "AuthenticationFailed": "check `account_name` and `account_key` of the dataset's `storage` "
    "table, and the clock of this machine",
    "AuthorizationFailure": _NO_PERMISSION + ", or let its firewall admit this host",
    "AuthorizationHeaderMalformed": "set `region` in the dataset's `storage` table to the bucket's",
    "AuthorizationPermissionMismatch": "the credentials are valid but lack a role: grant them "
    "`Storage Blob Data Reader`",
    "ExpiredToken": _RENEW,
    "InvalidAccessKeyId": _USUAL_FIX + ": the storage knows no such `access_key_id`",
    "InvalidObjectState": "the object is in an archive tier: restore it first",
    "InvalidToken": _RENEW,
    "RequestExpired": _CLOCK,
    "RequestTimeTooSkewed": _CLOCK,
    "SignatureDoesNotMatch": _WRONG_SECRET,
    "TokenRefreshRequired": _RENEW,
    "forbidden": _NO_PERMISSION,
}
# A short body without an object size may be a bad connection or a truncated object. With fewer
# attempts a bad connection fails a batch; with more, a truncated object is reported later.
_MAX_SHORT_ATTEMPTS = 3
_MAX_DETAIL_CHARS = 300
# Replies of FTP (RFC 959). 550 is for a missing file, and for one that may not be read.
_FTP_STATUSES = {"421": 503, "530": 403, "532": 403, "550": 404}
_DAMAGED = (zipfile.BadZipFile, zlib.error, tarfile.TarError)
_NO_LOGIN = ("AuthenticationException", "LogonFailure")  # of paramiko and smbprotocol

Body = bytes | mmap.mmap  # of a mapping, all of it


class Response(Struct):
    """The response to one request.

    Attributes:
        status: the HTTP status, with 206 for a successful read over any other protocol, and 0 where
            the connection or the driver failed.
        data: the body, possibly incomplete.
        told: of the object as it is now.
        object_bytes: the size of the whole object; -1 if the storage did not send it.
        detail: the text of a failure.
        unreachable: no connection could be made, or the server stayed silent.
        location: where a redirect leads; empty if it does not say.
        retry_after_s: how long to wait before the next request, if it says so; 0 otherwise.
        refused: why no other answer will come: a redirect is not followed, a certificate is not
            trusted, or a driver cannot do the request; empty otherwise.
        error: why no other answer will come, in full, as of the storage of an archive; None where
            the rest of this says it.
    """

    status: int
    data: Body = b""
    told: Validators = UNKNOWN
    object_bytes: int = -1
    detail: str = ""
    unreachable: bool = False
    location: str = ""
    refused: str = ""
    retry_after_s: float = 0.0
    error: GyreError | None = None


OnResponse = Callable[[Response], None]


class SentRequest(Protocol):
    """A request whose response has not arrived yet."""

    @property
    def first_byte_at(self) -> float | None:
        """When the response began, by `time.monotonic`.

        0 if it has not begun; None if the client cannot tell. An event loop's own clock would not
        do: it stands still while callbacks run.
        """

    def cancel(self) -> None:
        """Drop the request; its `on_response` is not called."""

    def when_free(self, free: Callable[[], None]) -> None:
        """Have `free` called once nothing works for the request any more, answered or cancelled.

        That is at once, unless a thread reads: it cannot be stopped.
        """
        free()


class Source(Protocol):
    """Carries requests for one dataset's objects, with its credentials. Used from one event loop.

    A source sends each request once: the engine decides whether and when it is sent again.
    """

    def get(self, path: str, start: int, stop: int, on_response: OnResponse) -> SentRequest:
        """Request the bytes `[start, stop)` of an object.

        `on_response` is called once, later, from the event loop. Failures arrive there too: this
        method raises nothing.
        """

    def refresh(self, status: int) -> None:
        """Read credentials again from where they come, after a response with this status.

        Nothing by default, as drivers keep their credentials to themselves.
        """
        return

    def close(self) -> None:
        """Close all connections; nothing where they go with their objects."""
        return


class ByteRange(NamedTuple):
    """The bytes `[start, stop)` of shard `number`; a file of millions is described when asked for.

    Attributes:
        shards: of the dataset, as listed.
        number: of the shard.
        start: the first byte.
        stop: the byte after the last.
    """

    shards: Sequence[Shard]
    number: int
    start: int
    stop: int

    @property
    def shard(self) -> Shard:
        """The shard."""
        return self.shards[self.number]


class Verdict(Enum):
    """The next action after a response."""

    OK = auto()  # deliver the data
    RETRY = auto()  # the next attempt may succeed
    THROTTLED = auto()  # retry, and send fewer requests at once
    REFRESH = auto()  # credentials may have expired, or the object moved: refresh, then retry
    FAILED = auto()  # no retry can help


def classify(wanted: ByteRange, response: Response, num_attempts: int) -> Verdict:
    """Decide the next action after a response.

    Args:
        wanted: the requested range.
        response: status, headers and body.
        num_attempts: requests sent for the range so far, including this one.
    """
    status = response.status
    if response.refused or response.error:
        return Verdict.FAILED
    if status in (200, 206):
        if _is_changed(wanted, response) or _ignores_range(wanted, response):
            return Verdict.FAILED
        if len(response.data) == wanted.stop - wanted.start:
            return Verdict.OK
        # If the object still has its listed size, the missing bytes were lost in transit.
        has_size = response.object_bytes >= 0
        return Verdict.RETRY if has_size or num_attempts < _MAX_SHORT_ATTEMPTS else Verdict.FAILED
    if status in (401, 403) or 300 <= status < 400 or _is_expired(response):
        return Verdict.REFRESH
    if status in (429, 503) or response.unreachable:
        return Verdict.THROTTLED
    return Verdict.RETRY if status in (0, 408) or status >= 500 else Verdict.FAILED


def final_error(wanted: ByteRange, response: Response) -> GyreError:
    """The error for a response after which the range is not requested again."""
    name, status = wanted.shard.name, response.status
    if response.error:
        return response.error
    if response.refused:
        return NotAllowed(f"shard {name} is refused: {response.refused}", {"shard": name})
    if (error := access_error(name, response, {"shard": name})) is not None:
        return error
    if status in (412, 416) or (status in (200, 206) and _is_changed(wanted, response)):
        return changed(name)
    if status in (200, 206) and not _ignores_range(wanted, response):
        return truncated(name, wanted.start, wanted.stop, len(response.data))
    reason = describe(response)
    if _ignores_range(wanted, response):
        reason = (
            "it sends whole objects where a range is requested; put the files on a server that "
            "answers requests for ranges"
        )
    return StorageUnavailable(f"the storage failed for {name}: {reason}", {"shard": name})


def access_error(name: str, response: Response, facts: Mapping[str, object]) -> GyreError | None:
    """The error for a response that says that a shard or location is missing or forbidden."""
    status = response.status
    if status in (404, 410):
        return ShardMissing(
            f"{name} does not exist; restore it or correct the dataset's URI", facts
        )
    if status in (401, 403) or _is_expired(response):
        code = _code(response.detail)
        shown, fix = f" ({code})" if code else "", _FIXES.get(code, _USUAL_FIX)
        return NotAllowed(f"the storage refused access to {name}{shown}; {fix}", facts)
    return None


def _is_expired(response: Response) -> bool:
    """Whether it says that credentials have expired, for which S3 has the status 400."""
    return response.status == 400 and any(word in response.detail for word in _EXPIRED)


def _code(detail: str) -> str:
    """The storage's own word for an error; empty if there is none."""
    found = _CODE.search(detail)
    return (found[1] or found[2]) if found else ""


def no_listing(path: str, status: int = 0) -> InvalidRequest | ShardMissing:
    """The error for a folder of which a web server shows no index page.

    Args:
        path: with its scheme.
        status: of the response; 0 behind a proxy, which is not asked for one.
    """
    shown, kind = redact(path), ShardMissing if status in (404, 410) else InvalidRequest
    reason = "index pages are not read through a proxy"
    if status:
        reason = f"the web server shows no index page of it (got status {status})"
    return kind(
        f"the storage cannot list {shown}: {reason}. Name every shard, for example with a brace "
        "list, or the files in a manifest",
        {"location": shown},
    )


def deadline_error(
    endpoint: str, wanted: ByteRange, deadline_s: float, num_attempts: int, last: Response | None
) -> StorageUnavailable:
    """The error for a range that did not arrive within its deadline.

    Args:
        endpoint: the endpoint's name.
        wanted: the requested range.
        deadline_s: the deadline.
        num_attempts: requests sent for the range.
        last: the last failed response, if there was one.
    """
    name = wanted.shard.name
    return StorageUnavailable(
        f"the storage at {endpoint} did not answer for {name} within {deadline_s:g} s "
        f"({num_attempts} requests were sent; {_last_failure(last)})",
        {"shard": name, "endpoint": endpoint, "num_attempts": num_attempts},
    )


def stalled_error(endpoint: str, deadline_s: float, last: Response | None) -> StorageUnavailable:
    """The error for a read that could not start because earlier requests got no answer.

    Args:
        endpoint: the endpoint's name.
        deadline_s: for how long nothing was answered.
        last: the last failed response, if there was one.
    """
    return StorageUnavailable(
        f"the storage at {endpoint} answered nothing for {deadline_s:g} s ({_last_failure(last)})",
        {"endpoint": endpoint},
    )


def describe(response: Response) -> str:
    """A failed response in one line, without secrets, and without a terminal's control characters.

    A storage's words are its owner's. Of XML and JSON, only the code of the error is shown.
    """
    if response.status in (200, 206):
        return f"it sent only {len(response.data)} bytes of the requested range"
    detail = words(response.detail)
    if not response.status or "status" in detail:
        return detail
    return f"HTTP status {response.status} {detail}".rstrip()


def words(detail: str) -> str:
    """A storage's or a driver's words for a message; see `describe`."""
    line = redact(detail).partition("\n")[0]
    markup = _MARKUP.search(line)
    if not markup:
        return printable(line[:_MAX_DETAIL_CHARS])
    code = f"({found})" if (found := _code(detail)) else ""
    words = printable(line[: markup.start()][:_MAX_DETAIL_CHARS])
    return f"{words} {code}".strip()


def response_from_error(error: BaseException) -> Response:
    """A driver's exception as a response.

    Built-in exceptions and HTTP statuses keep their meaning; any other exception counts as a failed
    connection.
    """
    if isinstance(error, GyreError):
        return Response(0, error=error)
    if isinstance(error, _DAMAGED):
        reason = f"a member of the archive is damaged: {error}. Restore the archive"
        return Response(0, error=CorruptSample(reason, {"reason": reason}))
    if isinstance(error, NotImplementedError):
        return Response(0, refused="the storage's driver cannot read parts of files")
    if isinstance(error, FileNotFoundError):
        status = 404
    elif isinstance(error, PermissionError) or type(error).__name__ in _NO_LOGIN:
        status = 403
    elif isinstance(error, ftplib.Error):
        text = str(error)
        status = 403 if "denied" in text.lower() else _FTP_STATUSES.get(text[:3], 0)
    else:
        found = _STATUS.search(str(error))
        answer = getattr(error, "response", None)  # of requests and httpx
        told = getattr(answer, "status_code", int(found[1]) if found else 0)
        status = getattr(error, "status", told)
    detail = f"{type(error).__name__}: {error}"
    if bad := _BAD_CERTIFICATE.search(detail):
        reason = _AUTHORITY_AS_SERVER if _AUTHORITY_AS_SERVER in detail else bad[1]
        return Response(0, refused=untrusted("the server", reason))
    return Response(status if isinstance(status, int) else 0, detail=detail)


def untrusted(server: str, reason: str) -> str:
    """Why nothing is read from a server whose certificate is not valid."""
    if reason == _AUTHORITY_AS_SERVER:
        return (
            f"the certificate of {server} is that of an authority, with which obstore trusts no "
            'server. Make one with `openssl req -x509 -addext "basicConstraints=critical,CA:FALSE"`'
        )
    return (
        f"the certificate of {server} is not trusted ({reason}); if it is the right server, name a "
        "file with its root as `ca_file` in the `storage` table of the dataset"
    )


def _last_failure(last: Response | None) -> str:
    return f"the last failure: {describe(last)}" if last else "none of them failed"


def _is_changed(wanted: ByteRange, response: Response) -> bool:
    """Whether the object's size or a validator differs from the listing."""
    if response.object_bytes < 0 and not response.told:
        return False
    if response.object_bytes not in (-1, wanted.shard.size_bytes):
        return True
    return is_same(wanted.shard.validators, response.told) is False


def _ignores_range(wanted: ByteRange, response: Response) -> bool:
    """Whether the server sent the whole object although a part was requested."""
    return response.status == 200 and (wanted.start, wanted.stop) != (0, wanted.shard.size_bytes)
