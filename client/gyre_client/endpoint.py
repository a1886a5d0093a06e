"""Where a daemon is to be found: at an address, or beside this process as its own."""

import os
from typing import Protocol

from gyre_client import embedded
from gyre_client.address import ENVIRONMENT_VARIABLE, Address, parse_address
from gyre_client.errors import InvalidRequest


class Endpoint(Protocol):
    """A daemon to talk to."""

    @property
    def address(self) -> Address:
        """Where it listens, or will again."""

    def ensure(self) -> None:
        """Whatever this process can do for the daemon to run is done."""

    def release(self) -> None:
        """This user needs the daemon no longer."""


class Listening:
    """A daemon that somebody else runs."""

    def __init__(self, address: Address) -> None:
        self.address = address

    def ensure(self) -> None:
        """Nothing can be done."""

    def release(self) -> None:
        """Nothing is held."""


class Private:
    """This process's own daemon, started on demand."""

    def __init__(self) -> None:
        self._daemon = embedded.acquire()
        self.address = self._daemon.address

    def ensure(self) -> None:
        """The daemon runs again if it had died."""
        self._daemon.ensure()

    def release(self) -> None:
        """The daemon ends with its last user."""
        embedded.release()


def given_address(address: str | None) -> str | None:
    """Returns `address`, or else what the environment says."""
    return address or os.environ.get(ENVIRONMENT_VARIABLE) or None


def find_endpoint(address: str | None) -> Endpoint:
    """Returns the daemon at `address`; for None, this process's private one.

    Raises:
        InvalidRequest: The address has no known form.
        DaemonUnavailable: The private daemon cannot be started.
    """
    return Private() if address is None else Listening(parse_address(address))


def endpoint_of_dataset(address: str | None, dataset: str | os.PathLike[str], data_format: str | None) -> Endpoint:
    """Returns the daemon that can serve `dataset`.

    With a format, `dataset` is a path or URI: the daemon at `address` serves it, else a private one, whatever the
    environment says. Without, it is a name: the daemon at `address` or in the environment knows it.

    Raises:
        InvalidRequest: A name, but no daemon that could know it; or see `find_endpoint`.
        DaemonUnavailable: The private daemon cannot be started.
    """
    address = address or None
    if data_format is not None:
        return find_endpoint(address)
    address = given_address(address)
    if address is None:
        raise InvalidRequest(
            f"no address was given, and a private daemon knows no dataset by the name {os.fspath(dataset)!r}: "
            f"give the address of a daemon (or set {ENVIRONMENT_VARIABLE}), or the format of the data at this path or URI"
        )
    return find_endpoint(address)
