"""The default driver of object storages: obstore behind fsspec's interface. Imported only where a dataset needs it."""

import asyncio
import datetime
import time
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.fsspec import FsspecStore
from obstore.store import ObjectStore

from gyre_daemon.errors import ConfigError
from gyre_daemon.runtime.limits import descriptor_shares
from gyre_daemon.storage.answer import Answer, failure
from gyre_daemon.storage.location import endpoints_in, redact
from gyre_daemon.storage.source import Done, Sent

_NO_LISTING = ("http", "https")
_LISTING_RETRIES = 4
_SHARE_OF_IDLE = 4  # of all connections that a daemon may have: one client's, with no request on them
_SIGNED_FOR = datetime.timedelta(hours=1)


class ObjectFileSystem(FsspecStore):
    """obstore's file system, with globs, and with keys that hold `#` or `?`."""

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


class ObjectSource:
    """Reads with obstore; see `Source`. It sends each request once."""

    def __init__(self, scheme: str, settings: Mapping[str, Any], path: str) -> None:
        """Read the datasets that `open_objects` lists.

        Raises:
            ConfigError: see there.
        """
        self._about = scheme, settings, path
        self._filesystem = open_objects(scheme, settings, path, max_retries=0)

    def get(self, path: str, start: int, stop: int, done: Done) -> Sent:
        """See `Source.get`."""
        store, key = self._store(path)
        head = cast("asyncio.Future[Any]", obstore.get_async(store, key, options={"range": (start, stop)}))
        return _Get(head, done)

    def refresh(self, status: int) -> None:
        """See `Source.refresh`: a new store knows nothing of the credentials that the old one held."""
        self._filesystem = open_objects(*self._about, max_retries=0)

    def close(self) -> None:
        """See `Source.close`: connections go with the store."""

    async def signed_url(self, path: str) -> str:
        """A URL with which anybody may read an object for an hour.

        Raises:
            BaseError: there are no credentials to sign with.
        """
        store, key = self._store(path)
        (url,) = await obstore.sign_async(store, "GET", [key], _SIGNED_FOR)
        return url

    def _store(self, path: str) -> tuple[Any, str]:
        bucket, key = self._filesystem._split_path(path)
        return self._filesystem._construct_store(bucket), key


class _Get:
    """One request: first its answer's head, then its body."""

    def __init__(self, head: "asyncio.Future[Any]", done: Done) -> None:
        self.first_byte_at: float | None = 0.0
        self._done = done
        self._is_cancelled = False
        self._answer = Answer(206)
        self._awaited: asyncio.Future[Any] = head
        head.add_done_callback(self._begun)

    def cancel(self) -> None:
        """See `Sent.cancel`."""
        self._is_cancelled = True  # what has arrived by now can be cancelled no more
        self._awaited.cancel()

    def _begun(self, head: "asyncio.Future[Any]") -> None:
        if self._is_cancelled or head.cancelled():
            return
        self.first_byte_at = time.monotonic()
        if error := head.exception():
            self._done(failure(error))
            return
        result = head.result()
        self._answer.etag, self._answer.object_bytes = result.meta["e_tag"] or "", result.meta["size"]
        self._awaited = cast("asyncio.Future[Any]", result.bytes_async())
        self._awaited.add_done_callback(self._whole)

    def _whole(self, body: "asyncio.Future[Any]") -> None:
        if self._is_cancelled or body.cancelled():
            return
        if error := body.exception():
            self._done(failure(error))
            return
        self._answer.data = bytes(body.result())
        self._done(self._answer)


def open_objects(scheme: str, settings: Mapping[str, Any], path: str, max_retries: int = _LISTING_RETRIES) -> ObjectFileSystem:
    """A file system for one dataset, whose settings the driver understands.

    Args:
        scheme: of the dataset.
        settings: endpoint, region, credentials; names and values as obstore has them.
        path: of the dataset; nothing connects to it yet.
        max_retries: of each request.

    Raises:
        ConfigError: an unknown setting, or a value that makes no sense.
    """
    endpoints = endpoints_in(settings)
    for endpoint in endpoints:
        _check_endpoint(endpoint)
    make: Any = ObjectFileSystem  # the overloads of its constructor leave out what fsspec adds
    filesystem: ObjectFileSystem = make(
        "gs" if scheme == "gcs" else scheme,
        config=dict(settings) or None,
        client_options={
            "pool_max_idle_per_host": str(max(1, descriptor_shares().connections // _SHARE_OF_IDLE)),
            "allow_http": scheme == "http" or any(endpoint.startswith("http://") for endpoint in endpoints),
        },
        retry_config={"max_retries": max_retries},
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
