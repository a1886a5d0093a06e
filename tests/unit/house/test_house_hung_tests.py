"""A hung test is a failure with stacks, under xdist too.

The project's own settings, with a deadline of a second.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = ("-n", "1", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider")
WAITS = """
import threading, time
def wait_for_ever():
    threading.Event().wait()
def test_hangs():
    threading.Thread(target=wait_for_ever, daemon=True).start()
    time.sleep(60)
"""
DEAF = """
import time
def stay():
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass
def test_hangs():
    stay()
"""


def outcome_of(tmp_path: Path, test: str) -> tuple[int, str]:
    """Run a file of tests with short deadlines; gives exit status and output."""
    (tmp_path / "test_planted.py").write_text(test)
    command = [
        sys.executable,
        "-m",
        "pytest",
        *SETTINGS,
        "--rootdir",
        str(tmp_path),
        "-o",
        "timeout=1",
    ]
    command += ["-o", "faulthandler_timeout=3", str(tmp_path)]
    result = subprocess.run(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return result.returncode, result.stdout


def test_a_test_that_waits_fails_with_the_stacks_of_all_threads(tmp_path: Path) -> None:
    status, output = outcome_of(tmp_path, WAITS)
    assert status == 1
    assert "Failed: Timeout" in output
    assert "test_planted.py:7: Failed" in output
    assert re.search(r"in wait_for_ever", output)


def test_a_test_that_no_signal_ends_fails_with_stacks_as_well(tmp_path: Path) -> None:
    status, output = outcome_of(tmp_path, DEAF)
    assert status == 1
    assert re.search(r'test_planted.py", line \d+ in stay', output)
    assert "crashed while running 'test_planted.py::test_hangs'" in output
