"""Tracebacks of Gyre's errors begin with the caller's frames, and nothing of them is global."""

import subprocess
import sys
import traceback
from pathlib import Path

import gyre_client
import pytest
from gyre_client import GyreError, Loader
from gyre_client.errors import NotInstalled


def frames_of(path: Path, **arguments: object) -> list[str]:
    """The files of the frames of a Loader's error, and its causes, as text."""
    with pytest.raises(GyreError) as caught:
        Loader("nothing", batch_size=2, address=f"unix:{path}", **arguments)  # type: ignore[arg-type]
    return [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_a_traceback_has_the_callers_frames_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GYRE_TRACEBACK", raising=False)
    hook = sys.excepthook
    assert set(frames_of(tmp_path / "no.sock", reattach_timeout_s=0.1)) == {__file__}
    assert set(frames_of(tmp_path / "no.sock", seed="x")) == {__file__}
    monkeypatch.setenv("GYRE_TRACEBACK", "1")
    assert any("gyre_client" in each for each in frames_of(tmp_path / "no.sock", seed="x"))
    assert sys.excepthook is hook


def test_the_message_is_the_last_line_of_a_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from gyre_client import Loader\n\n\n"
        "def build():\n    return Loader('d', batch_size=0, address='unix:/none')\n\n\nbuild()\n"
    )
    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=False
    )
    lines = result.stderr.splitlines()
    assert [line for line in lines if "File " in line] == [
        f'  File "{script}", line 8, in <module>',
        f'  File "{script}", line 5, in build',
    ]
    assert lines[-1].startswith("gyre_client.errors.InvalidRequest: batch_size")


def test_another_system_is_named_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(
        NotInstalled, match=r"^gyre_client\.Loader runs on Linux only \(got darwin\)"
    ):
        gyre_client.__getattr__("Loader")
