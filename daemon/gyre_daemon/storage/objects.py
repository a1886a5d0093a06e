"""The default driver of object storages: obstore behind fsspec's interface. Imported only where a dataset needs it."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from obstore.exceptions import BaseError
from obstore.fsspec import FsspecStore
from obstore.store import ObjectStore

from gyre_daemon.errors import ConfigError
from gyre_daemon.storage.location import redact

_NO_LISTING = ("http", "https")
_RETRY_CONFIG = {"max_retries": 4}


class ObjectFileSystem(FsspecStore):
    """obstore's file system, with globs, with keys that hold `#` or `?`, and with reads that ask for one version."""

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return path.rpartition("://")[2].rstrip("/") if isinstance(path, str) else [cls._strip_protocol(one) for one in path]

    def _split_path(self, path: str) -> tuple[str, str]:
        bucket, _, key = path.rpartition("://")[2].partition("/")
        return bucket, key

    async def _info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        bucket, key = self._split_path(path)
        if not key.strip("/"):
            return {"name": path, "type": "directory", "size": 0}
        if self.protocol not in _NO_LISTING:
            info: dict[str, Any] = await super()._info(path, **kwargs)
            return info
        store: ObjectStore = self._construct_store(bucket)
        head = await store.head_async(key)
        return {"name": path, "type": "file", "size": head["size"], "e_tag": head["e_tag"]}

    async def _glob(self, path: str, **kwargs: Any) -> Any:
        if self.protocol in _NO_LISTING:
            raise NotImplementedError("a web server lists nothing; name every shard, for example with a brace list")
        return await super()._glob(path, **kwargs)

    async def read_version(self, path: str, start: int, stop: int, etag: str) -> bytes:
        """The bytes `[start, stop)` of an object as long as it has this etag.

        Raises:
            PreconditionError: it has another one.
        """
        bucket, key = self._split_path(path)
        store: ObjectStore = self._construct_store(bucket)
        result = await store.get_async(key, options={"range": (start, stop), "if_match": etag})
        return bytes(await result.bytes_async())


def open_objects(scheme: str, settings: Mapping[str, Any], path: str) -> ObjectFileSystem:
    """A file system for one dataset, whose settings the driver understands.

    Args:
        scheme: of the dataset.
        settings: endpoint, region, credentials; names and values as obstore has them.
        path: of the dataset; nothing connects to it yet.

    Raises:
        ConfigError: an unknown setting, or a value that makes no sense.
    """
    endpoints = [str(value) for key, value in settings.items() if "endpoint" in key.lower()]
    for endpoint in endpoints:
        _check_endpoint(endpoint)
    make: Any = ObjectFileSystem  # the overloads of its constructor leave out what fsspec adds
    filesystem: ObjectFileSystem = make(
        "gs" if scheme == "gcs" else scheme,
        config=dict(settings) or None,
        client_options={"allow_http": scheme == "http" or any(endpoint.startswith("http://") for endpoint in endpoints)},
        retry_config=_RETRY_CONFIG,
        asynchronous=True,
        skip_instance_cache=True,
    )
    try:
        filesystem._construct_store(filesystem._split_path(path)[0])
    except (BaseError, TypeError, ValueError) as error:
        reason = redact(str(error)).partition("\n")[0][:300]
        raise ConfigError(f"the storage settings of a {scheme}:// dataset cannot be used: {reason}") from error
    return filesystem


def _check_endpoint(endpoint: str) -> None:
    """The driver panics on what is no URL."""
    try:
        parts = urlsplit(endpoint)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and endpoint.isascii()
    except ValueError:
        fits = False
    if not fits or any(letter.isspace() for letter in endpoint):
        raise ConfigError("the endpoint of a dataset's storage must be a URL such as http://127.0.0.1:9000")
