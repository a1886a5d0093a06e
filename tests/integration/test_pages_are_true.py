"""What the pages show: commands print what stands there, and the first examples run as they are."""

import os
import re
import shlex
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from gyre_trainer.cli import main

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 150


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.timeout(600)  # it computes for fifteen seconds, where nobody else does
def test_the_plan_of_the_training_page_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = (each for each in blocks("docs/training.md", "") if each.startswith("$ gyre-train plan"))
    command, _, shown = block.partition("\n")
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command.removeprefix("$ gyre-train "))) == 0
    assert capsys.readouterr().out == shown


def write_tokens(folder: Path) -> None:
    folder.mkdir(parents=True)
    np.arange(1025 * 600, dtype=np.uint16).tofile(folder / "train.bin")


def write_tars(folder: Path) -> None:
    folder.mkdir(parents=True)
    with tarfile.open(folder / "images-000.tar", "w") as archive:
        for n in range(300):
            for extension, data in (("jpg", b"\xff\xd8" + bytes([n % 256])), ("cls", str(n % 10).encode())):
                member = tarfile.TarInfo(f"{n:04}.{extension}")
                member.size = len(data)
                archive.addfile(member, BytesIO(data))


@pytest.mark.parametrize(("word", "write"), [("tokens", write_tokens), ("webdataset", write_tars)])
def test_a_quick_start_of_the_front_page_runs_as_it_is(word: str, write: object, tmp_path: Path) -> None:
    """But for its path, which is another here, and its loop, which ends after some batches."""
    (code,) = (each for each in blocks("README.md", "python") if f'format="{word}"' in each)
    assert len(code.splitlines()) <= 10
    (path,) = re.findall(r'Loader\("(/data/\w+)', code)
    write(tmp_path / "data")  # type: ignore[operator]
    code = code.replace(path, str(tmp_path / "data"))
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    run = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(run, capture_output=True, text=True, timeout=SECONDS, check=False, env=environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout
