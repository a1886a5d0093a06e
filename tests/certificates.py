"""Certificates for tests, made on the spot."""

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Certified:
    """A certificate and its key, as files.

    Attributes:
        certificate: The path of the certificate.
        key: The path of its key, mode 0600.
    """

    certificate: Path
    key: Path

    def replace(self, other: "Certified") -> None:
        """Puts another pair in the place of this one, as an operator would."""
        self.key.write_bytes(other.key.read_bytes())
        self.certificate.write_bytes(other.certificate.read_bytes())


class Authority:
    """Signs certificates.

    Attributes:
        path: The file of its own certificate.
    """

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(_pem(self._certificate))

    @cached_property
    def _certificate(self) -> x509.Certificate:
        builder = _builder(self._name, self._name, self._key.public_key(), days=2)
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        return builder.add_extension(constraints, critical=True).sign(self._key, hashes.SHA256())

    def sign(self, name: str, *, host: str = "127.0.0.1", days: float = 1) -> Certified:
        """Returns a new certificate for a host; with negative days it has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        try:
            known_as: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            known_as = x509.DNSName(host)
        certificate = (
            _builder(name, self._name, key.public_key(), days)
            .add_extension(x509.SubjectAlternativeName([known_as]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pair = Certified(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        pair.certificate.write_bytes(_pem(certificate))
        pair.key.touch(mode=0o600)
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return pair


def self_signed(folder: Path, *, is_authority: bool) -> Certified:
    """A certificate of 127.0.0.1 that signed itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    host = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    constraints = x509.BasicConstraints(ca=is_authority, path_length=None)
    certificate = (
        _builder("itself", "itself", key.public_key(), days=1)
        .add_extension(host, critical=False)
        .add_extension(constraints, critical=True)
        .sign(key, hashes.SHA256())
    )
    pair = Certified(folder / "itself.pem", folder / "itself.key")
    pair.certificate.write_bytes(_pem(certificate))
    pair.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return pair


def _builder(
    name: str, issuer: str, key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_named(name))
        .issuer_name(_named(issuer))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=30))
        .not_valid_after(now + timedelta(days=days))
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
