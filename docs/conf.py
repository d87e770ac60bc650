"""Sphinx: the pages that `python docs/build.py` has put beside this file. Nothing is fetched when they are read."""

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
