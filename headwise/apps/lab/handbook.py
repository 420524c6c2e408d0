"""The handbook: chapters that explain attention, filled in with the results of the lab.

A chapter is a Markdown file in `chapters`, in English and 中文, that holds no measured number.
Directives such as `{{claim scale-variance}}` stand in their places, and `pages` fills them in from
results: new results change the handbook as soon as it is written again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headwise.apps.lab import ablations, comparisons, record
from headwise.apps.lab.charts import Chart, Shown, cells, text
from headwise.apps.lab.claim import TOPICS, VERDICTS, Claim, both
from headwise.apps.lab.claims import CLAIMS
from headwise.apps.lab.drawing import available, draw
from headwise.apps.lab.record import Result
from headwise.apps.lab.revisions import REVISIONS
from headwise.apps.lab.runner import find
from headwise.files import write_whole
from headwise.messages import Sentence

Folders = Sequence[Path]
"""Folders of results; of two results that are equally good the one in the earlier folder counts."""

CHAPTERS = Path(__file__).parent / "chapters"
ORDER = ("index", "formula", "scale", "heads", "qk", "dot", "rivals", "cost", "translation")
"""The chapters in the order of someone who prepares to explain attention."""
DIRECTIVE = re.compile(r"\{\{(\w+)((?: [^ }]+)*)\}\}")
DIRECTIVES = (
    *("claim", "table", "picture", "verdicts"),  # of one claim or several
    "scatter",  # of one translator
    *("score", "runs", "origins", "paper", "notes"),  # of all of them
)


def template(chapter: str, chinese: bool) -> str:
    """The text of a chapter before it is filled in."""
    file = CHAPTERS / name_of(chapter, chinese)
    return file.read_text(encoding="utf-8")


def name_of(chapter: str, chinese: bool) -> str:
    """The file of a chapter.

    >>> name_of("scale", chinese=True)
    'scale.zh.md'
    """
    return f"{chapter}.zh.md" if chinese else f"{chapter}.md"


def claims_of(chapter: str) -> list[str]:
    """The ids of the claims that a chapter discusses, in its order."""
    directives = DIRECTIVE.findall(template(chapter, chinese=False))
    return [arguments.strip() for name, arguments in directives if name == "claim"]


def pages(folders: Folders = (record.RECORDED,)) -> dict[str, str]:
    """Every page of the handbook by the name of its file, from the results in these folders."""
    results = {claim.id: record.best(claim, folders) for claim in CLAIMS}
    translators = ablations.recorded(folders, results.values())
    return {
        name_of(chapter, chinese): ChapterWriter(results, translators, chinese).write(chapter)
        for chapter in ORDER
        for chinese in (False, True)
    }


def write(folder: Path, folders: Folders = (record.RECORDED,)) -> list[Path]:
    """Write the pages, and the pictures they show if matplotlib is there; the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, page in pages(folders).items():
        write_whole(folder / name, page)
        written.append(folder / name)
    for chapter in ORDER:
        for name, arguments in DIRECTIVE.findall(template(chapter, chinese=False)):
            if name == "picture" and available():
                written += picture(folder / "pictures", arguments.strip(), folders)
    return written


def picture(folder: Path, id: str, folders: Folders) -> list[Path]:
    """Draw what a claim shows; the SVG begins with the digest of the figures it shows."""
    folder.mkdir(parents=True, exist_ok=True)
    (claim,) = find([id])
    result = record.best(claim, folders)
    if result is None or result.stale(claim):
        return []
    files = draw(claim.shows(result.figures), folder / f"{id}.svg")
    for file in files:
        drawn = file.read_text(encoding="utf-8")
        write_whole(file, drawn.replace("<svg ", f"<!-- figures {digest(result)} -->\n<svg ", 1))
    return files


def digest(result: Result) -> str:
    """Sixteen hexadecimal digits of the figures of a result."""
    figures = json.dumps(result.figures, sort_keys=True)
    return hashlib.sha256(figures.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ChapterWriter:
    """Fills in chapters in one language; each directive is a method that returns Markdown."""

    results: Mapping[str, Result | None]
    translators: ablations.Translators
    chinese: bool

    def write(self, chapter: str) -> str:
        """The page of a chapter."""
        return self.fill(template(chapter, self.chinese))

    def fill(self, text: str) -> str:
        """A text with every directive replaced; ValueError for one that does not exist."""
        return DIRECTIVE.sub(self.replaced, text)

    def replaced(self, found: re.Match[str]) -> str:
        """The Markdown for one directive."""
        name, arguments = found[1], found[2].split()
        if name not in DIRECTIVES:
            raise ValueError(f"there is no directive {found[0]}")
        written: str = getattr(self, name)(*arguments)
        return written

    def result(self, id: str) -> tuple[Claim, Result | None]:
        """A claim and the result to show."""
        (claim,) = find([id])
        return claim, self.results[id]

    def say(self, sentence: Sentence) -> str:
        """A sentence in the language of the page."""
        return sentence.zh if self.chinese else str(sentence)

    def claim(self, id: str) -> str:
        """A claim as a quotation: its sentence, verdict, figures, proof and origin."""
        claim, result = self.result(id)
        lines = [f'<a id="{id}"></a>', "", f"> **{self.say(claim.sentence)}**", ">"]
        if result is None:
            lines += [f"> {self.say(both('Not measured yet.', '尚未测量。'))}", ">"]
        else:
            lines += [f"> {self.judged(claim, result)}", ">"]
        for old in REVISIONS.get(id, ()):
            before = both(
                "Until {date}: {verdict}; {reason}.",
                "{date} 之前：{verdict}；{reason}。",
                date=old.date,
                verdict=VERDICTS[old.verdict],
                reason=old.reason,
            )
            lines += [f"> {self.say(before)}", ">"]
        if claim.derivation is not None:
            proof = self.say(both("On paper", "推导"))
            lines += [f"> *{proof}{self.colon}* {self.say(claim.derivation)}", ">"]
        return "\n".join([*lines, f"> {self.origin(claim, result)}"])

    @property
    def colon(self) -> str:
        """The colon of the language."""
        return "：" if self.chinese else ":"

    def judged(self, claim: Claim, result: Result) -> str:
        """The verdict, its condition, what kind of result it is, and the figures."""
        verdict = self.say(VERDICTS[result.verdict])
        said = {
            "read": both("Read", "查阅"),
            "derived": both("Derived, checked", "推导并核对"),
            "measured": both("Measured", "实测"),
        }[claim.kind]
        measured = f"*{self.say(said)}{self.colon}* {self.say(result.because)}"
        if self.chinese:
            condition = "" if result.condition is None else f"：{self.say(result.condition)}"
            return f"{verdict}{condition}。{measured}。"
        condition = "" if result.condition is None else f" {self.say(result.condition)}"
        return f"{verdict}{condition}. {measured}."

    def origin(self, claim: Claim, result: Result | None) -> str:
        """The command, form, machine and date of a result, and the code of its experiment."""
        code = f"`{claim.source}`"
        if result is None:
            return f"`{claim.command}` · {code}"
        forms = {"quick": both("quick form", "快速形式"), "full": both("full form", "完整形式")}
        parts = [f"`{result.command}`", self.say(forms[result.form]), result.machine, result.date]
        if claim.kind == "read":  # a quotation needs no form and no machine
            parts = [f"`{result.command}`", result.date]
        if result.stale(claim):
            parts.append(self.say(both("stale: measured by other code", "已过时：由其他代码测得")))
        return " · ".join([*parts, code])

    def table(self, id: str, number: str = "0") -> str:
        """The n-th thing that a claim shows, as a table."""
        claim, result = self.result(id)
        if result is None or result.stale(claim):  # older figures may not fit today's table
            return self.say(both("*Not measured yet.*", "*尚未测量。*"))
        return self.drawn(claim.shows(result.figures)[int(number)])

    def drawn(self, shown: Shown) -> str:
        """A chart, listing or map as a Markdown table under its title."""
        headings, rows = cells(shown, self.chinese)
        lines = [headings, ["---"] * len(headings), *rows]
        written = [
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
        ]
        title = self.say(shown.title)
        if isinstance(shown, Chart) and str(shown.y) not in str(shown.title).lower():
            # the cells of a chart are what its vertical axis names
            title += f"（{self.say(shown.y)}）" if self.chinese else f" ({self.say(shown.y)})"
        return "\n".join([f"*{title}*", "", *written])

    def picture(self, id: str) -> str:
        """A link to the picture of a claim."""
        claim, result = self.result(id)
        if result is None or result.stale(claim):
            return self.say(both("*Not measured yet.*", "*尚未测量。*"))
        ending = ".zh.svg" if self.chinese else ".svg"
        return f"![{self.say(claim.sentence)}](pictures/{id}{ending})"

    def verdicts(self, *ids: str) -> str:
        """Links to claims, each with the sign of its verdict."""
        chapters = {id: chapter for chapter in ORDER for id in claims_of(chapter)}
        links = []
        for id in ids:
            _, result = self.result(id)
            sign = "" if result is None else f"{VERDICTS[result.verdict][0]} "
            links.append(f"{sign}[{id}]({name_of(chapters[id], self.chinese)}#{id})")
        return ("、" if self.chinese else ", ").join(links)

    def score(self) -> str:
        """How many claims of each topic got which verdict."""
        headings = [self.say(both("topic", "主题")), *(self.say(x) for x in VERDICTS.values())]
        rows = []
        for topic, title in TOPICS.items():
            of = [self.result(claim.id)[1] for claim in CLAIMS if claim.topic == topic]
            counted = Counter(result.verdict for result in of if result is not None)
            rows.append([self.say(title), *(text(counted[each] or None) for each in VERDICTS)])
        lines = [headings, ["---"] * len(headings), *rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def runs(self) -> str:
        """The table of translators."""
        return self.drawn(ablations.table(self.translators))

    def origins(self) -> str:
        """The signature of the scores, and the sessions in which the translators were trained."""
        signed = sorted({run["signature"] for run in self.translators.runs if "signature" in run})
        parts = [f"`{signature}`" for signature in signed]
        held = self.translators.sessions
        if not held:
            parts.append(self.say(both("from the results of claims", "取自各条说法的结果")))
        else:
            took = both(
                "{count} sessions, {minutes:.0f} minutes on {machine}",
                "{count} 段，共 {minutes:.0f} 分钟，{machine}",
                count=len(held),
                minutes=self.translators.seconds / 60,
                machine=" / ".join(dict.fromkeys(str(session["machine"]) for session in held)),
            )
            dates = sorted({str(session["date"]) for session in held})
            parts += ["`headwise lab table`", self.say(took), " / ".join(dates)]
        return " · ".join(parts)

    def scatter(self, variant: str) -> str:
        """The scatter between seeds of a translator, in percent of its BLEU."""
        return f"{ablations.scatter(self.translators.runs, variant):.1f}"

    def paper(self) -> str:
        """Rows A and B of the 2017 paper's table 3, and the same changes here."""
        return self.drawn(comparisons.beside_the_paper(self.translators.runs))

    def notes(self) -> str:
        """The notes' sentences about BLEU, and what was measured."""
        return self.drawn(comparisons.beside_the_notes(self.translators.runs))
