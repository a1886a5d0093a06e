"""`gyre describe`: lengths, samples, and a page that holds all that it shows and runs nothing."""

import base64
import io
import json
import tarfile
import wave
from html.parser import HTMLParser
from pathlib import Path

import pytest
from gyre_client.command.cli import main
from PIL import Image

HOSTILE = "<script>alert(1)</script>\x1b[2J\"'><img src=x onerror=alert(1)>"
VOID = {"meta", "img", "br"}


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


class Page(HTMLParser):
    """Checks that elements end in the order of their beginning, and keeps what it finds."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.sources: dict[str, list[bytes]] = {}
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attributes:
            assert not name.startswith("on")
            if name in ("src", "href"):
                kind, _, data = (value or "").partition(";base64,")
                self.sources.setdefault(kind, []).append(base64.b64decode(data, validate=True))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_shows_what_the_dataset_holds_and_runs_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "page.html"
    assert main(["describe", str(folder), "--num", "4", "--html", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    lengths = {each["field"]: each for each in found["lengths"]}
    assert set(lengths) == {"png", "wav", "txt"}
    assert sum(lengths["txt"]["counts"]) == 20
    assert (lengths["txt"]["least"], lengths["txt"]["greatest"]) == (
        len(HOSTILE),
        20 * len(HOSTILE),
    )
    assert [each["fields"]["wav"] for each in found["samples"]] == ["audio/wav, 1.6 KiB"] * 4
    text = path.read_text("utf-8")
    assert "default-src 'none'" in text
    page = Page(text)
    assert "script" not in page.tags
    assert page.tags.count("svg") == 3
    ids = [each["sample_id"] for each in found["samples"]]
    assert page.sources == {
        "data:image/png": [image(number) for number in ids],
        "data:audio/wav": [sound()] * 4,
    }
    assert HOSTILE.replace("\x1b", "\\x1b") in page.text
    assert all(character.isprintable() or character == "\n" for character in text)


def test_the_text_has_histograms_and_samples(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["describe", str(folder), "--num", "2"]) == 0
    text = capsys.readouterr().out
    assert "lengths of png" in text
    assert "\u2588" in text
    assert text.count("image/png, ") == 2
    assert "\x1b" not in text, "no pictures where the output is no terminal"
    missing = tmp_path / "no-folder/page.html"
    assert main(["describe", str(folder), "--num", "0", "--html", str(missing)]) == 2
    assert "cannot be written: No such file" in capsys.readouterr().err
