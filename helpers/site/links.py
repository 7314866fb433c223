"""Turn links of the repository's texts into links to pages, or to the repository; run what needs the CPU engine."""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from helpers.site import web_address

ROOT = Path(__file__).resolve().parents[2]
_FENCED = re.compile(r"^([ \t]*)(```+|~~~+).*?^\1\2[ \t]*$", re.M | re.S)
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_TO_NOWHERE = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(\)")
_OUTSIDE = re.compile(r"[a-z][a-z0-9+.-]*:|//")


class Links:
    """The targets of a text's links on the site.

    pages: path in the repository -> path of the page's source in the site's, as "kernels/01_naive.cu" ->
        "kernels/01_naive.cu.md". A folder is named without a slash at its end.
    anchors: "README.md#x-ray" -> the page that this part of a file became, where a file became several.
    images: the pictures that texts show, by their path in the repository; the build copies them.
    """

    def __init__(self, pages: Mapping[str, str], anchors: Mapping[str, str] | None = None) -> None:
        self.pages = dict(pages)
        self.anchors = dict(anchors or {})
        self.images: set[str] = set()

    def target(self, link: str, file: str) -> str:
        """Translate the link of a file in the repository; "" if it would lead to a repository without a name.

        Raises:
            ValueError: its target does not exist.
        """
        path, _, fragment = link.partition("#")
        if _OUTSIDE.match(link):
            return link
        if not path:  # within the file
            return self.anchors.get(f"{file}#{fragment}") or f"#{slug(fragment)}"
        place = posixpath.normpath(posixpath.join(posixpath.dirname(file), path))
        if part := self.anchors.get(f"{place}#{fragment}"):
            return part
        if page := self.pages.get(place):
            return f"/{page}" + (f"#{slug(fragment)}" if fragment else "")
        if place.startswith("..") or not (ROOT / place).exists():
            raise ValueError(f"{file} links to {link}, which is not there")
        if place.endswith((".png", ".svg", ".gif")):
            self.images.add(place)
            return f"/{place}"
        if not web_address.is_published():
            return ""
        return web_address.address(place) + (f"#{fragment}" if fragment else "")

    def rewrite(self, text: str, file: str) -> str:
        """Translate all links of a file's Markdown by `target`; code stays as it is.

        A link to nowhere is replaced by its text.
        """

        def change(prose: str) -> str:
            return _TO_NOWHERE.sub(r"\1", _LINK.sub(lambda match: self.target(match[1], file), prose))

        return outside_code(text, change)


def run_on_cpu(module: str, what: str, *words: str) -> str:
    """Run a module in a process of its own on the CPU engine, whatever device this process has; return what it prints.

    Raises:
        RuntimeError: it failed; the message begins with `what`, and says why.
    """
    # With less optimisation builds take less time; counts and findings are the same.
    settings = {"COURSE_DEVICE": "cpu", "COURSE_CPU_OPTIMISATION": "1"}
    command = [sys.executable, "-m", f"helpers.site.{module}", *words]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{what}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode()


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Change a text everywhere but in its fenced blocks of code."""
    parts, at = [], 0
    for fence in _FENCED.finditer(text):
        parts += [change(text[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, change(text[at:])])


def slug(heading: str) -> str:
    """Return the anchor that GitHub and MyST give a heading; JupyterLab's keeps the capitals."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
