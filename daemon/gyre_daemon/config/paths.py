"""Relative paths in a configuration's file, which count from the folder of that file.

So a daemon reads the same data wherever it was started. Where the file is a link, its folder is
that of the link. Paths in the environment and in flags count from the working directory, as those
of other programs do.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gyre_daemon.config.schema import DatasetConfig

_KEYS = (
    "index_dir", "cache_dir", "unpack_dir", "report_dir", "audit_log", "tls_certificate", "tls_key",
    "tls_client_ca",
)  # fmt: skip
_STORAGE_KEYS = (
    "ca_file", "token_file", "service_account", "service_account_path", "google_service_account",
    "google_service_account_path", "application_credentials", "google_application_credentials",
)  # fmt: skip
_UNIX = "unix:"
# A brace list with an absolute path among its choices.
_ABSOLUTE_CHOICES = re.compile(r"\{+(?:[^{}]*,\{*)?/")
_BRACES, _WILDCARDS = re.compile(r"[\\{}]"), re.compile(r"[*?[]")


def from_folder(folder: Path, path: str) -> str:
    """A path as seen from a folder; an empty or absolute one, or a URL, stays as it is."""
    is_url = "://" in path or "::" in path or path.startswith("pipe:")
    if not path or is_url or Path(path).is_absolute():
        return path
    return f"{folder}/{path}"  # with all slashes and dots that it has


def scalars_from_folder(folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Converted values by key; paths, also those of sockets, are seen from a folder."""
    found: dict[str, Any] = {
        key: from_folder(folder, values[key]) for key in _KEYS if key in values
    }
    if "listen" in values:
        found["listen"] = tuple(_address(folder, text) for text in values["listen"])
    return {**values, **found}


def dataset_from_folder(folder: Path, dataset: DatasetConfig) -> DatasetConfig:
    """A dataset whose shards, and files that its storage needs, are seen from a folder."""
    files = {
        key: from_folder(folder, path)
        for key in _STORAGE_KEYS
        if isinstance(path := dataset.storage.get(key), str)
    }
    uri = _uri_from_folder(folder, dataset.uri)
    return replace(dataset, uri=uri, storage={**dataset.storage, **files})


def _uri_from_folder(folder: Path, uri: str) -> str:
    """As `from_folder`; braces and wildcards count in the URI alone, not in the folder's name."""
    if _ABSOLUTE_CHOICES.match(uri):
        return uri
    name = _BRACES.sub(r"\\\g<0>", str(folder))
    if _WILDCARDS.search(uri):
        name = _WILDCARDS.sub(r"[\g<0>]", name)
    return from_folder(Path(name), uri)


def _address(folder: Path, text: str) -> str:
    path = text.removeprefix(_UNIX)
    return _UNIX + from_folder(folder, path) if text.startswith(_UNIX) else text
