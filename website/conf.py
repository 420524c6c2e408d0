"""Sphinx's settings for both languages; SITE_LANGUAGE says which one is built, from where."""

import os
from typing import Any

import sphinx.search
from sphinx.application import Sphinx

from headwise.version import __version__
from website.contents import pages

chinese = os.environ["SITE_LANGUAGE"] == "zh"
other = "en" if chinese else "zh"

project = "headwise"
author = copyright = "The headwise authors"
release = version = __version__
language = "zh_CN" if chinese else "en"
extensions = ["myst_parser"]
exclude_patterns = ["_extra"]
templates_path = ["templates"]

html_theme = "furo"
html_static_path, html_js_files = ["static"], [("filter.js", {"defer": "defer"})]
html_title = "headwise"
html_extra_path = [os.path.join(os.environ["SITE_SOURCE"], "_extra")]
html_copy_source = html_show_sourcelink = False
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/language.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
# Words of Latin letters and pairs of Chinese ones: neither language needs a dictionary.
sphinx.search.languages["zh"] = "website.searching.Pairs"
html_search_language = "zh"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
# Outputs and notations that no lexer reads stand in code blocks, too.
suppress_warnings = ["misc.highlighting_failure"]
# Types in signatures stand as in the code; those that are not public names have no entry.
nitpick_ignore_regex = [(r"py:(class|obj|meth|func)", r".*")]

TWINS = {page.name for page in pages() if page.language == other} | {"results/lab"}
"""The pages that the other language has."""


def links(app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Give the side bar the page in the other language; 中文 has no reference of its own."""
    place = name if name in TWINS else "index"
    found = [("English", f"../{place}.html")] if chinese else [("中文", f"zh/{place}.html")]
    found += [("API", "../api/headwise.html")] if chinese else []
    context["other_links"] = found


def setup(app: Sphinx) -> None:
    """Connect the side bar."""
    app.connect("html-page-context", links)
