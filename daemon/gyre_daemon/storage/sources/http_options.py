"""How web servers are spoken to: the options of Gyre's own HTTP client in a `storage` table.

A redirect leads nowhere but to the same server, unless the operator lists another one: it would let
a server read, as the daemon, what only the daemon can reach, such as a service on its loopback
interface.
"""

import functools
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from gyre_daemon.errors import ConfigError
from gyre_daemon.storage.location import redact

KEY = "redirect_hosts"
ANY_HOST = "*"
# A chain that is longer is a loop.
MAX_REDIRECTS = 5
_PORTS = {"http": 80, "https": 443}

CA_FILE = "ca_file"
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


class Refused(Exception):
    """A redirect that is not followed; the text says why."""


@dataclass(frozen=True, slots=True)
class RedirectPolicy:
    """Which redirects are followed.

    Attributes:
        hosts: other hosts that may be the target, as `host` or `host:port`; `*` for all.
    """

    hosts: frozenset[str] = frozenset()

    def follow(self, url: str, location: str) -> str:
        """The URL that a response's `Location` leads to.

        Raises:
            Refused: it must not be followed.
        """
        try:
            target = urljoin(url, location).partition("#")[0]
            before, after = urlsplit(url), urlsplit(target)
            places = host_of(before), host_of(after)
        except ValueError as error:
            raise Refused(f"{redact(url)} redirects to no URL") from error
        if after.scheme not in _PORTS or not after.hostname or not _is_plain(target):
            raise Refused(f"{redact(url)} redirects to no URL of a web server")
        if before.scheme == "https" and after.scheme == "http":
            raise Refused(
                f"{places[0]} redirects from https to http at {places[1]}, without protection; "
                "name a server that stays with https"
            )
        if places[0] != places[1] and not self._lists(after, places[1]):
            raise Refused(
                f"{places[0]} redirects to another host or port, {places[1]}. Name that one in the "
                f'URI, or list it: {KEY} = ["{places[1]}"] in the `storage` table of the dataset.'
            )
        return target

    def _lists(self, url: SplitResult, place: str) -> bool:
        if ANY_HOST in self.hosts or place in self.hosts:
            return True
        return place.endswith(f":{_PORTS[url.scheme]}") and place.rpartition(":")[0] in self.hosts


def _is_plain(url: str) -> bool:
    """Whether it can be sent, and shown in an error."""
    return url.isascii() and url.isprintable()


def host_of(url: SplitResult) -> str:
    """Host and port of a URL, in lower case.

    Raises:
        ValueError: the port is no number, or too large.
    """
    host = url.hostname or ""
    return f"[{host}]:{_port(url)}" if ":" in host else f"{host}:{_port(url)}"


def _port(url: SplitResult) -> int:
    return url.port or _PORTS.get(url.scheme, 0)


def take_redirect_hosts(settings: Mapping[str, Any]) -> tuple[dict[str, Any], RedirectPolicy]:
    """Split storage settings into the driver's own and the policy for redirects.

    Raises:
        ConfigError: the hosts are no list of texts.
    """
    rest = dict(settings)
    hosts = rest.pop(KEY, [])
    if not isinstance(hosts, list) or not all(isinstance(each, str) and each for each in hosts):
        raise ConfigError(
            f'{KEY} must be a list of hosts such as ["cdn.example.org", "127.0.0.1:8080"]'
        )
    return rest, RedirectPolicy(frozenset(host.lower() for host in hosts))


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
        tls = _new_tls()
        tls.load_verify_locations(cadata=roots)
    except (OSError, UnicodeError, ValueError) as error:
        raise ConfigError(
            f"{CA_FILE} of a dataset's storage names {ca_file!r}, which cannot be used: it must be "
            f"a file with certificates in PEM ({_reason(error)})"
        ) from error
    return rest, HttpOptions(redirects, tls, roots, given)


@functools.cache
def _system_tls() -> ssl.SSLContext:
    return _new_tls()


def _new_tls() -> ssl.SSLContext:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # which checks certificates and host names
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
