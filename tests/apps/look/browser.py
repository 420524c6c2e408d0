"""The browser the page is tested in: where it is, and how it gets there.

`make test` runs this file. Where Debian's packages can be installed it installs Chromium; elsewhere
it says what to do, and the page's tests are skipped.
"""

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

MISSING = """No Chromium is on the path: the tests of the page will be skipped.
Install one to run them: apt install chromium, dnf install chromium, brew install chromium."""


def chromium() -> str | None:
    """The path of a Chromium or Chrome on this machine."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def install() -> None:
    """Install Chromium where we may: as root, with apt."""
    if os.name == "posix" and os.geteuid() == 0 and shutil.which("apt-get"):
        quietly = {
            "stdout": subprocess.DEVNULL,
            "env": os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
        }
        subprocess.run(["apt-get", "update", "-q"], check=False, **quietly)
        wanted = ["apt-get", "install", "-q", "-y", "--no-install-recommends", "chromium"]
        subprocess.run(wanted, check=False, **quietly)


if __name__ == "__main__":
    if chromium() is None:
        install()
    if chromium() is None:
        print(MISSING, file=sys.stderr)
