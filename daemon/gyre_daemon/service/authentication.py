"""Authenticate callers over TCP by a call's token or its connection's certificate."""

import time
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import unquote

from gyre_daemon.access.expiry import expires_at
from gyre_daemon.access.failures import FailureLimit
from gyre_daemon.access.principal import ANONYMOUS, Principal
from gyre_daemon.access.tokens import TokenStore
from gyre_daemon.errors import NotAuthenticated
from gyre_daemon.service.status import Context

_SCHEME = "bearer "
_MAX_NAME_CHARS = 200


class Authenticator:
    """Tells callers over TCP apart. The kernel identifies those over a Unix socket."""

    def __init__(self, tokens: TokenStore, clock: Callable[[], float] = time.time) -> None:
        """Know these tokens; `clock` returns the seconds since the epoch."""
        self._tokens = tokens
        self._clock = clock
        self._failures = FailureLimit()

    def principal(self, context: Context) -> Principal:
        """The caller over TCP.

        A token counts more than a certificate. Without either, a caller is anonymous where that is
        enough: on loopback, or where the daemon knows no tokens.

        Raises:
            NotAuthenticated: the token is not valid, or the certificate has expired since the
                connection began; or there is no token, the connection has TLS, and the daemon asks
                for tokens.
            Overloaded: as before, and the caller's address has failed too often.
        """
        try:
            return self._identify(context)
        except NotAuthenticated as reason:
            raise self._failures.refuse(address_of(context), reason) from None

    def _identify(self, context: Context) -> Principal:
        token = _bearer_token(context)
        if token is not None:
            return Principal(f"token:{self._tokens.name_of(token)}")
        proven = context.auth_context()
        self._check_certificate(proven)
        if names := proven.get("x509_common_name") or proven.get("x509_subject_alternative_name"):
            return Principal(f"certificate:{_printable(next(iter(names)))}")
        if proven.get("x509_pem_cert"):
            raise NotAuthenticated("the client's certificate has neither a common name nor others")
        if self._tokens and _has_tls(proven):
            raise NotAuthenticated(
                "this daemon asks for a token, and the call has none; "
                "set GYRE_TOKEN_FILE to a file that holds one"
            )
        return ANONYMOUS

    def _check_certificate(self, proven: Mapping[str, Iterable[bytes]]) -> None:
        """Refuse a certificate that expired after TLS checked it."""
        chain = next(
            iter(proven.get("x509_pem_cert_chain") or proven.get("x509_pem_cert") or ()), b""
        )
        if chain and expires_at(chain) <= self._clock():
            raise NotAuthenticated(
                "the client's certificate has expired; connect again with a new one"
            )


def is_local(context: Context) -> bool:
    """Whether the call came over a Unix socket."""
    return context.peer().startswith("unix:")


def address_of(context: Context) -> str:
    """The caller's IP address, out of `ipv4:127.0.0.1:1234` or `ipv6:%5B::1%5D:1234`."""
    _, _, host_and_port = unquote(context.peer()).partition(":")
    return host_and_port.rpartition(":")[0].strip("[]")


def _bearer_token(context: Context) -> str | None:
    """The token of RFC 6750's header; None where there is none."""
    for key, value in context.invocation_metadata() or ():
        if key == "authorization":
            text = value if isinstance(value, str) else value.decode(errors="replace")
            if not text.lower().startswith(_SCHEME):
                raise NotAuthenticated("the authorization of the call is no bearer token")
            return text[len(_SCHEME) :].strip()
    return None


def _has_tls(proven: Mapping[str, Iterable[bytes]]) -> bool:
    return b"ssl" in proven.get("transport_security_type", ())


def _printable(name: bytes) -> str:
    text = name.decode(errors="replace")
    if not text.isprintable() or not 1 <= len(text) <= _MAX_NAME_CHARS:
        raise NotAuthenticated(
            f"the name in the client's certificate cannot be used: {text!r:.200}"
        )
    return text
