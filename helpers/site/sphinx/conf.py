"""Sphinx's settings of the site. `helpers.site.build` gives the source and output folders, and the address below."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

from helpers.site import web_address

project = "FlashAttention from scratch, in CuPy"
author = copyright = "the course's authors; MIT licence"
extensions = ["myst_nb", "sphinx_copybutton"]
exclude_patterns: list[str] = []

nb_execution_mode = "off"  # outputs are those that the notebooks hold
nb_render_markdown_format = "myst"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]  # PTX and `...` in C++
copybutton_exclude = ".linenos, .gp"

html_theme = "sphinx_book_theme"
html_title = project
html_static_path = ["static"]
html_css_files = ["book.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "repository_url": web_address.address(),
    "use_repository_button": True,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navbar_persistent": [],  # the search is in the sidebar
    # A kernel's page needs the width for its code.
    "secondary_sidebar_items": {f"{folder}/*": ["page-toc.html"] for folder in ("notebooks", "teachers", "about")},
    "show_navbar_depth": 1,
    "collapse_navbar": True,
    "max_navbar_depth": 2,  # the steps and exercises are in lists of their own
    "show_toc_level": 2,
    "pygments_light_style": "github-light",
    "pygments_dark_style": "github-dark",
}
if mathjax := os.environ.get("COURSE_BOOK_MATHJAX"):  # a copy of MathJax, for a site that is read without a network
    mathjax_path = mathjax


class CudaCells(SphinxTransform):
    """Cells that begin with %%cuda are C++, in notebooks whose other cells are Python."""

    default_priority = 400

    def apply(self, **_: object) -> None:
        for block in self.document.findall(lambda node: node.tagname == "literal_block"):
            if block.astext().startswith("%%cuda"):
                block["language"], block["force"] = "c++", True


def setup(app: Sphinx) -> None:
    app.add_transform(CudaCells)
