"""The fenced blocks of the project's pages."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in a language."""
    text = (ROOT / page).read_text()
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for its_language, block in found if its_language == language]
