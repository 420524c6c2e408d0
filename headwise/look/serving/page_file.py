"""The page as one file: the bundle and the answers to what it will ask, nothing from a network."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwise.look.notable import records
from headwise.look.scene import Group, Head
from headwise.look.serving.answers import MOST_TOKENS, answer
from headwise.look.serving.bundle import STATIC, built
from headwise.look.session import Session
from headwise.messages import with_chinese

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
"""What the browser lets a file do: nothing leaves it."""

Pair = tuple[Group, Head]


def write(
    session: Session, path: Path, chosen: Sequence[str], limit: int, static: Path = STATIC
) -> tuple[int, list[dict[str, Any]]]:
    """Write the session's first input as a file of at most `limit` bytes.

    Every head is inside with its figures and thumbnails. Maps, down to single weights, are inside
    of the `chosen` heads; where none are, of all heads if they fit, else of those that lead in
    something, as many levels as fit. Returns the size and, for each map, how many of its levels
    there are.
    """
    page = template(static)
    recorded = Recorded(session, limit - len(page[0]) - len(page[1]))
    heads = recorded.record(chosen)
    data = json.dumps(recorded.content(heads), ensure_ascii=False, allow_nan=False)
    content = (page[0] + data.replace("<", "\\u003c") + page[1]).encode(errors="replace")
    path.write_bytes(content)
    return len(content), heads


def summary(inside: Sequence[dict[str, Any]], heads: int) -> str:
    """What is in a file, in a sentence.

    >>> summary([{"levels": 3, "of": 3}, {"levels": 1, "of": 3}], 48)
    'all 48 heads as thumbnails, 2 as maps that zoom, 1 of them down to single weights'
    """
    whole = sum(each["levels"] == each["of"] for each in inside)
    said = f"all {heads} heads as thumbnails, {len(inside)} as maps that zoom"
    return said if not whole else f"{said}, {whole} of them down to single weights"


def thumbnail_size(heads: int) -> int:
    """How many cells a side the page asks for, the fewer the more heads are to be seen at once."""
    return 96 if heads <= 64 else 48 if heads <= 300 else 24


class Recorded:
    """The answers that go into a file, counted."""

    def __init__(self, session: Session, room: int) -> None:
        self.session, self.room = session, room - 4096  # the state is written last
        self.answers: dict[str, dict[str, Any]] = {}
        (self.id, self.atlas), *_ = session.atlases.items()
        self.base = f"/api/inputs/{self.id}"

    def record(self, chosen: Sequence[str]) -> list[dict[str, Any]]:
        """Ask everything, what matters most first; which heads are inside, and how far."""
        read = self.atlas.input
        self.must(f"{self.base}/heads")
        for group in read.groups:
            self._record_group(group)
        if read.image is not None:
            self.must(f"{self.base}/image")
        if chosen:
            return self._record_maps([read.find(name) for name in chosen])
        everything = [(group, head) for group in read.groups for head in group.heads]
        one = sum(self._size(path) for path in self._paths(everything[0]))
        if one * len(everything) < 1.1 * self.room and self.may(
            [path for pair in everything for path in self._paths(pair)]
        ):
            return [_inside(*pair, pair[1].map.levels) for pair in everything]
        telling = [(group, head) for group in read.groups for head, _ in records(group)]
        return self._record_maps(telling)

    def _record_group(self, group: Group) -> None:
        for axis, tokens in (("rows", group.rows), ("columns", group.columns)):
            for start in range(0, len(tokens), MOST_TOKENS):
                span = f"start={start}&stop={min(len(tokens), start + MOST_TOKENS)}"
                self.must(f"{self.base}/tokens?group={group.id}&axis={axis}&{span}")
        for how in ("mean", "max"):
            for drop in (0, 1):
                size = thumbnail_size(len(group.heads))
                asked = f"group={group.id}&how={how}&size={size}&drop={drop}"
                self.must(f"{self.base}/thumbnails?{asked}")

    def _record_maps(self, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
        """The maps of some heads, level by level, so that all of them go equally deep."""
        inside = dict.fromkeys(range(len(pairs)), 0)
        for level in range(max(head.map.levels for _, head in pairs)):
            for number, (group, head) in enumerate(pairs):
                if level == inside[number] < head.map.levels:
                    inside[number] += self.may(self._level(group, head, level))
        if not all(inside.values()):
            raise ValueError(
                f"not even the first tile of each of {len(pairs)} heads fits into the file; fewer "
                "heads with --head, or a larger --limit, would"
            )
        return [_inside(*pair, inside[number]) for number, pair in enumerate(pairs)]

    def _paths(self, pair: Pair) -> list[str]:
        """What the page asks to draw all levels of a head."""
        levels = range(pair[1].map.levels)
        return [path for level in levels for path in self._level(*pair, level)]

    def _level(self, group: Group, head: Head, level: int) -> list[str]:
        """What the page asks to draw a level of a head; at the first also what stands beside it."""
        at = f"{self.base}/map/{group.id}/{head.layer}/{head.number}"
        paths = [at, f"{at}/strips?size=1024"] if level == 0 else []
        columns, rows = head.map.grid(level)
        for y in range(rows):
            # Above the diagonal a causal map is empty, and the page does not ask.
            for x in range(min(columns, y + 1) if group.causal else columns):
                paths += [f"{at}/tile/{level}/{x}/{y}?how={how}&drop=0" for how in ("mean", "max")]
        return paths

    def must(self, path: str) -> None:
        """Record an answer; ValueError where it does not fit."""
        if not self.may([path]):
            raise ValueError(
                "the figures and thumbnails alone are larger than the limit; a larger --limit "
                "would work, or a shorter text"
            )

    def may(self, paths: Sequence[str]) -> bool:
        """Record these answers, all of them or none; whether they fitted."""
        found, room = {}, self.room
        for path in paths:
            found[path] = self._kept(path)
            room -= self._size(path, found[path])
            if room < 0:
                return False
        self.answers |= found
        self.room = room
        return True

    def _size(self, path: str, kept: dict[str, Any] | None = None) -> int:
        """How many bytes an answer takes in the file."""
        return len(json.dumps({path: self._kept(path) if kept is None else kept}))

    def _kept(self, path: str) -> dict[str, Any]:
        given = answer(self.session, path)
        if given.status != 200:
            raise ValueError(given.body.decode())
        if given.media == "application/json":
            return {"json": json.loads(given.body)}
        packed = base64.b64encode(gzip.compress(given.body, 6, mtime=0)).decode()
        return {"gzip": packed, "headers": {**given.headers, "Content-Type": given.media}}

    def content(self, heads: list[dict[str, Any]]) -> dict[str, Any]:
        """All that the page finds in the file."""
        state = self.session.state()
        state["pages"] = {"heads": True, "why": False, "watch": False}
        state["inputs"] = [each for each in state["inputs"] if each["id"] == self.id]
        state["static"] = {"heads": heads}
        answers = {"/api/state": {"json": with_chinese(state)}, **self.answers}
        return {"version": state["version"], "answers": answers}


def _inside(group: Group, head: Head, levels: int) -> dict[str, Any]:
    """How much of a head's map is in a file."""
    place = {"group": group.id, "layer": head.layer, "head": head.number}
    return {**place, "levels": levels, "of": head.map.levels}


def template(static: Path) -> tuple[str, str]:
    """What stands before and after the data: the built page with its bundle written into it."""
    html, script, style = built(static)
    html = re.sub(r"<script[^>]*src=[^>]*></script>|<link[^>]*stylesheet[^>]*>", "", html)
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}" />\n'
        f"<style>{_harmless(style, 'style')}</style>\n</head>"
    )
    before, after = html.replace("</head>", head, 1).split("</body>", 1)
    data = '<script type="application/json" id="headwise-data">'
    end = f'</script>\n<script type="module">{_harmless(script, "script")}</script>\n</body>'
    return before + data, end + after


def _harmless(code: str, tag: str) -> str:
    """Code that can't end the element it stands in: \\/ is / in every string and expression."""
    return re.sub(rf"<(?=/{tag}|!--)", r"\\x3c", code, flags=re.IGNORECASE)
