"""When a certificate ends: the one field of X.509 (RFC 5280) that counts after the handshake.

TLS checks a certificate once, when a connection begins, and a connection may last for weeks.
"""

import re
import ssl
from datetime import UTC, datetime
from functools import lru_cache

from gyre_daemon.errors import NotAuthenticated

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18
_TWENTIETH_CENTURY = 50  # UTCTime has two digits of the year; from here on they are of 19xx


@lru_cache(maxsize=1024)
def expires_at(chain: bytes) -> float:
    """When the first of the certificates in a PEM text ends, in seconds since the epoch.

    Raises:
        NotAuthenticated: they are not certificates.
    """
    try:
        ends = [_not_after(ssl.PEM_cert_to_DER_cert(each)) for each in _PEM.findall(chain.decode())]
        return min(ends)
    except (ValueError, IndexError) as error:
        raise NotAuthenticated("the client's certificate cannot be read") from error


def _not_after(certificate: bytes) -> float:
    tbs, _ = _value(_value(certificate, 0, _SEQUENCE)[0], 0, _SEQUENCE)
    at = _value(tbs, 0)[1] if tbs[0] == _VERSION else 0
    for _ in ("serial number", "signature", "issuer"):
        _, at = _value(tbs, at)
    validity, _ = _value(tbs, at, _SEQUENCE)
    _, at = _value(validity, 0)  # not before
    kind = validity[at]
    text = _value(validity, at)[0].decode("ascii")
    if kind == _UTC_TIME:
        text = ("19" if int(text[:2]) >= _TWENTIETH_CENTURY else "20") + text
    elif kind != _GENERALIZED_TIME:
        raise ValueError("no time")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _value(data: bytes, at: int, kind: int | None = None) -> tuple[bytes, int]:
    """The contents of the DER element at a place, and where the next one begins."""
    if kind is not None and data[at] != kind:
        raise ValueError("another element")
    size, begin = data[at + 1], at + 2
    if size & 0x80:
        num_bytes = size & 0x7F
        size = int.from_bytes(data[begin : begin + num_bytes])
        begin += num_bytes
    if begin + size > len(data):
        raise ValueError("cut off")
    return data[begin : begin + size], begin + size
