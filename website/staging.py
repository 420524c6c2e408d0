"""Copies the pages of a language for Sphinx, with links that lead to pages, files or 中文."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from website.contents import CAPTIONS, DOCS, ROOT, Language, SitePage, menu
from website.notebook_pages import notebook_page, read_notebook

LINK = re.compile(r"(?P<bang>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
APART = re.compile(
    r"((?:(?<=\n\n)|\A)(?: {4}.*\n?)+|`[^`]*`|<[^>]+>|!\[[^\]]*|\]\([^)]*\)|^#.*$)", re.MULTILINE
)
"""Parts of a text that are not prose: code, tags, names of pictures, links' targets, headings."""
INDEXED = re.compile(r"(?<![A-Za-zα-ω_\\])([A-Za-zα-ω])_([A-Za-z0-9]+)")
BROKEN = re.compile(r"^(?![#|>])(.*[一-鿿，。；：、！？）”])\n(?=[一-鿿（“])", re.MULTILINE)
"""A line of 中文 that goes on in the next one; a browser would show the break as a space."""
FRAME = re.compile(r'(<iframe[^>]* src=")(gallery/)')


@cache
def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def indexed(prose: str) -> str:
    """Write d_k in prose as a d with an index; in headings, which are plain text, as dₖ.

    >>> indexed("# Why √d_k\\nq_i and `d_k`, see [d_k](d_k.md)")
    '# Why √dₖ\\nq<sub>i</sub> and `d_k`, see [d<sub>k</sub>](d_k.md)'
    >>> indexed("d_k:\\n\\n    q·k / √d_k\\n")
    'd<sub>k</sub>:\\n\\n    q·k / √d_k\\n'
    """
    parts = APART.split(prose)
    for at, part in enumerate(parts):
        if part.startswith("#"):
            parts[at] = part.replace("d_k", "dₖ")
        elif at % 2 == 0:
            parts[at] = INDEXED.sub(r"\1<sub>\2</sub>", part)
    return "".join(parts)


class Stage:
    """The folder that Sphinx reads, for one language."""

    def __init__(self, folder: Path, language: Language, all_pages: Sequence[SitePage]) -> None:
        self.folder, self.language = folder, language
        # Of a file with a page in both languages, that of this one.
        ordered = sorted(all_pages, key=lambda page: page.language == language)
        self.pages = {page.file: page for page in ordered}
        self.names: list[str] = []
        self.files: set[Path] = set()  # of the repository, linked to and not pages
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def copy(self) -> None:
        """Copy all pages of the language, and the pictures."""
        for pictures in DOCS.rglob("pictures"):
            shutil.copytree(pictures, self.folder / pictures.relative_to(DOCS))
        for page in self.pages.values():
            if page.language == self.language:
                self.write(page.name, self.linked(self._text(page), page.file, page.name))

    def _text(self, page: SitePage) -> str:
        """The Markdown of a page; the pictures of a notebook are written beside it."""
        if page.file.suffix != ".ipynb":
            return _read(page.file)
        kept = self.folder / "_extra" / f"{page.name}.ipynb"
        kept.parent.mkdir(parents=True, exist_ok=True)
        notebook = read_notebook(page.file, self.language)
        kept.write_text(json.dumps(notebook, indent=1, ensure_ascii=False), encoding="utf-8")
        beside = (self.folder / page.name).parent
        return notebook_page(notebook, page.file.stem, beside, self.language)

    def write(self, name: str, text: str) -> None:
        """Write a page; `name` is its place in the site without an ending."""
        path = self.folder / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        self.names.append(name)

    def linked(self, text: str, file: Path, name: str) -> str:
        """A page's text with each relative link leading where it does in the site."""

        def prose(part: str) -> str:
            part = LINK.sub(lambda match: self._link(match, file, name), indexed(part))
            if self.language == "en":
                return part
            return FRAME.sub(r"\1../\2", BROKEN.sub(r"\1", part))

        pieces, last = [], 0
        for match in FENCED.finditer(text):
            pieces += [prose(text[last : match.start()]), match[0]]
            last = match.end()
        return "".join([*pieces, prose(text[last:])])

    def _link(self, match: re.Match[str], file: Path, name: str) -> str:
        target, _, anchor = match["target"].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        anchor = f"#{anchor}" if anchor else ""
        aimed = (file.parent / target).resolve()
        here = Path(name).parent
        if match["bang"] and not aimed.exists():  # made for this page, beside it
            return match[0]
        if match["bang"]:
            return f"![{match['text']}]({os.path.relpath(aimed.relative_to(DOCS), here)})"
        page = self.pages.get(aimed)
        # MyST knows the places of headings; those that HTML marks are links of HTML.
        marked = page is not None and bool(anchor) and f'<a id="{anchor[1:]}">' in _read(page.file)
        if page is not None and page.language == self.language and not marked:
            return f"[{match['text']}]({os.path.relpath(page.name, here)}.md{anchor})"
        if page is not None:
            place = {"en": Path(), "zh": Path("zh")}
            goal = os.path.relpath(place[page.language] / page.name, place[self.language] / here)
            return f'<a href="{goal}.html{anchor}">{match["text"]}</a>'
        if aimed.is_file():
            self.files.add(aimed)
            up = os.path.relpath(Path("_files") / aimed.relative_to(ROOT), here)
            return f'<a href="{up}">{match["text"]}</a>'
        return match["text"] if aimed.is_dir() else match[0]  # a folder of the repository

    def finish(self) -> None:
        """Add the menu to the first page, and the files that pages link to."""
        index = self.folder / "index.md"
        text = [index.read_text(encoding="utf-8")]
        chosen = menu(self.names)
        for caption, titles in CAPTIONS.items():
            if listed := chosen.get(caption):
                title = titles[self.language == "zh"]
                inside = "\n".join([f":caption: {title}", ":hidden:", "", *listed])
                text.append(f"```{{toctree}}\n{inside}\n```\n")
        index.write_text("\n".join(text), encoding="utf-8")
        for file in self.files:
            kept = self.folder / "_extra" / "_files" / file.relative_to(ROOT)
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, kept)
        (self.folder / "_extra").mkdir(exist_ok=True)
