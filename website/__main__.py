"""Build the site: python -m website [--out FOLDER] [--check-outside]"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.watch_divergence import train
from website import checking, reference, results
from website.contents import ROOT, Language, pages
from website.staging import Stage, indexed

BUILD = ROOT / "build" / "website"
EXPORTS = {
    "gpt": ["gpt", "--limit", "8MB"],
    "translate": ["translate", "--limit", "4MB"],
    "lab": ["--lab"],
}
"""The pages of headwise look in the gallery, and what they show."""


def stage(language: Language) -> Stage:
    """Everything that Sphinx reads for a language."""
    made = Stage(BUILD / f"{language}.source", language, pages())
    made.copy()
    claims = results.lab(language, made.folder / "results" / "lab")
    made.write("results/lab", indexed(claims))
    if language == "en":
        made.write("results/benchmarks", results.benchmarks())
        for module in reference.modules():
            made.write(f"api/{module}", reference.page(module))
    made.finish()
    return made


def build(stage: Stage, out: Path, builder: str = "html") -> None:
    """Let Sphinx build one language; any warning is an error."""
    command = [sys.executable, "-m", "sphinx", "-W", "-n", "-q", "--keep-going", "-b", builder]
    command += ["-d", str(BUILD / f"{stage.language}.trees"), "-c", str(ROOT / "website")]
    environment = os.environ | {
        "SITE_LANGUAGE": stage.language,
        "SITE_SOURCE": str(stage.folder),
        "PYTHONPATH": str(ROOT),
    }
    subprocess.run([*command, str(stage.folder), str(out)], check=True, env=environment)


def gallery(out: Path) -> None:
    """Export pages of headwise look for the gallery, and the story of a run that diverges."""
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        run = Path(folder) / "diverging"
        train(folder=run)
        for name, words in (EXPORTS | {"run": [str(run)]}).items():
            file = out / f"{name}.html"
            command = [sys.executable, "-m", "headwise", "look", *words, "--out", str(file)]
            subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def main() -> None:
    """Build both languages, then follow every link."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site")
    parser.add_argument("--check-outside", action="store_true", help="follow links to other sites")
    given = parser.parse_args()
    began, out = time.perf_counter(), given.out
    shutil.rmtree(out, ignore_errors=True)
    places: dict[Language, Path] = {"en": out, "zh": out / "zh"}
    for language, folder in places.items():
        staged = stage(language)
        build(staged, folder)
        if given.check_outside:
            build(staged, BUILD / f"{language}.links", "linkcheck")
    gallery(out / "gallery")
    if wrong := checking.broken(out):
        raise SystemExit("links that lead nowhere:\n" + "\n".join(wrong))
    count = len(list(out.rglob("*.html")))
    print(f"{count} pages in {time.perf_counter() - began:.0f} s: {out / 'index.html'}")


if __name__ == "__main__":
    main()
