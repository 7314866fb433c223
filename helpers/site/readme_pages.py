"""README's parts as pages: its beginning and first section form the front page, and each other section has its own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from helpers.site import first_screen, notebook_pages
from helpers.site.links import Links, outside_code, slug

FILE = "README.md"


def split(text: str) -> tuple[str, dict[str, str]]:
    """Split a text into the part before the first heading of level 2, and the sections by heading."""
    marked = outside_code(text, lambda prose: re.sub(r"^## ", "\0", prose, flags=re.M))
    first, *rest = marked.split("\0")
    return first, {part.partition("\n")[0].strip(): part.partition("\n")[2] for part in rest}


def pages_of(text: str) -> dict[str, str]:
    """Map headings of sections to the paths of their pages' sources."""
    first, *others = split(text)[1]
    return {first: "index.md", **{heading: f"about/{slug(heading)}.md" for heading in others}}


def anchors(text: str) -> dict[str, str]:
    """Map links into README, such as "README.md#x-ray", to the page that has the section."""
    return {f"{FILE}#{slug(heading)}": f"/{page}" for heading, page in pages_of(text).items()}


def sections(text: str, links: Links) -> dict[str, str]:
    """Write a page in Markdown for each section of README except the first."""
    page_of, others = pages_of(text), list(split(text)[1].items())[1:]
    return {page_of[heading]: _tidy(f"# {heading}\n{links.rewrite(body, FILE)}") for heading, body in others}


START = """<div class='start'>
<a class='first' href='notebooks/00_attention.html'>Start here: attention in NumPy</a>
<a href='#the-notebooks'>All notebooks</a>
<a href='teachers/mistakes.html'>Usual mistakes</a>
</div>
"""
CAPTION = """Kernel 03 reads a paragraph by Darwin with the queries, keys and values of a language model. Step through
the tiles of keys: no N × N array exists, and yet the output is exact once the last tile is read."""


def front(text: str, links: Links) -> str:
    """Write the front page: README's beginning, where to start, a moving figure, and a card for each notebook.

    Raises:
        ValueError: README has no moving picture for the figure to replace.
    """
    beginning, (heading, start), *_ = (split(text)[0], *split(text)[1].items())
    (path,) = (path for path in notebook_pages.paths() if path.stem == "03_online_softmax")
    figure = f"{START}\n````{{raw}} html\n{notebook_pages.moving_figure(path)}````\n\n{CAPTION}\n"
    # The picture and the paragraph about it.
    beginning, count = re.subn(r"!\[[^]]*\]\([^)]*\.gif\)\n\n.+?\n\n", lambda _: figure + "\n", beginning, flags=re.S)
    if count != 1:
        raise ValueError(f"{FILE} begins with {count} moving pictures, expected one")
    cards = "".join(_card(path) for path in notebook_pages.paths())
    own = _tidy(links.rewrite(f"{beginning}\n## {heading}\n{start}", FILE))
    return f"{own}\n## The notebooks\n\n<div class='cards'>\n{cards}</div>\n"


def summary(text: str) -> tuple[str, str]:
    """Return the course's name and the first sentence about it, for previews of links to the site."""
    title, _, rest = split(text)[0].strip().partition("\n")
    paragraph = next(part for part in rest.split("\n\n") if re.match(r"\s*\w", part))
    return title.removeprefix("# "), _plain(" ".join(paragraph.split()).partition(". ")[0]) + "."


def _card(path: Path) -> str:
    notebook = notebook_pages.read(path)
    read, do = first_screen.minutes(path, notebook)
    number, _, name = notebook_pages.title(notebook).partition(" · ")
    exercises = f", {do} for exercises" if do else ""
    return (
        f"<a class='card' href='notebooks/{path.stem}.html'><span class='number'>{number}</span>"
        f"<strong>{_plain(name)}</strong><span>{_plain(notebook_pages.idea(notebook))}</span>"
        f"<small>{read} minutes{exercises}</small></a>\n"
    )


def _plain(text: str) -> str:
    """Reduce a line of Markdown to its words, for HTML: cards hold no links and no formulas."""
    text = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", text).replace("*", "").replace("`", "")
    text = re.sub(r"\$([^$]+)\$", lambda m: re.sub(r"[\\{}]", "", m[1]).replace("cdot", "·"), text)
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _tidy(text: str) -> str:
    """Remove the comments that mark generated parts."""
    return re.sub(r"^<!--.*?-->\n+", "", text, flags=re.M).rstrip() + "\n"


def toctree(names: Iterable[str], caption: str = "") -> str:
    """Write a hidden table of contents of these pages, which defines the sidebar and the order of previous and next."""
    head = [f":caption: {caption}"] if caption else []
    return "\n".join(["```{toctree}", ":hidden:", *head, "", *names, "```", ""])
