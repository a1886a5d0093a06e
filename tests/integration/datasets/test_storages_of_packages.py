"""Storages that fsspec's drivers read, from a loader to its batches through a private daemon."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gyre_client import Loader
from gyre_client.errors import GyreError, InvalidRequest, NotAllowed
from gyre_client.transport.target import acquire_private, release_private

from tests.contract.storage.file_servers import PASSWORD, file_server, why_absent

NUM_SAMPLES = 500
OPTIONS = {"dtype": "uint16", "sequence_length": 8}
CODE = '''
"""A synchronous driver of the files below a folder."""

import os

from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem


class Files(DirFileSystem):
    protocol = "my_files+2"
    cachable = False  # codespell:ignore cachable
    async_impl = False

    def __init__(self, **arguments):
        super().__init__(os.environ["MY_FILES"], LocalFileSystem(), **arguments)
'''


def write_tokens(folder: Path) -> np.ndarray:
    folder.mkdir(parents=True)
    tokens = np.arange(NUM_SAMPLES * 8, dtype=np.uint16).reshape(-1, 8)
    tokens[: NUM_SAMPLES // 2].tofile(folder / "a.bin")
    tokens[NUM_SAMPLES // 2 :].tofile(folder / "b.bin")
    return tokens


def check(loader: Loader, tokens: np.ndarray) -> None:
    with loader:
        batches = [batch["tokens"].numpy() for batch in loader]
    found = np.concatenate(batches)
    assert (found[np.argsort(found[:, 0])] == tokens[tokens[:, 0].argsort()]).all()


def test_the_driver_of_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    package = site / "my_files-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: my-files\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[fsspec.specs]\nmy_files+2 = my_files:Files\n")
    (site / "my_files.py").write_text(CODE)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("MY_FILES", str(tmp_path / "files"))
    tokens = write_tokens(tmp_path / "files/tokens")
    acquire_private()  # one for all three
    uri = "my_files+2://tokens"
    check(Loader(uri, format="tokens", options=OPTIONS, batch_size=50, epochs=1), tokens)
    for unseen, reason in (
        ("memory://tokens", "memory of one process.*Write the files to a folder"),
        ("other_files://tokens", "needs an entry point in the group `fsspec.specs`"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            Loader(unseen, format="tokens", options=OPTIONS, batch_size=50)
    release_private()


@pytest.mark.skipif(bool(why_absent("ftp")), reason=why_absent("ftp"))
def test_a_password_is_shown_nowhere(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "data")
    with file_server("ftp", tmp_path) as server:
        host = server.root.partition("://")[2]
        options = {**OPTIONS, "storage": dict(server.settings)}
        loader = Loader(server.root, format="tokens", options=options, batch_size=50, epochs=1)
        daemon = acquire_private()
        told = [subprocess.run(
            [sys.executable, "-m", "gyre_client", "status", "--json", "--address",
             f"unix:{daemon.log_path.parent}/gyre.sock"],
            capture_output=True, check=True, text=True, timeout=120,
        ).stdout]  # fmt: skip
        assert host.partition("/")[0] in told[0]
        check(loader, tokens)
        for uri, wrong, error in (
            (server.root, {"username": "gyre", "password": "hunter2"}, NotAllowed),
            (f"ftp://gyre:hunter2@{host}", {}, InvalidRequest),
            (f"simplecache::ftp://gyre:hunter2@{host}", {}, InvalidRequest),
        ):
            options = {**OPTIONS, "storage": wrong}
            with pytest.raises(error) as caught:
                Loader(uri, format="tokens", options=options, batch_size=50)
            assert isinstance(caught.value, GyreError)
            told.append(str(caught.value))
        told.append(daemon.log_path.read_text())
        release_private()
    for secret in (PASSWORD, "hunter2"):
        assert not [text for text in told if secret in text]
