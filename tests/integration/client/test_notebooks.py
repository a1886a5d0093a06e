"""A loader in a notebook: its fields, where it stands, and samples as pictures and text."""

import io
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from gyre_client import Loader
from PIL import Image

from tests.conftest import StartDaemon


class Elements(HTMLParser):
    """The names of all elements, the sources of pictures, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.sources: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.sources += [value or "" for name, value in attrs if name == "src"]

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


@pytest.fixture
def address(gyred: StartDaemon, tmp_path: Path) -> str:
    folder = tmp_path / "photos"
    for number in range(12):
        path = folder / f"<b>class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        stored = io.BytesIO()
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(stored, "PNG")
        path.write_bytes(stored.getvalue())
    (tmp_path / "lines.txt").write_text("one <script>x</script>\ntwo\nthree\nfour\n")
    decode = [{"name": "decode_random_resized_crop", "field": "file", "size": 8}]
    return gyred(
        {
            "datasets": {
                "photos": {"uri": str(folder), "transforms": decode},
                "lines": {"uri": str(tmp_path / "lines.txt")},
            }
        }
    ).address


def test_a_loader_shows_pictures_and_its_place_and_does_not_move(address: str) -> None:
    with Loader("photos", batch_size=4, address=address) as loader:
        next(loader)
        state = loader.state_dict()
        shown = Elements(loader._repr_html_())
        assert loader.state_dict() == state
        assert [each.partition(",")[0] for each in shown.sources] == ["data:image/png;base64"] * 3
        assert "step 1, in epoch 0; 3 steps an epoch" in shown.text
        assert "[8, 8, 3]" in shown.text, "fields are those of batches"
        assert repr(loader) == "<Loader photos: 12 samples, 4 a batch, 1 batch read>"
    assert "step 1" in loader._repr_html_(), "a closed loader shows its facts"


def test_text_is_escaped(address: str) -> None:
    with Loader("lines", batch_size=2, address=address) as loader:
        shown = Elements(loader._repr_html_())
    assert "script" not in shown.names
    assert "one <script>x</script>" in shown.text
