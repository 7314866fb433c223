"""Sphinx's settings for the site. `helpers.site.build` passes the source and output folders, and the address below."""

import functools
import gc
import html
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform

from helpers.setup.version import version as course_version
from helpers.site import readme_pages, web_address
from helpers.site.links import ROOT

sys.modules.setdefault("rfc3987_syntax", None)  # myst_nb would import it for 3 s: see helpers/cli/quick_pytest.py

# Most of Sphinx's objects live until the end, and Python's collector would scan them again and again; and Sphinx caches
# the stems of words for one page only. With both changes a build takes a quarter less time.
gc.set_threshold(200_000, 50, 1000)
SearchEnglish.stem = functools.cache(SearchEnglish.stem)

project = "FlashAttention from scratch, in CuPy"
author = "the course's authors"
version = release = course_version()
extensions = ["myst_nb", "sphinx_copybutton"]
exclude_patterns = ["extra"]  # files that are copied unchanged

nb_execution_mode = "off"  # outputs are those stored in the notebooks
nb_render_markdown_format = "myst"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]  # PTX and `...` in C++
copybutton_exclude = ".linenos, .gp"

html_theme = "sphinx_book_theme"
html_title = project
html_static_path = ["static"]
html_css_files = ["book.css"]
html_js_files = ["book.js"]
html_favicon = "static/icon.svg"
html_search_scorer = str(Path(__file__).with_name("static") / "scorer.js")
html_show_copyright = html_show_sphinx = False
html_context = {"default_mode": "auto"}  # follow the reader's system; without this each page logs an error
html_math_renderer = "mathml"  # defined below
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    **({"repository_url": web_address.address()} if web_address.is_published() else {}),
    "use_repository_button": web_address.is_published(),
    "use_download_button": False,
    "footer_content_items": ["extra-footer.html"],
    "use_fullscreen_button": False,
    "navbar_persistent": [],  # the search box is in the sidebar
    # A kernel's page needs the full width for its code.
    "secondary_sidebar_items": {f"{folder}/*": ["page-toc.html"] for folder in ("notebooks", "teachers", "about")},
    "show_navbar_depth": 1,
    "collapse_navbar": True,
    "max_navbar_depth": 2,  # steps and exercises have their own lists
    "show_toc_level": 2,
    "pygments_light_style": "github-light",
    "pygments_dark_style": "github-dark",
}


class CudaCells(SphinxTransform):
    """Highlight cells that begin with %%cuda as C++, in notebooks whose other cells are Python."""

    default_priority = 400

    def apply(self, **_: object) -> None:
        for block in self.document.findall(lambda node: node.tagname == "literal_block"):
            if block.astext().startswith("%%cuda"):
                block["language"], block["force"] = "c++", True


class NoPrintedCode(SphinxPostTransform):
    """Keep listings printed by cells out of the search index: the kernel's own page has them."""

    default_priority = 900

    def run(self, **_: object) -> None:
        for cell in self.document.findall(
            lambda node: "cell_output" in getattr(node, "attributes", {}).get("classes", ())
        ):
            for block in cell.findall(lambda node: node.tagname == "literal_block"):
                if block.get("language") in ("c++", "cpp", "cuda", "diff", "python"):
                    block["classes"].append("no-search")


def inline_formula(translator: Any, node: Any) -> None:
    """Write a formula as MathML, which browsers render without scripts, fonts or downloads."""
    translator.body.append(f'<span class="math">{convert(node.astext())}</span>')
    node.clear()  # do not show its TeX as well


def formula(translator: Any, node: Any) -> None:
    """Write a displayed formula."""
    translator.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    node.clear()


@functools.cache
def summary() -> tuple[str, str]:
    """Read README's summary once for all pages."""
    return readme_pages.summary((ROOT / readme_pages.FILE).read_text(encoding="utf-8"))


def add_card(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Add the preview of links to a page. Its picture needs the site's address."""
    title, sentence = summary()
    changes = context["pathto"]("CHANGELOG")
    context["theme_extra_footer"] = f"Version {version} (<a href='{changes}'>changes</a>), by {author}. MIT licence."
    if pagename == app.config.root_doc:
        context["docstitle"] = ""  # the page's title is the site's
    own = html.unescape(re.sub(r"<[^>]+>", "", context.get("title") or title))
    tags = {"og:type": "website", "og:site_name": title, "og:title": own, "og:description": sentence}
    if web_address.is_published():
        tags |= {"og:url": web_address.site(f"{pagename}.html"), "og:image": web_address.site("card.png")}
        tags |= {"og:image:width": "1200", "og:image:height": "630"}
    lines = [f'<meta property="{name}" content="{html.escape(text, quote=True)}"/>' for name, text in tags.items()]
    lines.append('<meta name="twitter:card" content="summary_large_image"/>')
    lines.append(f'<meta name="description" content="{html.escape(sentence, quote=True)}"/>')
    context["metatags"] = context.get("metatags", "") + "\n".join(lines)


def setup(app: Sphinx) -> None:
    app.add_transform(CudaCells)
    app.add_post_transform(NoPrintedCode)
    app.add_html_math_renderer("mathml", (inline_formula, None), (formula, None))
    app.connect("html-page-context", add_card)
