"""Follows every link of the built site: each must lead to a file, and to a place in it."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Links(HTMLParser):
    """The links of a page, and the places that it can be entered at."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.places: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.append(value)
            elif name == "id" and value:
                self.places.add(value)


def read(page: Path) -> _Links:
    """The links of a page."""
    links = _Links()
    links.feed(page.read_text(encoding="utf-8"))
    return links


def broken(site: Path) -> list[str]:
    """The links that lead nowhere inside the site, each with its page."""
    pages = {
        page.resolve(): read(page)
        for page in site.rglob("*.html")
        if "gallery" not in page.relative_to(site).parts[:-1]  # exported pages of headwise look
    }
    wrong = []
    for page, links in pages.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or target.startswith("data:"):
                continue
            aimed = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            aimed = aimed / "index.html" if aimed.is_dir() else aimed
            place = unquote(parts.fragment)
            known = pages.get(aimed)
            if not aimed.exists() or (place and known and place not in known.places):
                wrong.append(f"{page.relative_to(site.resolve())}: {target}")
    return wrong
