"""The pages of the site: which files of the repository they come from, and their order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
Language = Literal["en", "zh"]

PROJECT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Files beside docs/ that have a page, in English."""

ORDER: dict[str, list[str]] = {
    "guide": [
        "look", "gallery", "watch", "watch-kinds", "watch-models", "effects", "spans", "sparse",
        "compute", "distributed", "cost", "cost-time", "training", "lab", "notebooks",
    ],
    "handbook": ["from-formula-to-transformer", "handbook/index"] + [
        f"handbook/{chapter}"
        for chapter in (
            "formula", "scale", "atlas", "heads", "pruning", "explanation", "positions", "masks",
            "qk", "dot", "rivals", "memory", "cost", "translation", "settings",
        )
    ],
    "evidence": [
        "speed", "gpu", "numerics", "watch-families", "cost-families", "testing", "versions",
    ],
    "inside": ["architecture", "glossary"],
}  # fmt: skip
"""Where the pages that are known stand. A new file in docs/ appears at the end of the guide."""

CAPTIONS: dict[str, tuple[str, str]] = {
    "guide": ("Guide", "指南"),
    "handbook": ("Handbook", "手册"),
    "evidence": ("Evidence", "实测"),
    "results": ("Results", "结果"),
    "notebooks": ("Notebooks", "笔记本"),
    "api": ("Reference", "参考"),
    "inside": ("Inside", "内部"),
    "project": ("Project", "项目"),
}
"""The headings of the menu, in English and 中文."""


@dataclass(frozen=True)
class SitePage:
    """A page: its language, its name in the site, such as lab/scale, and its file."""

    language: Language
    name: str
    file: Path


def pages(root: Path = ROOT) -> list[SitePage]:
    """The pages that come from a file: docs/**/*.md and .ipynb, 中文 in *.zh.md or docs/zh/.

    A notebook has its text in both languages, and so a page in each.
    """
    docs = root / "docs"
    found = []
    for file in sorted(docs.rglob("*.md")):
        path = file.relative_to(docs)
        chinese = path.name.endswith(".zh.md") or path.parts[0] == "zh"
        inner = path.relative_to("zh") if path.parts[0] == "zh" else path
        name = str(inner.with_name(inner.name.removesuffix(".md").removesuffix(".zh")))
        found.append(SitePage("zh" if chinese else "en", name, file))
    for file in sorted(docs.rglob("*.ipynb")):
        name = str(file.relative_to(docs).with_suffix(""))
        found += [SitePage("en", name, file), SitePage("zh", name, file)]
    for title in PROJECT:
        name = f"project/{title.removesuffix('.md').lower()}"
        found.append(SitePage("en", name, root / title))
    return found


def menu(names: list[str]) -> dict[str, list[str]]:
    """The names of a language's pages under the captions of its menu; none is left out.

    >>> menu(["cost", "index", "lab", "lab/scale", "new", "speed", "api/mask"])["guide"]
    ['cost', 'lab', 'lab/scale', 'new']
    """
    left = [name for name in names if name != "index"]
    found: dict[str, list[str]] = {caption: [] for caption in CAPTIONS}
    for caption, known in ORDER.items():
        found[caption] = [name for name in known if name in left]
    for name in left:
        folder = name.split("/")[0] if "/" in name else ""
        if any(name in some for some in found.values()):
            continue
        caption = folder if folder in CAPTIONS else "guide"
        place = found[caption]
        if folder in place:  # the pages of a folder stand behind the page of its name
            after = max(n for n, x in enumerate(place) if x.split("/")[0] == folder)
            place.insert(after + 1, name)
        else:
            place.append(name)
    return {caption: some for caption, some in found.items() if some}
