"""The page as one file: the built page and the answers to what it will ask, without a network."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from headwise.apps.look.scene import Group, Head
from headwise.apps.look.serving.answers import answer
from headwise.apps.look.serving.input_answers import MOST_TOKENS
from headwise.apps.look.session import Session
from headwise.files import write_whole
from headwise.messages import with_chinese

STATIC = Path(__file__).parent.parent / "static"
"""The built page: index.html, one script and one style sheet, none of them in the repository."""

MISSING = """The page is not built: {folder} lacks {name}.

Installing headwise from its source builds it: pip install -e . in the repository.
"""

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
"""The browser lets nothing leave the file."""

Pair = tuple[Group, Head]

MOST_EXPLAINED = 32
"""Tokens of a text of which each prediction is explained; of a longer one, the last."""

EXPLAINED = 6
"""Edges of a prediction that are inside with the maps of their heads by support and with the
prediction without them, and heads with the prediction without them."""


def write(
    session: Session, path: Path, chosen: Sequence[str], limit: int, static: Path = STATIC
) -> tuple[int, list[dict[str, Any]]]:
    """Write the session's first input as a file of at most `limit` bytes.

    Every head is inside with its figures and thumbnails, and the `chosen` heads with their maps. If
    none are chosen, all heads that fit have a map: first an overview of each, then further levels
    down to single weights, those of the leading heads first. Returns the size and, for each map,
    the number of its levels that are inside.
    """
    page = template(static)
    recorded = Recorded(session, limit - len(page[0]) - len(page[1]))
    heads = recorded.record(chosen)
    recorded.record_more_reasons()
    data = json.dumps(recorded.content(heads), ensure_ascii=False, allow_nan=False)
    content = (page[0] + data.replace("<", "\\u003c") + page[1]).encode(errors="replace")
    write_whole(path.resolve(), content)  # a page that is there stays until this one is complete
    return len(content), heads


def summary(inside: Sequence[dict[str, Any]], heads: int) -> str:
    """The content of a file, in a sentence.

    >>> summary([{"levels": 3, "of": 3}, {"levels": 1, "of": 3}], 48)
    'all 48 heads as thumbnails, 2 as maps that zoom, 1 of them down to single weights'
    """
    whole = sum(each["levels"] == each["of"] for each in inside)
    said = f"all {heads} heads as thumbnails, {len(inside)} as maps that zoom"
    return said if not whole else f"{said}, {whole} of them down to single weights"


def thumbnail_size(heads: int) -> int:
    """Cells per side of the thumbnails that the page asks for: fewer if it shows more heads."""
    return 96 if heads <= 64 else 48 if heads <= 300 else 24


class Recorded:
    """The answers that go into a file, and the room that is left for them."""

    def __init__(self, session: Session, room: int) -> None:
        self.session, self.room = session, room - 4096  # the state is written last
        self.answers: dict[str, dict[str, Any]] = {}
        self.reasons: list[int] = []  # rows whose predictions are explained
        self.effects: list[dict[str, Any]] = []  # maps coloured by the effect on one of them
        (self.id, self.atlas), *_ = session.atlases.items()
        self.base = f"/api/inputs/{self.id}"

    def record(self, chosen: Sequence[str]) -> list[dict[str, Any]]:
        """Ask for everything, the most important first; returns the maps that are inside."""
        read = self.atlas.input
        self.must(f"{self.base}/heads")
        for group in read.groups:
            self._record_group(group)
        for number in range(len(read.images)):
            self.must(f"{self.base}/image/{number}")
        self._record_reasons([len(read.main.rows) - 1])
        if chosen:
            return self._record_maps([read.find(name) for name in chosen])
        leading = [(group, head) for group in read.groups for head, _ in group.leaders()]
        heads = [(group, head) for group in read.groups for head in group.heads]
        return self._record_maps(leading, [pair for pair in heads if pair not in leading])

    def record_more_reasons(self) -> None:
        """The other predictions of a short text, and maps by effect, as far as they fit."""
        rows = len(self.atlas.input.main.rows)
        if rows <= MOST_EXPLAINED:
            self._record_reasons(range(rows - 2, -1, -1))
        for row in self.reasons:
            asked = f"{self.base}/reasons/{row}"
            for edge in self.answers[asked]["json"]["edges"][:EXPLAINED]:
                if self.may([f"{asked}/{_place(edge)}/tile/0/0/0"]):
                    head = {name: edge[name] for name in ("group", "layer", "head")}
                    self.effects.append({"row": row, **head})

    def _record_reasons(self, rows: Iterable[int]) -> None:
        read = self.atlas.input
        if read.predictor is None or read.main.id not in read.predictor.groups:
            return
        for row in rows:
            asked = f"{self.base}/reasons/{row}"
            if not self.may([asked]):
                return
            self.reasons.append(row)
            told = self.answers[asked]["json"]
            for edge in told["edges"][:EXPLAINED]:
                self.may([f"{asked}/{_place(edge)}"])
            for each in told["edges"][:EXPLAINED] + told["heads"][:EXPLAINED]:
                name = f"{each['group']}:{each['layer']}.{each['head']}"
                at = f":{each['query']}:{each['key']}" if "key" in each else ""
                self.may([f"{asked}/without?edges={name}{at}"])

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

    def _record_maps(
        self, first: Sequence[Pair], rest: Sequence[Pair] = ()
    ) -> list[dict[str, Any]]:
        """The maps of the first heads, which must open, and as much as fits of the rest."""
        levels = dict.fromkeys([*first, *rest], 0)
        self._deepen(first, levels, 1)
        if not all(levels[pair] for pair in first):
            raise ValueError(
                f"not even the first tile of each of {len(first)} heads fits into the file; name "
                "fewer heads with --head, or use a larger --limit"
            )
        self._deepen(rest, levels, 1)
        for pairs in (first, rest):
            self._deepen(pairs, levels, max(head.map.levels for _, head in levels))
        return [_inside(*pair, count) for pair, count in levels.items() if count]

    def _deepen(self, pairs: Sequence[Pair], levels: dict[Pair, int], most: int) -> None:
        """Record further levels of some maps, so that all go equally deep, until one is too large.

        Maps of one level are about equally large: after the first that does not fit, none is tried.
        """
        for level in range(most):
            for group, head in pairs:
                if level == levels[group, head] < head.map.levels:
                    if not self.may(self._level(group, head, level)):
                        return
                    levels[group, head] += 1

    def _level(self, group: Group, head: Head, level: int) -> list[str]:
        """The requests that draw a level of a head; the first also needs its size and strips."""
        at = f"{self.base}/map/{group.id}/{head.layer}/{head.number}"
        paths = [at, f"{at}/strips?size=1024"] if level == 0 else []
        columns, rows = head.map.grid(level)
        for y in range(rows):
            # Above the diagonal a causal map is empty, and the page asks for no tile.
            for x in range(min(columns, y + 1) if group.causal else columns):
                paths += [f"{at}/tile/{level}/{x}/{y}?how={how}&drop=0" for how in ("mean", "max")]
        return paths

    def must(self, path: str) -> None:
        """Record an answer; ValueError if it does not fit."""
        if not self.may([path]):
            raise ValueError(
                "the figures and thumbnails alone are larger than the limit; use a larger --limit "
                "or a shorter text"
            )

    def may(self, paths: Sequence[str]) -> bool:
        """Record these answers, all of them or none; True if they fitted."""
        found, room = {}, self.room
        for path in paths:
            found[path] = self._kept(path)
            room -= len(json.dumps({path: found[path]}))
            if room < 0:
                return False
        self.answers |= found
        self.room = room
        return True

    def _kept(self, path: str) -> dict[str, Any]:
        given = answer(self.session, path)
        if given.status != 200:
            raise ValueError(given.body.decode())
        if given.media == "application/json":
            return {"json": json.loads(given.body)}
        packed = base64.b64encode(gzip.compress(given.body, 6, mtime=0)).decode()
        return {"gzip": packed, "headers": {**given.headers, "Content-Type": given.media}}

    def content(self, heads: list[dict[str, Any]]) -> dict[str, Any]:
        """The data of the file: the state and all recorded answers."""
        state = self.session.state()
        state["pages"] = dict.fromkeys(state["pages"], False) | {"heads": True}
        state["inputs"] = [each for each in state["inputs"] if each["id"] == self.id]
        state["static"] = {
            "heads": heads,
            "reasons": sorted(self.reasons),
            "effects": self.effects,
            "hideable": EXPLAINED,
        }
        answers = {"/api/state": {"json": with_chinese(state)}, **self.answers}
        return {"version": state["version"], "answers": answers}


def _place(edge: dict[str, Any]) -> str:
    return f"{edge['group']}/{edge['layer']}/{edge['head']}"


def _inside(group: Group, head: Head, levels: int) -> dict[str, Any]:
    """The place of a head, and how many levels of its map are in the file."""
    place = {"group": group.id, "layer": head.layer, "head": head.number}
    return {**place, "levels": levels, "of": head.map.levels}


def template(static: Path) -> tuple[str, str]:
    """The page before and after its data, with script and style sheet written into it."""
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


def built(folder: Path = STATIC) -> tuple[str, str, str]:
    """The HTML, the script and the style sheet; ValueError says how to build them."""
    for name in ("index.html", "headwise.js", "headwise.css"):
        if not (folder / name).is_file():
            raise ValueError(MISSING.format(folder=folder, name=name))
    html, script, style = (
        (folder / name).read_text(encoding="utf-8")
        for name in ("index.html", "headwise.js", "headwise.css")
    )
    return html, script, style


def _harmless(code: str, tag: str) -> str:
    """Escape what would end the element that the code stands in: \\x3c is < in every string."""
    return re.sub(rf"<(?=/{tag}|!--)", r"\\x3c", code, flags=re.IGNORECASE)
