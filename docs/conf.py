"""Sphinx: the pages that `python -m docs.build` has put beside this file. Nothing is fetched when they are read."""

from functools import cache
from typing import Any

from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish

import xmla

project = "xmla"
author = "the authors of xmla"
release = xmla.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "xmla"
html_static_path = ["images"]
html_css_files = ["page.css"]
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False
# Each page's top is its own anchor; a formula is text, not Python.
highlight_language = "text"
pygments_style = "friendly"
pygments_dark_style = "github-dark"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
default_role = "code"
smartquotes = False  # names of formats are strings
nitpicky = True
# Types of attributes: other packages' inventories would be fetched, and the core has no pages.
nitpick_ignore_regex = [(r"py:class", r"(torch|jax|numpy|collections|xmla\.core)\..*")]

# What the navigation links to is the same for all files that lie as deep, and they are in none of its branches.
_navigations: dict[int, str] = {}


def share_navigation(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Made once for the pages that show files: for each of them it would be half of the time."""
    make, depth = context["toctree"], page.count("/")

    def navigation(**options: Any) -> str:
        if depth not in _navigations:
            _navigations[depth] = make(**options)
        return _navigations[depth]

    if page.startswith("source/"):
        context["toctree"] = navigation


def setup(app: Sphinx) -> None:
    app.connect("html-page-context", share_navigation, priority=400)  # before the theme's
    SearchEnglish.stem = cache(SearchEnglish.stem)  # most words occur many times
