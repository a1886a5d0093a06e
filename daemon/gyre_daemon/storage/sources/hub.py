"""Datasets of the Hugging Face Hub: `hf://datasets/OWNER/NAME[@REVISION]/PATH`.

Four requests of the hub's interface are all that reading takes: which commit a revision is, what a
folder holds, what a file is, and where its bytes lie. They are sent here, in threads, so that no
version of the hub's library matters; our own client reads the bytes. A revision is resolved to a
commit when a dataset is opened, and only that commit is read.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, urlencode, urljoin, urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from gyre_daemon.errors import ConfigError, InvalidRequest
from gyre_daemon.storage.sources.http_options import HttpOptions
from gyre_daemon.storage.sources.hub_budget import MAX_WAIT_S, HubBudget, retry_after_s
from gyre_daemon.storage.sources.redirects import MAX_REDIRECTS, host_of

_PATH = re.compile(
    r"(?:hf://)?(datasets/([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?)(?:/+(.*))?"
)
_KEYS = ("endpoint", "token_file", "revision")
_ENDPOINT, USUAL_BRANCH = "https://huggingface.co", "main"
# The hub redirects to hosts of its own, whose names change.
_OWN_HOSTS = (".hf.co", ".huggingface.co")
_NEXT_PAGE = re.compile(r'<([^>]*)>; *rel="next"')
_TIMEOUT_S = 30.0
_MAX_ATTEMPTS = 5  # of a request that is refused because of too many


class HubError(OSError):
    """An answer of the hub that is no success.

    Attributes:
        status: of the response; 0 if there was none.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class HubUnreachable(HubError):
    """There is no way to the hub."""


@dataclass(frozen=True, slots=True)
class HubPath:
    """What a path on the hub stands for.

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


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file or folder of a repository.

    Attributes:
        name: in the repository.
        num_bytes: of a file.
        digest: of a file's content; empty for a folder.
    """

    name: str
    num_bytes: int = 0
    digest: str = ""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the hub answered: status and headers, and a body unless only those were asked for."""

    status: int
    headers: Message
    body: bytes


class HubClient:
    """Asks the hub, within the node's budget. All but `is_own` waits.

    Attributes:
        endpoint: the URL of the hub, without a slash at its end.
        token: what the daemon shows to the hub, and to nobody else; empty for none.
        budget: the node's.
        revision: which the `storage` table names; empty for none.
    """

    def __init__(
        self, settings: Mapping[str, Any], options: HttpOptions, budget: HubBudget
    ) -> None:
        """Ask nothing yet. Reads files.

        Raises:
            ConfigError: a setting is unknown or cannot be used.
        """
        for key in settings:
            if key not in _KEYS:
                raise ConfigError(
                    f"the storage settings of a dataset of the hub cannot be used: `{key:.100}` is "
                    f"unknown; known are {', '.join(_KEYS)}"
                )
        endpoint = settings.get("endpoint") or os.environ.get("HF_ENDPOINT") or _ENDPOINT
        self.endpoint = str(endpoint).rstrip("/")
        self.token = _token(settings)
        self.budget = budget
        self.revision = str(settings.get("revision", ""))
        self._redirects = options.redirects
        self._open = build_opener(_NoRedirects, HTTPSHandler(context=options.tls)).open
        self._commits: dict[tuple[str, str], str] = {}

    def is_own(self, url: str) -> bool:
        """Whether a URL is one of the hub itself, which limits requests and may see the token."""
        parts, own = urlsplit(url), urlsplit(self.endpoint)
        return parts.scheme == own.scheme and host_of(parts) == host_of(own)

    def files(self, path: HubPath, *, recursive: bool) -> list[HubFile]:
        """The entries of a folder, or all below it."""
        folder = f"/{quote(path.name, safe='')}" if path.name else ""
        wanted = urlencode({"recursive": recursive, "expand": False})
        page = f"{self._api(path, 'tree')}/{self._commit(path)}{folder}?{wanted}"
        found: list[HubFile] = []
        while page:
            answer = self._ask(page)
            found += _entries(answer)
            more = _NEXT_PAGE.search(answer.headers.get("Link", ""))
            page = more[1] if more else ""
        return found

    def file(self, path: HubPath) -> HubFile:
        """A file or a folder.

        Raises:
            FileNotFoundError: there is none.
        """
        commit = self._commit(path)
        if not path.name:
            return HubFile("")
        wanted = urlencode({"paths": path.name, "expand": False}).encode()
        found = next(_entries(self._ask(f"{self._api(path, 'paths-info')}/{commit}", wanted)), None)
        if found is None:
            raise FileNotFoundError(path.name)
        return found

    def url(self, path: HubPath) -> str:
        """Where the bytes of a file can be read for some time.

        Raises:
            Refused: the hub names a host that the operator does not.
        """
        where = f"datasets/{path.repository}/resolve/{self._commit(path)}/{quote(path.name)}"
        url = f"{self.endpoint}/{where}"
        for _ in range(MAX_REDIRECTS):
            answer = self._send(url, None, "HEAD")
            if not 300 <= answer.status < 400:
                return url
            target = urljoin(url, answer.headers.get("Location", ""))
            if not self.is_own(target):
                is_hubs = _is_of_the_hub(self.endpoint, target)
                return target if is_hubs else self._redirects.follow(url, target)
            url = target
        raise HubError(0, f"{self.endpoint} redirects in a loop")

    def revision_of(self, path: HubPath) -> str:
        """The branch, tag or commit that a path stands for.

        Raises:
            InvalidRequest: the path and the `storage` table name two.
        """
        if path.revision and self.revision and path.revision != self.revision:
            raise InvalidRequest(
                f"the path names the revision {path.revision:.100}, and the `storage` table "
                f"{self.revision:.100}; leave one of them out"
            )
        return path.revision or self.revision or USUAL_BRANCH

    def _api(self, path: HubPath, what: str) -> str:
        return f"{self.endpoint}/api/datasets/{path.repository}/{what}"

    def _commit(self, path: HubPath) -> str:
        """The commit that is read; the first answer counts."""
        revision = self.revision_of(path)
        key = path.repository, revision
        if key not in self._commits:
            answer = self._ask(f"{self._api(path, 'revision')}/{quote(revision, safe='')}")
            commit = _parsed(answer).get("sha")
            if not commit:
                raise HubError(0, f"the hub names no commit for the revision {revision:.100}")
            self._commits.setdefault(key, str(commit))
        return self._commits[key]

    def _ask(self, url: str, body: bytes | None = None) -> _Answer:
        """A request that is answered by the hub itself, be it at another path."""
        for _ in range(MAX_REDIRECTS):
            answer = self._send(url, body)
            if not 300 <= answer.status < 400:
                return answer
            url = urljoin(url, answer.headers.get("Location", ""))
        raise HubError(0, f"{self.endpoint} redirects in a loop")

    def _send(self, url: str, body: bytes | None, method: str | None = None) -> _Answer:
        """Send one request, again where it was refused because of too many.

        Raises:
            FileNotFoundError: nothing is there.
            HubError: there is no answer, or no success, or this is no URL of the hub.
        """
        if not self.is_own(url):
            raise HubError(0, f"{urlsplit(self.endpoint).netloc} redirects to another host")
        headers = {"User-Agent": "gyre", "Accept-Encoding": "identity"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        for _ in range(_MAX_ATTEMPTS):
            _wait(self.budget)
            request = Request(url, body, headers, method=method)
            try:
                with self._open(request, timeout=_TIMEOUT_S) as it:
                    return _Answer(it.status, it.headers, it.read())
            except HTTPError as error:
                answer = _Answer(error.code, error.headers, b"")
                error.close()
            except (OSError, HTTPException) as error:
                reason = getattr(error, "reason", error)
                raise HubUnreachable(0, f"{self.endpoint}: {reason}") from error
            if answer.status not in (429, 503):
                break
            self.budget.hold(retry_after_s(answer.headers.get("Retry-After", "")))
        if 300 <= answer.status < 400:
            return answer
        if answer.status == 404:
            raise FileNotFoundError("no such file in this revision")
        raise HubError(answer.status, f"HTTP status {answer.status} of {self.endpoint}")


class _NoRedirects(HTTPRedirectHandler):
    """Redirects are answers: the token must not follow them to another host."""

    def redirect_request(self, *_: Any) -> None:
        """See `HTTPRedirectHandler.redirect_request`."""


def _entries(answer: _Answer) -> Iterator[HubFile]:
    """The files and folders that an answer describes."""
    for entry in _parsed(answer):
        if entry["type"] == "directory":
            yield HubFile(entry["path"])
        else:
            digest = (entry.get("lfs") or {}).get("oid") or entry["oid"]
            yield HubFile(entry["path"], int(entry["size"]), digest)


def _parsed(answer: _Answer) -> Any:
    try:
        return json.loads(answer.body)
    except ValueError as error:
        raise HubError(0, "the hub's answer is not JSON") from error


def _is_of_the_hub(endpoint: str, url: str) -> bool:
    """Whether the public hub sends to one of its own hosts."""
    if urlsplit(endpoint).hostname != "huggingface.co":
        return False
    parts = urlsplit(url)
    return parts.scheme == "https" and (parts.hostname or "").endswith(_OWN_HOSTS)


def hub_home() -> Path:
    """Where the hub's library keeps its files, by its own variables."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    return Path(os.path.expandvars(home)).expanduser()


def _token(settings: Mapping[str, Any]) -> str:
    """The daemon's token: of a file, or where the hub's library looks for it."""
    file = settings.get("token_file", "")
    if not file:
        if named := os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN"):
            return named.strip()
        usual = Path(os.environ.get("HF_TOKEN_PATH") or hub_home() / "token").expanduser()
        try:
            return usual.read_text("ascii").strip()
        except (OSError, UnicodeError):
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


def _wait(budget: HubBudget) -> None:
    """Wait for a turn.

    Raises:
        HubError: it would take too long.
    """
    wait_s = budget.reserve()
    while wait_s:
        if wait_s > MAX_WAIT_S:
            raise HubError(429, f"the hub was asked too often; it can be asked in {wait_s:.0f} s")
        if budget.closed.wait(wait_s):
            raise HubError(0, "the daemon is stopping")
        wait_s = budget.held_s()
