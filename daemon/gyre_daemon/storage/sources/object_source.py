"""The default driver of object storages: obstore behind fsspec's interface.

It is an extra, imported only if a dataset needs it.
"""

import contextlib
import datetime
import os
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.fsspec import FsspecStore
from obstore.store import ObjectStore

from gyre_daemon.config.schema import hide
from gyre_daemon.errors import ConfigError
from gyre_daemon.runtime.limits import descriptor_shares
from gyre_daemon.storage.location import endpoints_in, redact
from gyre_daemon.storage.response import (
    OnResponse,
    Response,
    SentRequest,
    Source,
    no_listing,
)
from gyre_daemon.storage.shard import Validators
from gyre_daemon.storage.sources.fsspec_drivers import AwaitedRequest
from gyre_daemon.storage.sources.http_source import HttpOptions, PlainSource
from gyre_daemon.storage.sources.plain_http import ConnectionBudget

_NO_LISTING = ("http", "https")
_LISTING_RETRIES = 4  # reads are retried by the engine, listings by the driver
# One client may keep one in this many of the daemon's connections idle. With more, a few datasets
# use up the descriptors; with fewer, connections are opened again for each batch.
_SHARE_OF_IDLE = 4
# A setting that a signed URL may not express leaves the dataset to the general client.
_PLAIN_SETTINGS = frozenset(
    ("endpoint", "endpoint_url", "region", "default_region", "access_key_id", "secret_access_key",
     "token", "session_token", "virtual_hosted_style_request", "metadata_endpoint",
     "imdsv1_fallback")
)  # fmt: skip

# Where obstore looks for an endpoint that the settings do not name.
_S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_AZURE_ENDPOINTS = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
_ENDPOINT_VARIABLES = {
    "s3": _S3_ENDPOINTS,
    "s3a": _S3_ENDPOINTS,
    "az": _AZURE_ENDPOINTS,
    "abfs": _AZURE_ENDPOINTS,
}
_PAGE_OBJECTS = 1000  # the most that one answer of a listing has
_SIGNED_FOR = datetime.timedelta(hours=1)


class ObjectFileSystem(FsspecStore):
    """obstore's file system, with globs, and with keys that contain `#` or `?`."""

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, str):
            return path.rpartition("://")[2].rstrip("/")
        return [cls._strip_protocol(each) for each in path]

    def _split_path(self, path: str) -> tuple[str, str]:
        bucket, _, key = path.rpartition("://")[2].partition("/")
        return bucket, key

    async def _info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        bucket, key = self._split_path(path)
        if not key.strip("/"):
            return {"name": path, "type": "directory", "size": 0}
        if self.protocol not in _NO_LISTING:
            try:
                info: dict[str, Any] = await super()._info(path, **kwargs)
            except (
                PermissionDeniedError,
                UnauthenticatedError,
            ):  # the answer to a HEAD has no body that would say why
                await self._cat_file(path, start=0, end=1)
                raise
            if info["type"] != "file":
                return info
            found = _described(info["name"], info)
            return found if Validators.in_info(found) else await self._listed(bucket, key) or found
        store: ObjectStore = self._construct_store(bucket)
        return _described(path, await store.head_async(key))

    async def _glob(self, path: str, **kwargs: Any) -> Any:
        if self.protocol in _NO_LISTING:
            raise no_listing(path)
        return await super()._glob(path, **kwargs)

    async def _ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        bucket, key = self._split_path(path)
        store: ObjectStore = self._construct_store(bucket)
        found = await store.list_with_delimiter_async(key)
        files = [_described(f"{bucket}/{each['path']}", each) for each in found["objects"]]
        files += [
            {"name": f"{bucket}/{prefix}", "type": "directory", "size": 0}
            for prefix in found["common_prefixes"]
        ]
        if not files:
            raise FileNotFoundError(path)
        return files if detail else sorted(each["name"] for each in files)

    async def _listed(self, bucket: str, key: str) -> dict[str, Any] | None:
        """An object as a listing of its folder shows it; some storages tell more there."""
        store: ObjectStore = self._construct_store(bucket)
        folder = key.rpartition("/")[0] or None
        pages = obstore.list(store, folder, offset=key[:-1], chunk_size=_PAGE_OBJECTS)
        with contextlib.suppress(BaseError):  # a reader need not have the right to list
            async for page in pages:
                found = next((each for each in page if each["path"] == key), None)
                return found and _described(f"{bucket}/{key}", found)
        return None

    async def pages_below(self, folder: str) -> AsyncIterator[list[tuple[str, Any]]]:
        """The objects below a folder: path without a scheme, and info; a page at a time."""
        if self.protocol in _NO_LISTING:
            raise no_listing(folder)
        bucket, prefix = self._split_path(folder)
        store: ObjectStore = self._construct_store(bucket)
        async for page in obstore.list(store, prefix, chunk_size=_PAGE_OBJECTS):
            described = [_described(f"{bucket}/{each['path']}", each) for each in page]
            yield [(each["name"], each) for each in described]


def _described(name: str, meta: Mapping[str, Any]) -> dict[str, Any]:
    """An object as fsspec describes it."""
    return {"name": name, "type": "file", "size": meta["size"], "told": _told(meta)}


def _told(meta: Mapping[str, Any]) -> Validators:
    modified = meta["last_modified"] if meta["last_modified"].timestamp() else ""
    return Validators(meta["e_tag"] or "", meta["version"] or "", str(modified))


class ObjectSource(Source):
    """Reads with obstore; see `Source`."""

    def __init__(
        self,
        scheme: str,
        settings: Mapping[str, Any],
        path: str,
        roots: str = "",
    ) -> None:
        """Read the objects of a dataset; see `open_objects` for arguments and errors."""
        self._arguments = scheme, settings, path, roots
        self._filesystem = open_objects(*self._arguments, max_retries=0)

    def get(self, path: str, start: int, stop: int, on_response: OnResponse) -> SentRequest:
        """See `Source.get`."""

        async def answer(request: AwaitedRequest) -> Response:
            request.first_byte_at = 0.0  # not yet
            store, key = self._store(path)
            found = await obstore.get_async(store, key, options={"range": (start, stop)})
            request.first_byte_at = time.monotonic()
            data = bytes(await found.bytes_async())
            return Response(206, data, _told(found.meta), found.meta["size"])

        return AwaitedRequest(answer, on_response)

    def refresh(self, status: int) -> None:
        """See `Source.refresh`: a new store reads credentials again."""
        self._filesystem = open_objects(*self._arguments, max_retries=0)

    async def signed_url(self, path: str) -> str:
        """A URL that allows anybody to read an object for an hour.

        Raises:
            BaseError: there are no credentials to sign with.
        """
        store, key = self._store(path)
        (url,) = await obstore.sign_async(store, "GET", [key], _SIGNED_FOR)
        return url

    def _store(self, path: str) -> tuple[Any, str]:
        bucket, key = self._filesystem._split_path(path)
        return self._filesystem._construct_store(bucket), key


def open_objects(
    scheme: str,
    settings: Mapping[str, Any],
    path: str,
    roots: str = "",
    max_retries: int = _LISTING_RETRIES,
) -> ObjectFileSystem:
    """A file system for one dataset; nothing connects yet.

    Args:
        scheme: of the dataset.
        settings: endpoint, region and credentials, with the names and values of obstore.
        path: of the dataset.
        roots: see `HttpOptions`.
        max_retries: of each request.

    Raises:
        ConfigError: a setting is unknown, or has an invalid value.
    """
    variables = [os.environ.get(name) for name in _ENDPOINT_VARIABLES.get(scheme, ())]
    endpoints = endpoints_in(settings) or [value for value in variables if value]
    for endpoint in endpoints:
        _check_endpoint(endpoint)
    max_idle = max(1, descriptor_shares().connections // _SHARE_OF_IDLE)
    allow_http = scheme == "http" or any(each.startswith("http://") for each in endpoints)
    client_options = {"pool_max_idle_per_host": str(max_idle), "allow_http": allow_http}
    if roots:
        client_options["root_certificate"] = roots
    make: Any = ObjectFileSystem  # its constructor's overloads lack fsspec's arguments
    filesystem: ObjectFileSystem = make(
        "gs" if scheme == "gcs" else scheme,
        config=dict(settings) or None,
        client_options=client_options,
        retry_config={"max_retries": max_retries},
        asynchronous=True,
        skip_instance_cache=True,
    )
    try:
        filesystem._construct_store(filesystem._split_path(path)[0])
    except (BaseError, TypeError, ValueError) as error:
        reason = redact(hide(str(error), settings)).partition("\n")[0][:300]
        raise ConfigError(
            f"the storage settings of a {scheme}:// dataset cannot be used: {reason}"
        ) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # it can be imported from nowhere
            raise
        raise ConfigError(
            f"the storage settings of a {scheme}:// dataset cannot be used: obstore fails with "
            f"{error!s:.200}; is every key a setting of {scheme}, and none of its HTTP client?"
        ) from error
    return filesystem


def _check_endpoint(endpoint: str) -> None:
    """Refuse an invalid URL, on which the driver would panic."""
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url or not endpoint.isascii() or any(letter.isspace() for letter in endpoint):
        raise ConfigError(
            "the endpoint of a dataset's storage must be a URL such as http://127.0.0.1:9000"
        )


async def plain_source(
    general: ObjectSource,
    scheme: str,
    settings: Mapping[str, Any],
    path: str,
    budget: ConnectionBudget,
    num_connections: int,
    options: HttpOptions,
) -> Source:
    """The cheapest source for an object storage: our own client if possible, or the general one.

    Args:
        general: that client.
        scheme: of the dataset.
        settings: of its driver.
        path: of one of its objects.
        budget: of connections.
        num_connections: to open at once, so that a first batch need not wait for them.
        options: which redirects are followed, and whose certificates are trusted.
    """
    names = {key.lower().removeprefix("aws_") for key in settings}
    if scheme not in ("s3", "s3a") or not names <= _PLAIN_SETTINGS:
        return general
    try:
        url = urlsplit(await general.signed_url(path))
    except BaseError:  # there are no credentials to sign with
        return general
    if url.scheme in getproxies() and not proxy_bypass(url.hostname or ""):
        return general
    source = PlainSource(general, general.signed_url, budget, options)
    source.connect(url, num_connections)
    return source
