"""What a script or a command line gets wrong: one sentence, the right class or status."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gyre_client.command.cli
import gyre_daemon.cli
import gyre_trainer.cli
import pytest
from gyre_client import Loader

from tests.bad_inputs.node import BATCH_SIZE, Node
from tests.bad_inputs.row import SECRET, Row, cases
from tests.bad_inputs.table import commands, python_calls
from tests.integration.trainer.test_train_refusals import CONFIG

PROGRAMS: dict[str, Callable[[list[str]], Any]] = {
    "gyre": gyre_client.command.cli.main,
    "gyred": gyre_daemon.cli.main,
    "gyre-train": gyre_trainer.cli.main,
}


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in [key for key in os.environ if key.startswith("GYRE_") or key == "RANK"]:
        monkeypatch.delenv(key)


@pytest.mark.parametrize("row", cases(python_calls.ROWS))
def test_a_bad_call_is_refused(row: Row, node: Node) -> None:
    keywords = {"dataset": "tokens", "batch_size": BATCH_SIZE, "address": node.address, **row.sent}
    with pytest.raises(Exception) as caught:  # noqa: PT011  # its class is the row's
        next(Loader(**keywords))
    told = f"{type(caught.value).__name__}: {caught.value}"
    assert type(caught.value).__name__ == row.reason, told
    assert re.search(row.text, told), told


@pytest.mark.parametrize("row", cases(python_calls.STATE_ROWS))
def test_a_bad_state_is_refused_and_changes_nothing(row: Row, node: Node) -> None:
    with Loader("tokens", batch_size=BATCH_SIZE, address=node.address) as loader:
        before = loader.state_dict()
        with pytest.raises(Exception) as caught:  # noqa: PT011
            loader.load_state_dict(row.sent)
        assert type(caught.value).__name__ == row.reason
        assert loader.state_dict() == before
        next(loader)


@pytest.mark.parametrize("row", cases(commands.ROWS))
def test_a_bad_command_line_is_refused(
    row: Row, node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, arguments = row.sent
    config = tmp_path / "train.toml"
    config.write_text(CONFIG.format(out=tmp_path / "run"))
    named = {"address": node.address, "folder": str(tmp_path), "config": str(config)}
    for name, value in named.items():
        arguments = [each.replace(f"{{{name}}}", value) for each in arguments]
    try:
        status = PROGRAMS[program](arguments)
    except SystemExit as end:
        status = end.code
    told = capsys.readouterr()
    assert str(status) == row.status, told.err
    assert re.search(row.text, told.err), told.err
    assert told.out == ""
    assert "Traceback" not in told.err
    assert SECRET not in told.err
    assert all(each.isprintable() or each == "\n" for each in told.err)
    assert not (tmp_path / "run").exists()
