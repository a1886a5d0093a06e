"""A daemon to talk to: one at an address that was given, or the private one of this run."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from gyre_client.errors import DaemonFault, DaemonUnavailable, GyreError, InvalidRequest
from gyre_client.messages.arguments import is_location, text
from gyre_client.targets import private_daemon
from gyre_client.targets.private_daemon import PrivateDaemon
from gyre_client.transport.address import ENVIRONMENT_VARIABLE, Address, parse_address
from gyre_client.transport.connection import Connection, Outage

_log = logging.getLogger("gyre_client")


@dataclass(frozen=True, slots=True)
class Target:
    """A daemon, and the means of this process to keep it running.

    Attributes:
        address: Where the daemon listens; it stays the same when the daemon is restarted.
        private: The private daemon, or None for a daemon that this process has not started.
    """

    address: Address
    private: PrivateDaemon | None = None

    def ensure(self) -> None:
        """Starts the private daemon again if it died; does nothing for any other daemon.

        Raises:
            DaemonUnavailable: The private daemon does not start.
        """
        if self.private is not None:
            self.private.ensure()

    def with_log(self, error: GyreError) -> GyreError:
        """Returns the error; where the private daemon is at fault, one that names its log."""
        if self.private is None or not isinstance(error, DaemonUnavailable | DaemonFault):
            return error
        return error.told(f"{error}. Its log is {self.private.log_path}")

    def release(self) -> None:
        """Ends this use of the daemon; a private daemon stops with its last user."""
        if self.private is not None:
            private_daemon.release()


def given_address(address: str | None) -> str | None:
    """Returns `address`, or the address in the environment, or None if there is neither."""
    return address or os.environ.get(ENVIRONMENT_VARIABLE) or None


def find_target(address: str | None, daemon_user: int | str | None = None) -> Target:
    """Returns the daemon at `address`; for None, the private daemon of this run.

    Args:
        address: Where it listens.
        daemon_user: A user it may belong to, as it may to root or this process's own.

    Raises:
        InvalidRequest: The address has no known form, or there is no such user.
        DaemonUnavailable: The private daemon cannot be started.
    """
    if address is not None:
        return Target(parse_address(address, daemon_user))
    daemon = private_daemon.acquire()
    return Target(daemon.address, daemon)


def dataset_or_path(
    dataset: str | os.PathLike[str],
    data_format: str | None,
    address: str | None,
    daemon_user: int | str | None = None,
    reattach_timeout_s: float = 60.0,
) -> str | os.PathLike[str]:
    """Returns the dataset; `./DATASET` for a folder or file, if no dataset has this name.

    Args:
        dataset: The user's name for it.
        data_format: The format of the data at a path; None for none.
        address: Where a dataset of this name is looked for, and no path; for None, at the address
            in the environment, if there is one.
        daemon_user: See `find_target`.
        reattach_timeout_s: How long to wait for the daemon there.

    Raises:
        GyreError: The daemon at the address in the environment does not answer.
    """
    if address or is_location(dataset, data_format) or not _exists(dataset):
        return dataset
    where = given_address(address)
    if where and _serves(find_target(where, daemon_user), dataset, reattach_timeout_s):
        _log.info("%s is the dataset of that name at %s; ./%s is not read", dataset, where, dataset)
        return dataset
    path = Path(dataset).absolute()
    instead = f"; {where} has no dataset of that name" if where else ""
    _log.info("%s is the data at %s%s", dataset, path, instead)
    return f"./{dataset}"


def _exists(dataset: str | os.PathLike[str]) -> bool:
    try:
        return Path(dataset).exists()
    except (OSError, ValueError):  # a name too long for a path, or with a NUL
        return False


def _serves(target: Target, name: str | os.PathLike[str], reattach_timeout_s: float) -> bool:
    with Connection(target.address) as connection:
        served = Outage(reattach_timeout_s).retry(lambda _: connection.list_datasets())
    return any(each.name == name for each in served.datasets)


def target_of_dataset(
    address: str | None,
    dataset: str | os.PathLike[str],
    data_format: str | None,
    daemon_user: int | str | None = None,
) -> Target:
    """Returns the daemon that can serve `dataset`.

    The daemon at `address` serves a path or URI or, without an address, a private daemon, whatever
    the environment says. Otherwise `dataset` is a name that the daemon at `address` or in the
    environment knows.

    Raises:
        InvalidRequest: `dataset` is a name and there is no address; or the address is malformed.
        DaemonUnavailable: The private daemon cannot be started.
    """
    if address is not None:
        address = text("address", address)
    if is_location(dataset, data_format):
        return find_target(address or None, daemon_user)
    address = given_address(address)
    if address is None:
        raise InvalidRequest(
            "no address was given, and a private daemon knows no dataset by the name "
            f"{os.fspath(dataset)!r}, and there is no folder of that name. Give the address of a "
            f"daemon (or set {ENVIRONMENT_VARIABLE})"
        )
    return find_target(address, daemon_user)
