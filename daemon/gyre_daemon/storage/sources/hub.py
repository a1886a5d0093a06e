"""Datasets of the Hugging Face Hub: `hf://datasets/OWNER/NAME[@REVISION]/PATH`.

The hub's library lists files and says where their bytes lie, in threads; our own client reads the
bytes. A revision is resolved to a commit when a dataset is opened, and only that commit is read. It
is an extra, imported only if a dataset needs it.
"""

import contextvars
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import requests
from huggingface_hub import HfApi, configure_http_backend, constants, get_token, hf_hub_url
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from requests.adapters import HTTPAdapter

from gyre_daemon.errors import ConfigError, InvalidRequest
from gyre_daemon.storage.sources.hub_budget import MAX_WAIT_S, HubBudget, retry_after_s
from gyre_daemon.storage.sources.redirects import RedirectPolicy, host_of

_PATH = re.compile(
    r"(?:hf://)?(datasets/([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?)(?:/+(.*))?"
)
_KEYS = ("endpoint", "token_file", "revision")
# The hub redirects to hosts of its own, whose names change.
_OWN_HOSTS = (".hf.co", ".huggingface.co")
_TIMEOUT_S = 30.0
_MAX_ATTEMPTS = 5  # of a request that is refused because of too many

Result = TypeVar("Result")


class HubError(OSError):
    """An answer of the hub that is no success.

    Attributes:
        status: of the response; 0 if there was none.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


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


class HubClient:
    """Asks the hub, in threads of its own, within the node's budget.

    Attributes:
        endpoint: the URL of the hub, without a slash at its end.
        token: what the daemon shows to the hub, and to nobody else; empty for none.
        budget: the node's.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        redirects: RedirectPolicy,
        budget: HubBudget,
        threads: ThreadPoolExecutor,
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
        self.endpoint = str(settings.get("endpoint", constants.ENDPOINT)).rstrip("/")
        self.token = _token(settings)
        self.budget = budget
        self._revision = str(settings.get("revision", ""))
        self._redirects, self._threads = redirects, threads
        self._host = host_of(urlsplit(self.endpoint))
        self._api = HfApi(endpoint=self.endpoint, token=self.token or False)
        self._commits: dict[tuple[str, str], str] = {}

    def is_own(self, url: str) -> bool:
        """Whether a URL is one of the hub itself, which limits requests and may see the token."""
        parts = urlsplit(url)
        return parts.scheme == urlsplit(self.endpoint).scheme and host_of(parts) == self._host

    def files(self, path: HubPath, *, recursive: bool) -> list[HubFile]:
        """The entries of a folder, or all below it. Waits."""
        commit = self._commit(path)
        found = self._ask(
            lambda: list(
                self._api.list_repo_tree(
                    path.repository,
                    path.name or None,
                    recursive=recursive,
                    revision=commit,
                    repo_type="dataset",
                )
            )
        )
        return [_file(each) for each in found]

    def file(self, path: HubPath) -> HubFile:
        """A file or a folder. Waits.

        Raises:
            FileNotFoundError: there is none.
        """
        commit = self._commit(path)
        if not path.name:
            return HubFile("")
        found = self._ask(
            lambda: self._api.get_paths_info(
                path.repository, [path.name], revision=commit, repo_type="dataset"
            )
        )
        if not found:
            raise FileNotFoundError(path.name)
        return _file(found[0])

    def url(self, path: HubPath) -> str:
        """Where the bytes of a file can be read for some time. Waits.

        Raises:
            Refused: the hub names a host that the operator does not.
        """
        url = hf_hub_url(
            path.repository,
            path.name,
            repo_type="dataset",
            revision=self._commit(path),
            endpoint=self.endpoint,
        )
        metadata = self._ask(lambda: self._api.get_hf_file_metadata(url=url, timeout=_TIMEOUT_S))
        location = metadata.location
        if self.is_own(location) or _is_of_the_hub(self.endpoint, location):
            return location
        return self._redirects.follow(url, location)

    def submit(self, work: Callable[..., Result], *arguments: Any) -> Any:
        """The future of what one of the methods that wait returns."""
        return self._threads.submit(work, *arguments)

    def _commit(self, path: HubPath) -> str:
        """The commit that is read; the first answer counts."""
        if path.revision and self._revision and path.revision != self._revision:
            raise InvalidRequest(
                f"the path names the revision {path.revision:.100}, and the `storage` table "
                f"{self._revision:.100}; leave one of them out"
            )
        revision = path.revision or self._revision or constants.DEFAULT_REVISION
        key = path.repository, revision
        if key not in self._commits:
            found = self._ask(
                lambda: self._api.dataset_info(
                    path.repository, revision=revision, timeout=_TIMEOUT_S
                )
            )
            if not found.sha:
                raise HubError(0, f"the hub names no commit for the revision {revision:.100}")
            self._commits.setdefault(key, found.sha)
        return self._commits[key]

    def _ask(self, question: Callable[[], Result]) -> Result:
        _asking.set(self)
        try:
            return question()
        except EntryNotFoundError as error:
            raise FileNotFoundError("no such file in this revision") from error
        except HfHubHTTPError as error:
            status = error.response.status_code if error.response is not None else 0
            raise HubError(status, f"HTTP status {status} of {self.endpoint}") from error
        except HFValidationError as error:
            raise InvalidRequest(f"{error!s:.300}") from error
        except requests.RequestException as error:
            raise HubError(0, f"{self.endpoint}: {type(error).__name__}") from error
        finally:
            _asking.set(None)

    def check_host(self, url: str) -> None:
        """Refuse a redirect of the hub's answers to another host."""
        if not self.is_own(url):
            raise HubError(0, f"{self._host} redirects to another host")


def _file(found: Any) -> HubFile:
    if not hasattr(found, "blob_id"):
        return HubFile(found.path)
    digest = found.lfs.sha256 if found.lfs else found.blob_id
    return HubFile(found.path, int(found.size), digest)


def _is_of_the_hub(endpoint: str, url: str) -> bool:
    """Whether the public hub sends to one of its own hosts."""
    if urlsplit(endpoint).hostname != "huggingface.co":
        return False
    parts = urlsplit(url)
    return parts.scheme == "https" and (parts.hostname or "").endswith(_OWN_HOSTS)


def _token(settings: Mapping[str, Any]) -> str:
    """The daemon's token: of a file, or as the hub's library finds it."""
    file = settings.get("token_file", "")
    if not file:
        return get_token() or ""
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


_asking: contextvars.ContextVar[HubClient | None] = contextvars.ContextVar("asking", default=None)


class _PacedAdapter(HTTPAdapter):
    """Sends what the hub's library asks for, within the budget of the one who asks."""

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> Any:
        client = _asking.get()
        if client is None:
            return super().send(request, *args, **kwargs)
        client.check_host(request.url or "")
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            _wait(client.budget)
            response = super().send(request, *args, **kwargs)
            if response.status_code not in (429, 503) or attempt == _MAX_ATTEMPTS:
                break
            client.budget.hold(retry_after_s(response.headers))
            response.close()
        return response


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


def _session() -> requests.Session:
    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, _PacedAdapter())
    return session


configure_http_backend(_session)
