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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from headwise.apps.lab import ablations, comparisons, record, worked_example
from headwise.apps.lab.charts import Bars, Chart, Listing, Series, Shown, bars, cells, text
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
ORDER = (
    *("index", "formula", "scale", "atlas", "heads", "pruning", "explanation", "positions"),
    *("masks", "qk", "dot", "rivals", "memory", "cost", "translation", "settings"),
)
"""The chapters in the order of someone who prepares to explain attention."""
DIRECTIVE = re.compile(r"\{\{(\w+)((?: [^ }]+)*)\}\}")
DIRECTIVES = (
    *("claim", "table", "picture", "verdicts"),  # of one claim or several
    "drawing",  # of all claims or all translators
    "scatter",  # of one translator
    *("count", "score", "runs", "sizes", "lengths", "origins", "paper", "notes"),  # of all of them
)


def template(chapter: str, chinese: bool) -> str:
    """The text of a chapter before it is filled in.

    A claim that no text names yet stands before the exercises of its topic's chapter.
    """
    text = written(chapter, chinese)
    more = "".join(f"{{{{claim {claim.id}}}}}\n\n" for claim in unnamed().get(chapter, ()))
    exercises = "## 练习" if chinese else "## Exercises"
    return text.replace(exercises, more + exercises, 1)


@cache
def written(chapter: str, chinese: bool) -> str:
    """The text of a chapter's file."""
    return (CHAPTERS / name_of(chapter, chinese)).read_text(encoding="utf-8")


@cache
def unnamed() -> dict[str, list[Claim]]:
    """The claims that no chapter names, by the chapter that names most of their topic."""
    named = {
        arguments.strip(): chapter
        for chapter in ORDER
        for name, arguments in DIRECTIVE.findall(written(chapter, False))
        if name == "claim"
    }
    homes = Counter((id.partition("-")[0], chapter) for id, chapter in named.items())
    found: dict[str, list[Claim]] = {}
    for claim in CLAIMS:
        if claim.id not in named:
            home = max(ORDER, key=lambda chapter: homes[claim.topic, chapter])
            found.setdefault(home, []).append(claim)
    return found


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
    if available():
        (folder / "pictures").mkdir(exist_ok=True)
        for name in pictures():
            written += picture(folder / "pictures" / f"{name}.svg", folders)
    return written


def pictures() -> list[str]:
    """The names of all pictures: of a claim its id, perhaps with numbers of what it shows."""
    return [
        "-".join(arguments.split())
        for chapter in ORDER
        for name, arguments in DIRECTIVE.findall(template(chapter, chinese=False))
        if name in ("picture", "drawing")
    ]


def picture(path: Path, folders: Folders) -> list[Path]:
    """Draw a picture in both languages; the SVG begins with the digest of what it shows."""
    shown = parts(path.stem, folders)
    files = worked_example.draw(path) if path.stem == EXAMPLE else draw(shown, path)
    for file in files:
        drawn = file.read_text(encoding="utf-8")
        mark = f"<!-- figures {picture_digest(path.stem, folders)} -->"
        write_whole(file, drawn.replace("<svg ", f"{mark}\n<svg ", 1))
    return files


def parts(name: str, folders: Folders) -> tuple[Shown, ...]:
    """What a picture shows; nothing before there is a result."""
    if name == EXAMPLE:
        return ()
    if name in DRAWINGS:
        results = {claim.id: record.best(claim, folders) for claim in CLAIMS}
        return DRAWINGS[name](results, ablations.recorded(folders, results.values()))
    claim, numbers = claim_of_picture(name)
    result = record.best(claim, folders)
    if result is None or result.stale(claim):
        return ()
    shown = claim.shows(result.figures)
    return tuple(shown[at] for at in numbers or range(len(shown)))


def picture_digest(name: str, folders: Folders) -> str:
    """The digest of everything that a picture tells."""
    if name == EXAMPLE:
        return digest({x: y.tolist() for x, y in worked_example.three_tokens().items()})
    return digest([cells(each) for each in parts(name, folders)])


EXAMPLE = "three-tokens"


def claim_of_picture(picture: str) -> tuple[Claim, list[int]]:
    """The claim of a picture, and which of the things it shows.

    >>> claim, numbers = claim_of_picture("dot-cost-0")
    >>> claim.id, numbers
    ('dot-cost', [0])
    """
    words = picture.split("-")
    numbers = [int(word) for word in words if word.isdigit()]
    (claim,) = find(["-".join(word for word in words if not word.isdigit())])
    return claim, numbers


def digest(figures: Any) -> str:
    """Sixteen hexadecimal digits of figures."""
    text = json.dumps(figures, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
        """A claim as a quotation, with a place for links."""
        return f'<a id="{id}"></a>\n\n{self.quotation(id)}'

    def quotation(self, id: str) -> str:
        """The sentence of a claim, its verdict, figures, proof and origin."""
        claim, result = self.result(id)
        lines = [f"> **{self.say(claim.sentence)}**", ">"]
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

    def picture(self, id: str, *numbers: str) -> str:
        """A link to the picture of a claim, or of some of the things that it shows."""
        claim, result = self.result(id)
        if result is None or result.stale(claim):
            return self.say(both("*Not measured yet.*", "*尚未测量。*"))
        return self.linked("-".join((id, *numbers)), claim.sentence)

    def drawing(self, name: str) -> str:
        """A link to a picture of all claims, of all translators, or of the worked example."""
        return self.linked(name, TITLES[name])

    def linked(self, name: str, about: Sentence) -> str:
        """A link to a picture in the language of the page."""
        ending = ".zh.svg" if self.chinese else ".svg"
        return f"![{self.say(about)}](pictures/{name}{ending})"

    def verdicts(self, *ids: str) -> str:
        """Links to claims, each with the sign of its verdict."""
        chapters = {id: chapter for chapter in ORDER for id in claims_of(chapter)}
        links = []
        for id in ids:
            _, result = self.result(id)
            sign = "" if result is None else f"{VERDICTS[result.verdict][0]} "
            links.append(f"{sign}[{id}]({name_of(chapters[id], self.chinese)}#{id})")
        return ("、" if self.chinese else ", ").join(links)

    def count(self) -> str:
        """The number of claims."""
        return str(len(CLAIMS))

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
        return self.drawn(ablations.planned(self.translators))

    def sizes(self) -> str:
        """The rows of another size than the base model's beside base models of their size."""
        return self.trained(ablations.sizes(self.translators))

    def lengths(self) -> str:
        """BLEU by the length of the source."""
        return self.trained(ablations.lengths(self.translators))

    def trained(self, listing: Listing) -> str:
        """A table, or that its rows are still to come."""
        missing = both("*None of these rows is trained yet.*", "*这些行都还没有训练。*")
        return self.drawn(listing) if listing.rows else self.say(missing)

    def origins(self) -> str:
        """The signature of the scores, and the sessions in which the translators were trained."""
        signed = sorted({run["signature"] for run in self.translators.runs if "signature" in run})
        parts = [f"`{signature}`" for signature in signed]
        held = self.translators.sessions
        if not held:
            parts.append(self.say(both("from the results of claims", "取自各条说法的结果")))
        else:
            count = len(held)
            took = both(
                "{count} {sessions}, {minutes:.0f} minutes on {machine}",
                "{count} 段，共 {minutes:.0f} 分钟，{machine}",
                count=count,
                sessions="session" if count == 1 else "sessions",
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


Results = Mapping[str, Result | None]


def by_topic(results: Results, table: ablations.Translators) -> tuple[Shown, ...]:
    """How many claims of each topic got which verdict, as bars."""
    topics = [topic for topic in TOPICS if any(claim.topic == topic for claim in CLAIMS)]

    def count(topic: str, verdict: str) -> int:
        of = [results[claim.id] for claim in CLAIMS if claim.topic == topic]
        return sum(result is not None and result.verdict == verdict for result in of)

    groups = [(VERDICTS[x], [count(topic, x) for topic in topics]) for x in VERDICTS]
    title = TITLES["verdicts"]
    found = bars(title, both("claims", "说法数"), [TOPICS[x] for x in topics], *groups)
    return (replace(found, stacked=True),)


def beside_base(results: Results, table: ablations.Translators) -> tuple[Shown, ...]:
    """Each translator's BLEU against the base model's, with its interval, as a forest plot."""
    against = ablations.against_base(table.runs)
    near = {
        name: against[name][0]
        for name in ablations.order(table)
        if name in against and against[name][0].known and against[name][0].mean > FAR
    }
    places = list(range(len(near)))
    means, low, high = ([getattr(x, end) for x in near.values()] for end in ("mean", "low", "high"))
    points = both("BLEU points against the base model", "与基准模型相差的 BLEU 分数点")
    names = tuple(ablations.named(table, name) for name in near)
    line = Series(both("difference, 95 % interval", "差值，95% 区间"), places, means, low, high)
    return (Bars(TITLES["translators"], points, names, (line,)),) if near else ()


FAR = -12
"""Translators that lose more points are left out of the forest plot: they would flatten it."""


def learning(results: Results, table: ablations.Translators) -> tuple[Shown, ...]:
    """The validation losses of a few translators, first seeds, against the step."""
    chosen = ("base", "heads-1", "heads-16", "shared", "additive", "unscaled", "convolution")
    curves = tuple(
        Series(ablations.LABELS[x["variant"]], *map(list, zip(*x["curve"], strict=True)))
        for x in table.runs
        if x["variant"] in chosen and x["seed"] == 0 and x.get("curve")
    )
    loss = both("validation loss, nats per token", "验证损失，每词元 nat")
    return (Chart(TITLES["learning"], both("step", "步"), loss, curves),) if curves else ()


DRAWINGS: Mapping[str, Callable[[Results, ablations.Translators], tuple[Shown, ...]]] = {
    "verdicts": by_topic,
    "translators": beside_base,
    "learning": learning,
}
TITLES: Mapping[str, Sentence] = {
    "three-tokens": both("Three tokens, from X to the output", "三个词元，从 X 到输出"),
    "verdicts": both("Verdicts by topic", "各主题的结论"),
    "translators": both("Translators against the base model", "各翻译模型与基准模型相比"),
    "learning": both("How translators learn", "翻译模型的学习过程"),
}
