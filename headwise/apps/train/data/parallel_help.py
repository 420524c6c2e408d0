"""LibreOffice's help in two languages, joined by paragraph ids."""

import html
import re
import tarfile
from pathlib import Path

from headwise.apps.train.data.packages import debian_contents

PAGE = re.compile(r"\./usr/share/libreoffice/help/[^/]+/text/(?P<page>.+\.html)")
PARAGRAPH = re.compile(r'<(\w+) id="((?:par|hd)_[^"]*)"[^>]*>(.*?)</\1>', re.DOTALL)
TAG = re.compile(r"<[^>]*>")


def paragraphs(page: str) -> dict[str, str]:
    """The paragraphs of a help page by id.

    >>> paragraphs('<p id="par_1">Jumps to the <b>last</b> entry.</p><p>no id</p>')
    {'par_1': 'Jumps to the last entry.'}
    """
    # Not html.parser: it changes between releases of Python, and the result is checked by its
    # hash. These pages are generated and regular.
    found: dict[str, str] = {}
    for _, name, body in PARAGRAPH.findall(page):
        found.setdefault(name, " ".join(html.unescape(TAG.sub("", body)).split()))
    return found


def pages(archive: Path) -> dict[str, dict[str, str]]:
    """The paragraphs, by id, of every help page of a Debian package."""
    found = {}
    with debian_contents(archive) as tape:
        for member in tape:
            match = PAGE.fullmatch(member.name)
            if match and member.isfile():
                found[match["page"]] = paragraphs(read(tape, member))
    return found


def read(tape: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    """The text of a member of a tar file."""
    file = tape.extractfile(member)
    assert file is not None
    return file.read().decode("utf-8")


def join(english: Path, other: Path) -> bytes:
    """Lines `english TAB other`, each pair once, in the order of pages and ids.

    Paragraphs that are equal in both languages were never translated and are left out.
    """
    theirs = pages(other)
    seen: dict[tuple[str, str], None] = {}
    for page, ours in sorted(pages(english).items()):
        for name, text in sorted(ours.items()):
            translation = theirs.get(page, {}).get(name, "")
            if text and translation and text != translation:
                seen[text, translation] = None
    return "".join(f"{a}\t{b}\n" for a, b in seen).encode("utf-8")
