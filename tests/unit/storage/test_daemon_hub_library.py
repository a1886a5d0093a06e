"""Errors about the hub's library tell an absent, an old and a changed one apart."""

import importlib.metadata
from pathlib import Path

import huggingface_hub
import pytest
from gyre_daemon.errors import ConfigError
from gyre_daemon.storage.sources.hub import library


def install(folder: Path, version: str) -> None:
    (folder / f"huggingface_hub-{version}.dist-info").mkdir()
    text = f"Metadata-Version: 2.1\nName: huggingface_hub\nVersion: {version}\n"
    (folder / f"huggingface_hub-{version}.dist-info" / "METADATA").write_text(text)


def test_the_installed_one_fits() -> None:
    assert library() is huggingface_hub


@pytest.mark.parametrize("version", ["0.29.3", "0.9.0rc1"])
def test_an_old_one_names_its_version_and_the_oldest_that_fits(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, version)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf"too old .*got {version}, needs 0\.30 or later"):
        library()


def test_one_that_lacks_a_function_is_called_too_new(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version("huggingface_hub")
    monkeypatch.delattr(huggingface_hub.HfApi, "dataset_info")
    with pytest.raises(ConfigError, match=rf"{installed} is too new .*dataset_info"):
        library()


def test_an_absent_one_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(ConfigError, match=r'not installed. Run pip install "gyre-ml\[hub\]"'):
        library()
