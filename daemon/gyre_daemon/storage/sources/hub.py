"""Datasets of the Hugging Face Hub: `hf://datasets/OWNER/NAME[@REVISION]/PATH`.

The hub's library knows tokens, addresses, commits, errors and its cache on disk. It lists no
folder here: `HfApi.list_repo_tree`, on which `HfFileSystem` stands, has no timeout, and repeats
refused requests itself (up to 20 times in 0.36, for as long as `Retry-After` says in 2), past the
node's budget. So each page of a listing is one request of the library's session.

The hub limits the requests of an address or a user. All datasets and jobs of a daemon share one
budget. When the hub says that it was asked too often (status 429), all of them wait as long as it
says.
"""

import asyncio
import functools
import importlib
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urljoin, urlsplit

from fsspec.asyn import AsyncFileSystem
from fsspec.utils import glob_translate
from msgspec import Struct
from msgspec.structs import replace

from gyre_daemon.errors import ConfigError, GyreError, InvalidRequest, ShardMissing
from gyre_daemon.runtime.threads import DaemonThreads
from gyre_daemon.storage.location import Location, redact
from gyre_daemon.storage.response import OnResponse, Response, SentRequest, Source, describe
from gyre_daemon.storage.shard import Validators
from gyre_daemon.storage.sources.http_source import (
    CA_FILE,
    MAX_REDIRECTS,
    HttpOptions,
    PlainSource,
    RedirectPolicy,
    Refused,
    host_of,
)
from gyre_daemon.storage.sources.plain_http import ConnectionBudget

# The hub counts requests in windows of five minutes, so a minute's worth may be asked at once.
_BURST_S = 60.0
# Where the hub does not say how long to wait.
_USUAL_HOLD_S = 10.0
# A request that would wait longer fails, with the hub's message.
_MAX_WAIT_S = 30.0
_NUM_THREADS = 8

Result = TypeVar("Result")

_PATH = re.compile(
    r"(?:hf://)?(datasets/([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?)(?:/+(.*))?"
)
_KEYS = ("endpoint", "token_file", "revision")
# The public hub redirects to its own hosts, whose names change.
_PUBLIC, _OWN_HOSTS = "huggingface.co", (".hf.co", ".huggingface.co")
TIMEOUT_S = 30.0
_MAX_ATTEMPTS = 5  # of a request refused because of too many

_BEFORE_WILDCARDS = re.compile(r"^(?:([^*?\[]*)/)?(.*)$")


class HubError(OSError):
    """An answer of the hub without success.

    Attributes:
        status: of the response; 0 if there was none.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class HubUnreachable(HubError):
    """There is no way to the hub."""


class HubBudget:
    """A token bucket, and a time before which nothing is sent."""

    def __init__(self, requests_per_s: float) -> None:
        """Full at first.

        Args:
            requests_per_s: in the long run.
        """
        self._per_s = requests_per_s
        self._threads = DaemonThreads(_NUM_THREADS, "gyre-hub")
        self._next = 0.0  # when the last request that was let in should be sent, if all are paced
        self._held_until = 0.0

    def close(self) -> None:
        """Begin nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def held_s(self) -> float:
        """How long nothing may be sent from now on."""
        return max(0.0, self._held_until - time.monotonic())

    def reserve(self) -> float:
        """Take a token for a request, to be sent after this time in seconds."""
        now = time.monotonic()
        self._next = max(self._next, now - _BURST_S, self._held_until) + 1 / self._per_s
        return max(0.0, self._next - now)

    def hold(self, retry_after: str | float) -> None:
        """The hub refused a request; send nothing for the time in its `Retry-After`."""
        text = str(retry_after).strip()
        seconds = float(text) if re.fullmatch(r"\d{1,6}(\.\d+)?", text) else 0.0
        until = time.monotonic() + (seconds or _USUAL_HOLD_S)
        self._held_until = max(self._held_until, until)

    async def turn(self) -> None:
        """Take a token, and wait until the request may be sent.

        Raises:
            HubError: it would take too long.
        """
        wait_s = self.reserve()
        while wait_s:
            if wait_s > _MAX_WAIT_S:
                text = f"the hub was asked too often; it can be asked in {wait_s:.0f} s"
                raise HubError(429, text)
            await asyncio.sleep(wait_s)
            wait_s = self.held_s()  # others may have been refused

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """The result of one request, which waits for the hub's answer."""
        return await self._threads.run(work)


def library() -> Any:
    """The hub's library, which is imported here because few daemons need it.

    Raises:
        ConfigError: it is absent, or of a version that lacks a module.
    """
    try:
        hub = importlib.import_module("huggingface_hub")
        for module in ("constants", "errors", "utils"):
            importlib.import_module(f"huggingface_hub.{module}")
    except ImportError as error:
        raise ConfigError(
            f'hf:// needs huggingface_hub ({error}). Run pip install --upgrade "gyre-ml[hub]".'
        ) from error
    return hub


class HubPath(Struct, frozen=True):
    """The meaning of a path on the hub.

    Attributes:
        prefix: `datasets/OWNER/NAME`, with the revision if the path has one.
        repository: `OWNER/NAME`.
        revision: a branch, a tag or a commit; empty for the usual branch.
        name: of the file or folder in the repository; empty for its root.
    """

    prefix: str
    repository: str
    revision: str
    name: str

    @classmethod
    def of(cls, path: str) -> "HubPath":
        """The parts of a path, with or without its scheme.

        Raises:
            InvalidRequest: it is no path of a dataset.
        """
        match = _PATH.fullmatch(path.rstrip("/"))
        if not match:
            raise InvalidRequest(
                f"{path:.300} names no dataset of the hub; write hf://datasets/OWNER/NAME/PATH, or "
                "hf://datasets/OWNER/NAME@REVISION/PATH"
            )
        return cls(match[1], match[2], (match[3] or "").replace("%2F", "/"), match[4] or "")


class HubClient:
    """Asks the hub, within the node's budget.

    Attributes:
        token: the daemon's credential, shown to the hub alone; empty for none.
        budget: the node's.
        is_offline: whether the hub must not be asked.
    """

    def __init__(
        self, settings: Mapping[str, Any], options: HttpOptions, budget: HubBudget
    ) -> None:
        """Ask nothing yet. Reads files, and imports the library.

        Raises:
            ConfigError: a setting is unknown or cannot be used; or see `library`.
        """
        for key in settings:
            if key not in _KEYS:
                raise ConfigError(
                    f"the storage settings of a dataset of the hub cannot be used: `{key:.100}` is "
                    f"unknown; known are {', '.join(_KEYS)}"
                )
        if options.roots:
            raise ConfigError(
                f"{CA_FILE} is not for datasets of the hub. Set SSL_CERT_FILE and "
                "REQUESTS_CA_BUNDLE to that file in the daemon's environment."
            )
        hub = self._hub = library()
        self.token: str = _token(settings) or hub.get_token() or ""
        self.budget = budget
        self.is_offline = bool(hub.constants.HF_HUB_OFFLINE)
        self._endpoint = str(settings.get("endpoint") or hub.constants.ENDPOINT).rstrip("/")
        self._revision = str(settings.get("revision", ""))
        self._redirects = options.redirects
        self._login: Any = {"token": self.token or False, "library_name": "gyre"}
        self._answers: dict[tuple[str, ...], asyncio.Task[Any]] = {}

    def is_own(self, url: str) -> bool:
        """Whether a URL is one of the hub itself, which limits requests and may see the token."""
        parts, own = urlsplit(url), urlsplit(self._endpoint)
        return parts.scheme == own.scheme and host_of(parts) == host_of(own)

    async def folder(self, path: HubPath) -> list[dict[str, Any]]:
        """The entries of a folder, as fsspec describes them; asked for once, as all are small."""

        async def ask() -> list[dict[str, Any]]:
            return [info async for page in self.pages(path) for info in page]

        infos: list[dict[str, Any]] = await self._once(("folder", path.prefix, path.name), ask)
        return infos

    async def pages(
        self, path: HubPath, *, recursive: bool = False
    ) -> AsyncIterator[list[dict[str, Any]]]:
        """The entries of a folder or all below it, with digests of their contents; in pages."""
        where = f"{self._endpoint}/api/datasets/{path.repository}/tree/{await self._commit(path)}"
        folder = f"/{quote(path.name, safe='')}" if path.name else ""
        url = f"{where}{folder}?{urlencode({'recursive': recursive, 'expand': False})}"
        while url:
            entries, url = await self._ask(functools.partial(self._page, url))
            yield [_described(path, entry) for entry in entries]

    async def url(self, path: HubPath) -> str:
        """Where the hub is asked for a file."""
        url: str = self._hub.hf_hub_url(
            path.repository,
            path.name,
            repo_type="dataset",
            revision=await self._commit(path),
            endpoint=self._endpoint,
        )
        return url

    def follow(self, url: str, location: str) -> str:
        """The URL that a redirect leads to; see `RedirectPolicy.follow`."""
        parts = urlsplit(urljoin(url, location))
        is_public = urlsplit(self._endpoint).hostname == _PUBLIC and parts.scheme == "https"
        if is_public and (parts.hostname or "").endswith(_OWN_HOSTS):
            return parts.geturl()
        return self._redirects.follow(url, location)

    def snapshot(self, location: Location, why: str) -> tuple[Location, Path]:
        """The files of a location in the library's cache, and the folder of their commit.

        Compute nodes often have no way to the hub. Reads files, and asks nothing.

        Args:
            location: on the hub.
            why: the hub is not asked; for the error.

        Raises:
            ShardMissing: the cache has none.
        """
        hub, paths = self._hub, [HubPath.of(path) for path in location.paths]
        repository, revision = paths[0].repository, self._revision_of(paths[0])
        try:
            folder = hub.snapshot_download(
                repository, repo_type="dataset", revision=revision, local_files_only=True
            )
        except hub.errors.LocalEntryNotFoundError as error:
            # The library's version 2 tells of a snapshot that lacks files of other folders, too.
            folder = getattr(error, "snapshot_path", None)
            if not folder:
                cache = Path(hub.constants.HF_HUB_CACHE)
                commits = cache.glob(f"datasets--{repository.replace('/', '--')}/snapshots/*")
                there = ", ".join(sorted(commit.name for commit in commits))
                raise ShardMissing(
                    f"{why}, and the hub's cache {cache} has no snapshot of {repository} at "
                    f"{revision:.100}{'; it has the commits ' * bool(there)}{there}. Run `hf "
                    f"download --repo-type dataset {repository}` where there is a way to the hub, "
                    "with the same HF_HOME.",
                    {"location": location.text},
                ) from error
        files = tuple(f"{folder}/{path.name}" for path in paths)
        return Location("file", files, location.text), Path(folder)

    def _revision_of(self, path: HubPath) -> str:
        """The branch, tag or commit that a path stands for.

        Raises:
            InvalidRequest: the path and the `storage` table name two.
        """
        if path.revision and self._revision and path.revision != self._revision:
            raise InvalidRequest(
                f"the path names the revision {path.revision:.100}, and the `storage` table "
                f"{self._revision:.100}; leave one of them out"
            )
        return path.revision or self._revision or "main"

    async def _commit(self, path: HubPath) -> str:
        """The commit that is read; the first answer counts."""
        revision = self._revision_of(path)
        api = self._hub.HfApi(self._endpoint, **self._login)
        ask = functools.partial(
            api.dataset_info, path.repository, revision=revision, timeout=TIMEOUT_S
        )
        key = "commit", path.repository, revision
        info = await self._once(key, functools.partial(self._ask, ask))
        if not info.sha:
            raise HubError(0, f"the hub names no commit for the revision {revision:.100}")
        return str(info.sha)

    def _page(self, url: str) -> tuple[list[dict[str, Any]], str]:
        """A page of a listing, and the URL of the next one."""
        utils, headers = self._hub.utils, self._hub.utils.build_hf_headers(**self._login)
        answer = None
        if self.is_own(url):
            answer = utils.get_session().get(url, headers=headers, timeout=TIMEOUT_S)
        if answer is None or not self.is_own(str(answer.url)):
            raise HubError(0, f"{urlsplit(self._endpoint).netloc} redirects to another host")
        utils.hf_raise_for_status(answer)
        return answer.json(), answer.links.get("next", {}).get("url", "")

    async def _once(self, key: tuple[str, ...], ask: Callable[[], Any]) -> Any:
        """The answer to the first of some equal questions; a failure is not remembered."""
        if key not in self._answers:
            self._answers[key] = asyncio.ensure_future(ask())
            self._answers[key].add_done_callback(lambda task: task.cancelled() or task.exception())
        task = self._answers[key]
        try:
            return await asyncio.shield(task)
        except Exception:
            self._answers.pop(key, None)
            raise

    async def _ask(self, request: Callable[[], Any]) -> Any:
        """Send one request, again where it was refused because of too many.

        Raises:
            FileNotFoundError: nothing is there.
            HubError: there is no answer, or no success.
        """
        if self.is_offline:
            raise HubUnreachable(0, "HF_HUB_OFFLINE is set")
        for _ in range(_MAX_ATTEMPTS):
            await self.budget.turn()
            try:
                return await self.budget.in_thread(request)
            except Exception as error:
                failure = self._failure(error)
                if getattr(failure, "status", 0) not in (429, 503):
                    raise failure from error
        raise failure

    def _failure(self, error: Exception) -> Exception:
        """The meaning of an error of the library."""
        response = getattr(error, "response", None)
        if response is not None:
            if response.status_code == 404:
                return FileNotFoundError("no such file in this revision")
            if response.status_code in (429, 503):
                self.budget.hold(response.headers.get("Retry-After", ""))
            text = f"HTTP status {response.status_code} of {self._endpoint}"
            return HubError(response.status_code, text)
        if isinstance(error, GyreError | HubError):
            return error
        if isinstance(error, ValueError):
            return HubError(0, "the hub's answer is not JSON")
        # All that its HTTP library raises; the class depends on the version.
        if isinstance(error, (OSError, *self._hub.errors.HfHubHTTPError.__bases__)):
            return HubUnreachable(0, f"{self._endpoint}: {_reason(error)}")
        return error


def _reason(error: BaseException) -> str:
    while inner := error.__cause__ or error.__context__:
        error = inner
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _described(path: HubPath, entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of a listing as fsspec describes it."""
    name = f"{path.prefix}/{entry['path']}"
    if entry["type"] == "directory":
        return {"name": name, "type": "directory", "size": 0}
    told = Validators(digest=(entry.get("lfs") or {}).get("oid") or entry["oid"])
    return {"name": name, "type": "file", "size": int(entry["size"]), "told": told}


def _token(settings: Mapping[str, Any]) -> str:
    """The token in the file that the settings name; empty without a name."""
    file = settings.get("token_file", "")
    if not file:
        return ""
    try:
        token = Path(str(file)).read_text("ascii").strip()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(
            f"token_file of a dataset's storage names {file!r:.300}, which cannot be read: {reason}"
        ) from error
    if not token or not token.isprintable() or " " in token:
        raise ConfigError(f"token_file of a dataset's storage names {file!r:.300}: it has no token")
    return token


class HubFileSystem(AsyncFileSystem):  # type: ignore[misc]
    """Lists the files of datasets of the hub.

    Attributes:
        source: reads the same files.
    """

    cachable = False  # codespell:ignore cachable

    def __init__(self, client: HubClient, options: HttpOptions, budget: ConnectionBudget) -> None:
        """Ask nothing yet.

        Args:
            client: asks the hub.
            options: see `PlainSource`.
            budget: of connections.
        """
        super().__init__(asynchronous=True)
        self._client = client
        self.source = HubSource(client, options, budget)

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        where = HubPath.of(path)
        name = f"{where.prefix}/{where.name}"
        if not where.name:
            return {"name": where.prefix, "type": "directory", "size": 0}
        folder = replace(where, name=where.name.rpartition("/")[0])
        for info in await self._client.folder(folder):
            if info["name"] == name:
                return info
        raise FileNotFoundError(path)

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        found = await self._client.folder(HubPath.of(path))
        return found if detail else [each["name"] for each in found]

    async def _glob(self, path: str, **_: Any) -> dict[str, dict[str, Any]]:
        pattern = HubPath.of(path)
        literal, rest = _BEFORE_WILDCARDS.findall(pattern.name)[0]
        matches = re.compile(f"{re.escape(pattern.prefix)}/{glob_translate(pattern.name)}").match
        pages = self._client.pages(
            replace(pattern, name=literal), recursive="/" in rest or "**" in rest
        )
        return {
            info["name"]: info async for page in pages for info in page if matches(info["name"])
        }

    async def pages_below(self, folder: str) -> AsyncIterator[list[tuple[str, Any]]]:
        """The files below a folder: path without a scheme, and info; a page at a time."""
        async for page in self._client.pages(HubPath.of(folder), recursive=True):
            yield [(info["name"], info) for info in page if info["type"] == "file"]


class HubSource(Source):
    """Reads files of the hub; see `Source`.

    The hub says where the bytes of a file lie, mostly in a storage of its own, and these are read
    from there without asking the hub again. Small files lie on the hub itself. Their reads take
    turns in its budget, and only they carry the daemon's token.
    """

    def __init__(self, client: HubClient, options: HttpOptions, budget: ConnectionBudget) -> None:
        """Connect to nothing yet; see `HubFileSystem`."""
        self._client = client
        self._own: dict[str, str] = {}  # URLs of files on the hub itself
        self._plain = PlainSource(None, self._url, budget, options, self._headers)
        no_redirects = replace(options, redirects=_NoRedirects())
        self._heads = PlainSource(None, _itself, budget, no_redirects, self._headers)

    def get(self, path: str, start: int, stop: int, on_response: OnResponse) -> SentRequest:
        """See `Source.get`."""

        def answer(response: Response) -> None:
            if path in self._own and response.status in (429, 503):
                self._client.budget.hold(response.retry_after_s)
            on_response(response)

        return self._plain.get(path, start, stop, answer)

    def refresh(self, status: int) -> None:
        """See `Source.refresh`: the hub is asked again where files lie."""
        self._own.clear()
        self._plain.refresh(status)

    def close(self) -> None:
        """See `Source.close`."""
        self._plain.close()
        self._heads.close()

    async def _url(self, path: str) -> str:
        url = self._own.get(path) or await self._find(path)
        if self._client.is_own(url):
            self._own[path] = url
            await self._client.budget.turn()
            self._plain.forget(path)  # the next read takes its turn, too
        return url

    async def _find(self, path: str) -> str:
        """The URL of a file's bytes, for an hour."""
        url = await self._client.url(HubPath.of(path))
        for _ in range(MAX_REDIRECTS):
            response = await self._head(url)
            if response.status == 200:
                return url
            url = self._client.follow(url, response.location)
            if not self._client.is_own(url):
                return url
        raise HubError(0, "the hub redirects in a loop")

    async def _head(self, url: str) -> Response:
        """The answer of the hub, which is a success or a redirect."""
        await self._client.budget.turn()
        async with asyncio.timeout(TIMEOUT_S):
            response, _ = await self._heads.head(url)
        self._heads.forget(url)
        if response.status in (429, 503):
            self._client.budget.hold(response.retry_after_s)
        if response.status != 200 and not response.location:
            if response.refused:
                raise Refused(response.refused)
            raise HubError(response.status, describe(response))
        return response

    def _headers(self, url: str) -> str:
        """The token goes to the hub alone."""
        is_own = self._client.token and self._client.is_own(url)
        return f"Authorization: Bearer {self._client.token}\r\n" if is_own else ""


class _NoRedirects(RedirectPolicy, frozen=True):
    """Redirects are answers: they say where a file is."""

    def follow(self, url: str, location: str) -> str:
        """Refuse all; see `RedirectPolicy.follow`."""
        raise Refused(f"{redact(url)} redirects to {redact(location)}")


async def _itself(url: str) -> str:
    return url
