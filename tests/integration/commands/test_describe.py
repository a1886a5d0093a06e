"""`gyre describe`: lengths and samples, as text and as JSON."""

import io
import json
import tarfile
import wave
from pathlib import Path

import pytest
from gyre_client.command.cli import main
from PIL import Image

HOSTILE = "<script>alert(1)</script>\x1b[2J\"'><img src=x onerror=alert(1)>"


def image(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (20 + number, 15), (number * 9, 80, 20)).save(file, "PNG")
    return file.getvalue()


def sound() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(8000)
        writer.writeframes(bytes(1600))
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("described")
    with tarfile.open(folder / "a.tar", "w") as archive:
        for number in range(20):
            members = {
                "png": image(number),
                "wav": sound(),
                "txt": (HOSTILE * (number + 1)).encode(),
                "cls": b"%d" % number,
            }
            for extension, data in members.items():
                member = tarfile.TarInfo(f"{number:04}.{extension}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return folder


def test_json_has_lengths_and_samples(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", str(folder), "--num", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    lengths = {each["field"]: each for each in found["lengths"]}
    assert set(lengths) == {"png", "wav", "txt"}
    assert sum(lengths["txt"]["counts"]) == 20
    assert (lengths["txt"]["least"], lengths["txt"]["greatest"]) == (
        len(HOSTILE),
        20 * len(HOSTILE),
    )
    assert [each["fields"]["wav"] for each in found["samples"]] == ["audio/wav, 1.6 KiB"] * 4


def test_the_text_has_histograms_and_samples(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["describe", str(folder), "--num", "2"]) == 0
    text = capsys.readouterr().out
    assert "lengths of png" in text
    assert "\u2588" in text
    assert text.count("image/png, ") == 2
    assert "\x1b" not in text, "no pictures where the output is no terminal"
