"""The options of Gyre's own HTTP client in a dataset's `storage` table."""

import functools
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_daemon.errors import ConfigError
from gyre_daemon.storage.sources.redirects import RedirectPolicy, take_redirect_hosts

CA_FILE = "ca_file"
_MAX_HOSTS = 64  # with the latest connection kept, to resume its session
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """How web servers and object storages are spoken to.

    Attributes:
        redirects: which are followed.
        tls: trusts the certificates of servers.
        roots: roots of certificates that are trusted beside the system's, in PEM; empty for none.
        given: the settings that say so.
    """

    redirects: RedirectPolicy
    tls: ssl.SSLContext
    roots: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)

    def root_certificates(self) -> list[bytes]:
        """The roots, each in DER."""
        return [ssl.PEM_cert_to_DER_cert(each) for each in _CERTIFICATE.findall(self.roots)]


class ResumingContext(ssl.SSLContext):
    """Resumes the TLS session of an earlier connection to the same host.

    A handshake then takes half of the processor time: no certificate is sent and checked again.
    The event loop asks for each connection with `wrap_bio`, and hands no session over itself.
    """

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """See `SSLContext.wrap_bio`."""
        latest: dict[str | bytes | None, ssl.SSLObject] = self.__dict__.setdefault("_latest", {})
        before = latest.pop(server_hostname, None)
        # one of TLS 1.3 has a session only once it has received data
        resumed = session or (before.session if before else None)
        found = super().wrap_bio(incoming, outgoing, server_side, server_hostname, resumed)
        if len(latest) >= _MAX_HOSTS:
            latest.clear()
        latest[server_hostname] = found
        return found


def take_http_options(settings: Mapping[str, Any]) -> tuple[dict[str, Any], HttpOptions]:
    """Split storage settings into the driver's own and ours. Reads files.

    Raises:
        ConfigError: one of ours is not valid, or its file cannot be read.
    """
    rest, redirects = take_redirect_hosts(settings)
    ca_file = rest.pop(CA_FILE, "")
    given = {key: value for key, value in settings.items() if key not in rest}
    if not isinstance(ca_file, str):
        raise ConfigError(f"{CA_FILE} must be the path of a file with certificates in PEM")
    if not ca_file:
        return rest, HttpOptions(redirects, _system_tls(), given=given)
    try:
        # between certificates a file may say anything
        roots = "\n".join(_CERTIFICATE.findall(Path(ca_file).read_text("latin-1")))
        tls = _resuming_tls()
        tls.load_verify_locations(cadata=roots)
    except (OSError, UnicodeError, ValueError) as error:
        raise ConfigError(
            f"{CA_FILE} of a dataset's storage names {ca_file!r}, which cannot be used: it must be "
            f"a file with certificates in PEM ({_reason(error)})"
        ) from error
    return rest, HttpOptions(redirects, tls, roots, given)


@functools.cache
def _system_tls() -> ssl.SSLContext:
    return _resuming_tls()


def _resuming_tls() -> ssl.SSLContext:
    tls = ResumingContext(ssl.PROTOCOL_TLS_CLIENT)  # which checks certificates and host names
    tls.load_default_certs()
    # As Python does since 3.13. Its other new default refuses roots without key identifiers,
    # which private authorities often lack.
    tls.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return tls


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
        return error.strerror or type(error).__name__
    return "there is no certificate in it"
