"""Links between the pages lead to pages and headings that are there."""

import re
import unicodedata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Those of a page's headings, as MkDocs makes them."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    return {_anchor(heading) for heading in re.findall(r"^#{1,6} +(.*)$", text, re.MULTILINE)}


def _anchor(heading: str) -> str:
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    plain = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def test_every_link_leads_somewhere() -> None:
    made = {page: anchors(page) for page in PAGES}
    checked, astray = 0, []
    for page in PAGES:
        for target, anchor in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
            if "://" in target or target.startswith("mailto:"):
                continue
            place = (page.parent / target).resolve() if target else page
            is_there = place.exists() and (not anchor or anchor in made.get(place, {anchor}))
            checked += 1
            if not is_there:
                astray.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert checked > 500
    assert astray == []
