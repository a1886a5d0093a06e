"""The daemon's own credentials, and those of its callers over TCP."""

import contextlib
from dataclasses import dataclass

from gyre_daemon.access.expiry import expires_at
from gyre_daemon.access.tokens import TokenStore
from gyre_daemon.config import DaemonConfig
from gyre_daemon.errors import NotAuthenticated
from gyre_daemon.runtime.certificates import CertificateFiles


@dataclass(frozen=True, slots=True)
class Credentials:
    """The files of the configuration that have to do with TLS and tokens.

    Attributes:
        certificates: None where the daemon has no certificate, and so no TLS.
        tokens: of callers; may be empty.
    """

    certificates: CertificateFiles | None
    tokens: TokenStore

    @classmethod
    def of(cls, config: DaemonConfig) -> "Credentials":
        """Read the files.

        Raises:
            ConfigError: one cannot be used.
        """
        certificates = None
        if config.tls_certificate:
            certificates = CertificateFiles(
                config.tls_certificate, config.tls_key, config.tls_client_ca
            )
        return cls(certificates, TokenStore(config.tokens))

    @property
    def have_files(self) -> bool:
        """Whether there are files that may change."""
        return bool(self.certificates or self.tokens)

    def expiries(self) -> dict[tuple[str, str], float]:
        """When each ends, in seconds since the epoch, by kind and name; not those that never do."""
        found = {("token", name): at for name, at in self.tokens.expiries().items()}
        if self.certificates:
            current = self.certificates.current
            for name, pem in (
                ("tls_certificate", current.chain),
                ("tls_client_ca", current.client_ca),
            ):
                with contextlib.suppress(NotAuthenticated):  # gRPC cannot read it, either
                    found |= {("certificate", name): expires_at(pem)} if pem else {}
        return found

    def refresh(self) -> None:
        """Read the files again that have changed; logs those that cannot be used."""
        if self.certificates:
            self.certificates.refresh()
        self.tokens.refresh()
