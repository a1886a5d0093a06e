"""What MkDocs is told of the site.

Its home is README.md, folders have a list of their pages, other files are only named.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"adr": "Decisions", "benchmarks": "Measurements"}
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """The navigation names every page of a folder that it has."""
    for group in config.nav:
        for entries in group.values():
            for entry in entries if isinstance(entries, list) else []:
                for folder, title in FOLDERS.items():
                    if title in entry:
                        pages = [f"{folder}/{page.name}" for page in _pages(folder)]
                        entry[title] = [f"{folder}/index.md", *pages]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Pages that are made here."""
    home = (ROOT / "README.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=home))
    for folder, title in FOLDERS.items():
        files.append(File.generated(config, f"{folder}/index.md", content=_listing(folder, title)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links stay within the site."""
    folder = PurePosixPath(page.file.src_uri).parent
    return _LINK.sub(lambda found: _link(found, folder), markdown)


def _listing(folder: str, title: str) -> str:
    lines = [
        f"* [{page.read_text().split(chr(10), 1)[0].lstrip('# ')}]({page.name})"
        for page in _pages(folder)
    ]
    return f"# {title}\n\n" + "\n".join(lines) + "\n"


def _pages(folder: str) -> list[Path]:
    return sorted((ROOT / "docs" / folder).glob("*.md"))


def _link(found: re.Match[str], folder: PurePosixPath) -> str:
    """A link to a folder goes to its list; one to a file beside docs/ becomes that file's name."""
    text, target = found[1], found[2]
    if "://" in target or target.startswith("mailto:"):
        return found[0]
    place = normpath(str(folder / target))
    if place in FOLDERS:
        return f"[{text}]({target.rstrip('/')}/index.md)"
    is_outside = place.startswith("../") or not (ROOT / "docs" / place).exists()
    return _named(text, place) if is_outside else found[0]


def _named(text: str, place: str) -> str:
    name = place.removeprefix("../")
    return text if name in text or "`" in text else f"{text}: `{name}`"
