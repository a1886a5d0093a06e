"""A configuration that cannot be used is refused with status 2 and one sentence."""

import os
import re
from pathlib import Path

import pytest
from gyre_daemon.cli import main

from tests.bad_inputs.row import SECRET, Row, cases
from tests.bad_inputs.table import configuration


@pytest.mark.parametrize("row", cases(configuration.ROWS))
def test_a_bad_configuration_is_refused(
    row: Row, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, environment, flags = row.sent
    path = tmp_path / "gyre.toml"
    path.write_text(text.replace("{folder}", str(tmp_path)).replace("{{", "{").replace("}}", "}"))
    for key in [key for key in os.environ if key.startswith("GYRE_")]:
        monkeypatch.delenv(key)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(SystemExit) as caught:
        main(["check-config", "--config", str(path), *flags])
    told = capsys.readouterr().err
    assert str(caught.value.code) == row.status, told
    assert re.search(row.text, told), told
    assert told.startswith("gyred: ")
    assert told.count("\n") == 1, told
    assert SECRET not in told
    assert "Traceback" not in told
