"""File systems that a training script brings as a class, for a private daemon."""

from collections.abc import Mapping
from typing import Any

import fsspec
from fsspec.registry import known_implementations

from gyre_daemon.errors import ConfigError, InvalidRequest
from gyre_daemon.runtime.plug_ins import load_script_object

CLASS = "class"  # among the settings of a storage: the file of the class
_ABSENT = "gyre_daemon.absent.Absent"  # where fsspec looks for a class that was not passed


def allow_scheme(uri: str) -> None:
    """Let datasets have the scheme of a script's file system.

    Raises:
        InvalidRequest: a driver reads this scheme.
    """
    scheme = uri.partition("://")[0].lower()
    error = f"{scheme}:// is read by a class: pass storage="
    known = known_implementations.setdefault(scheme, {"class": _ABSENT, "err": error})
    if known["class"] != _ABSENT:
        raise InvalidRequest(
            f"storage: {scheme}:// has a driver already. Give the dataset another scheme, such as "
            "my://"
        )


def driver_of(scheme: str, settings: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """The driver of a scheme, and the settings that it takes.

    Raises:
        ConfigError: the settings name a class that cannot be loaded, or is no file system.
        ImportError: the driver is not installed.
    """
    if CLASS not in settings:
        return fsspec.get_filesystem_class(scheme), settings
    try:
        found, _ = load_script_object(settings[CLASS])
    except Exception as error:
        raise ConfigError(
            f"storage: the class cannot be loaded: {type(error).__name__}: {error!s:.300}"
        ) from error
    if not issubclass(found, fsspec.AbstractFileSystem):
        raise ConfigError(
            f"storage: {found.__name__} is no file system. Derive it from fsspec.AbstractFileSystem"
        )
    driver: Any = found
    if driver.protocol in ("abstract", None):
        driver.protocol = scheme
    return driver, {key: value for key, value in settings.items() if key != CLASS}
