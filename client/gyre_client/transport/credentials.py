"""A client's credentials over TCP: roots to verify the daemon by, and a token or certificate.

All of it stands in files that the environment names, so that it appears in no argument and no log.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gyre_client.errors import InvalidRequest
from gyre_client.transport.address import Address

TOKEN_VARIABLE = "GYRE_TOKEN_FILE"
CA_VARIABLE = "GYRE_CA_FILE"
CERTIFICATE_VARIABLE = "GYRE_CERTIFICATE_FILE"
KEY_VARIABLE = "GYRE_KEY_FILE"

_MAX_FILE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Pem:
    """The contents of PEM files for a TLS connection; see `CredentialFiles`."""

    ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class CredentialFiles:
    """Files in PEM, and one with a token; None for unused ones.

    Attributes:
        token: Its first line without a comment begins with the token.
        ca: Roots of the daemon's certificate, instead of the public ones.
        certificate: The client's own, for a daemon that asks for one.
        key: The private key of `certificate`.
    """

    token: Path | None = None
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> "CredentialFiles":
        """Returns the files that the environment names.

        Raises:
            InvalidRequest: It names a certificate and no key, or the reverse.
        """

        def path(variable: str) -> Path | None:
            return Path(text) if (text := environment.get(variable)) else None

        files = cls(*map(path, (TOKEN_VARIABLE, CA_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE)))
        if (files.certificate is None) != (files.key is None):
            raise InvalidRequest(
                f"{CERTIFICATE_VARIABLE} and {KEY_VARIABLE} go together; set both or neither"
            )
        return files

    def read_pem(self) -> Pem:
        """Returns the current contents of the files of a TLS connection.

        Raises:
            InvalidRequest: A file cannot be read.
        """
        return Pem(
            _read(self.ca, CA_VARIABLE),
            _read(self.certificate, CERTIFICATE_VARIABLE),
            _read(self.key, KEY_VARIABLE),
        )

    def metadata(self, address: Address) -> tuple[tuple[str, str], ...]:
        """Returns the metadata that identifies a call's sender: the token, read now.

        Raises:
            InvalidRequest: The file cannot be read or holds no token; or the token would travel in
                clear.
        """
        if self.token is None or address.host_and_port is None:
            return ()
        if not address.is_private:
            raise InvalidRequest(
                f"the token of {TOKEN_VARIABLE} would travel to {address.text} in clear; use a "
                "tls: address, or unset the variable"
            )
        text = (_read(self.token, TOKEN_VARIABLE) or b"").decode(errors="replace")
        lines = [line.split() for line in text.splitlines()]
        token = next((words[0] for words in lines if words and words[0][0] != "#"), "")
        if not token or not token.isascii() or not token.isprintable():
            raise InvalidRequest(f"the file of {TOKEN_VARIABLE}, {self.token}, holds no token")
        return (("authorization", f"Bearer {token}"),)


def _read(path: Path | None, variable: str) -> bytes | None:
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequest(f"cannot read the file of {variable}, {path}: {reason}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise InvalidRequest(
            f"the file of {variable}, {path}, has more than {_MAX_FILE_BYTES} bytes"
        )
    return data
