"""Servers of files over SFTP, FTP and WebDAV, each in a process of its own, that others wrote.

`python -m tests.contract.storage.file_servers sftp FOLDER` serves a folder and prints the port.
"""

import asyncio
import importlib.util
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

USER, PASSWORD = "gyre", "the password of the test"
_REPOSITORY = Path(__file__).parents[3]
# What each server and its driver need, as modules.
_NEEDED = {
    "sftp": ("asyncssh", "paramiko"),
    "ftp": ("pyftpdlib",),
    "webdav": ("wsgidav", "cheroot", "webdav4"),
}


@dataclass(frozen=True)
class FileServer:
    """A running server.

    Attributes:
        root: the URI of its folder.
        settings: of a dataset there.
        folder: on this machine.
        process: of the server.
    """

    root: str
    settings: Mapping[str, Any]
    folder: Path
    process: "subprocess.Popen[str]"


def why_absent(kind: str) -> str:
    """Why a server cannot run here; empty where it can."""
    missing = [name for name in _NEEDED[kind] if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} is not installed" if missing else ""


@contextmanager
def file_server(kind: str, folder: Path, port: int = 0) -> Iterator[FileServer]:
    """A server for as long as the block lasts."""
    command = [sys.executable, "-m", __name__, kind, str(folder), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_REPOSITORY) as process:
        assert process.stdout
        try:
            port = int(process.stdout.readline())
            host = f"127.0.0.1:{port}"
            login = {"username": USER, "password": PASSWORD}
            yield {
                "sftp": FileServer(
                    f"sftp://{USER}@{host}/data", {"password": PASSWORD}, folder, process
                ),
                "ftp": FileServer(f"ftp://{host}/data", login, folder, process),
                "webdav": FileServer(
                    "webdav://data",
                    {"base_url": f"http://{host}", "auth": [USER, PASSWORD]},
                    folder,
                    process,
                ),
            }[kind]
        finally:
            process.kill()


def _serve_sftp(folder: Path, port: int) -> None:
    import asyncssh

    class Login(asyncssh.SSHServer):
        def begin_auth(self, username: str) -> bool:
            return True

        def password_auth_supported(self) -> bool:
            return True

        def validate_password(self, username: str, password: str) -> bool:
            return (username, password) == (USER, PASSWORD)

    async def serve() -> None:
        server = await asyncssh.listen(
            "127.0.0.1",
            port,
            server_factory=Login,
            server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
            sftp_factory=lambda channel: asyncssh.SFTPServer(channel, chroot=bytes(folder)),
        )
        _tell(server.get_port())
        await asyncio.Event().wait()

    asyncio.run(serve())


def _serve_ftp(folder: Path, port: int) -> None:
    from pyftpdlib.authorizers import DummyAuthorizer
    from pyftpdlib.handlers import FTPHandler
    from pyftpdlib.servers import ThreadedFTPServer

    logging.disable(logging.CRITICAL)
    FTPHandler.authorizer = DummyAuthorizer()
    FTPHandler.authorizer.add_user(USER, PASSWORD, str(folder))
    server = ThreadedFTPServer(("127.0.0.1", port), FTPHandler)
    _tell(server.address[1])
    server.serve_forever(handle_exit=False)


def _serve_webdav(folder: Path, port: int) -> None:
    from cheroot.wsgi import Server
    from wsgidav.wsgidav_app import WsgiDAVApp

    app = WsgiDAVApp(
        {
            "provider_mapping": {"/": {"root": str(folder), "readonly": True}},
            "simple_dc": {"user_mapping": {"*": {USER: {"password": PASSWORD}}}},
            "logging": {"enable": False},
            "verbose": 0,
        }
    )
    server = Server(("127.0.0.1", port), app, numthreads=80)
    server.prepare()
    _tell(server.bind_addr[1])
    server.serve()


def _tell(port: int) -> None:
    print(port, flush=True)


if __name__ == "__main__":
    _, kind, folder, port = sys.argv
    serve: dict[str, Callable[[Path, int], None]] = {
        "sftp": _serve_sftp,
        "ftp": _serve_ftp,
        "webdav": _serve_webdav,
    }
    serve[kind](Path(folder), int(port))
