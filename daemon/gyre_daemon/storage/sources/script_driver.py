"""File systems that a training script brings as a class, for a private daemon."""

from collections.abc import Mapping
from typing import Any

import fsspec
from fsspec.registry import known_implementations

from gyre_daemon.errors import ConfigError, InvalidRequest
from gyre_daemon.runtime.script_objects import load_script_object
from gyre_daemon.storage.remote_listing import OBJECT_SCHEMES

CLASS = "class"  # among the settings of a storage: the file of the class
_OWN_SCHEMES = frozenset({"file", "local", "hf", *OBJECT_SCHEMES})


def allow_scheme(uri: str) -> None:
    """Let datasets have the scheme of a script's file system.

    Raises:
        InvalidRequest: the daemon reads this scheme itself.
    """
    scheme = uri.partition("://")[0].lower()
    if scheme in _OWN_SCHEMES:
        raise InvalidRequest(
            f"storage: {scheme}:// is read by the daemon itself. Give the dataset another scheme, "
            "such as my://"
        )
    error = f"{scheme}:// is read by a class: pass storage="
    known_implementations.setdefault(scheme, {"class": "gyre_daemon.absent.Absent", "err": error})


def driver_of(
    scheme: str, settings: Mapping[str, Any]
) -> tuple[type[fsspec.AbstractFileSystem], Mapping[str, Any]]:
    """The driver of a scheme, and the settings that it takes.

    Raises:
        ConfigError: the settings name a class that cannot be loaded, or is no file system.
        ImportError: the driver is not installed.
    """
    if CLASS not in settings:
        return fsspec.get_filesystem_class(scheme), settings
    try:
        driver, _ = load_script_object(settings[CLASS])
    except Exception as error:
        raise ConfigError(
            f"storage: the class cannot be loaded: {type(error).__name__}: {error!s:.300}"
        ) from error
    if not (isinstance(driver, type) and issubclass(driver, fsspec.AbstractFileSystem)):
        raise ConfigError(
            f"storage: {getattr(driver, '__name__', driver)!s:.100} is no file system. Derive it "
            "from fsspec.AbstractFileSystem"
        )
    if driver.protocol in ("abstract", None):
        driver.protocol = scheme
    return driver, {key: value for key, value in settings.items() if key != CLASS}
