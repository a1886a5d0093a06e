"""A name that is also a path: the dataset of that name wins, and otherwise the path is read."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from gyre_client import Loader
from gyre_client.command.cli import main
from gyre_client.errors import InvalidRequest, UnknownDataset

from tests.conftest import StartDaemon

TOKENS = {"format": "tokens", "dtype": "uint16", "sequence_length": 8}


@pytest.fixture
def address(gyred: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A daemon with the dataset `photos/train`, and folders of that and of another name."""
    for name in ("photos/train", "photos/test"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.txt").write_text("one\ntwo\n")
    np.arange(80, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("GYRE_ADDRESS", raising=False)
    uri = str(tmp_path / "tokens.bin")
    return gyred({"datasets": {"photos/train": {"uri": uri, **TOKENS}}}).address


def test_a_dataset_of_that_name_wins_and_the_log_says_which_it_is(
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.INFO, "gyre_client")
    with Loader("photos/train", batch_size=2) as loader:
        assert loader.format == "text"
    assert sum("photos/train is the data at" in line for line in caplog.messages) == 1
    with pytest.raises(InvalidRequest, match="no folder of that name"):
        Loader("photos/other", batch_size=2)
    with pytest.raises(UnknownDataset):
        Loader("photos/test", batch_size=2, address=address)
    monkeypatch.setenv("GYRE_ADDRESS", address)
    with Loader("photos/train", batch_size=2) as loader:
        assert loader.format == "tokens"
    assert f"photos/train is the dataset of that name at {address}" in caplog.text
    with Loader("photos/test", batch_size=2) as loader:
        assert loader.format == "text"
    assert f"{address} has no dataset of that name" in caplog.text
    capsys.readouterr()
    assert main(["describe", "photos/test", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "text"
