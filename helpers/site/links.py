"""Turn links in the repository's texts into links to the site or the repository; run what needs the CPU engine."""

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
    anchors: "README.md#x-ray" -> the page of this part of a file, if the file was split into several.
    images: the pictures that texts show, by their path in the repository; the build copies them.
    """

    def __init__(self, pages: Mapping[str, str], anchors: Mapping[str, str] | None = None) -> None:
        self.pages = dict(pages)
        self.anchors = dict(anchors or {})
        self.images: set[str] = set()

    def target(self, link: str, file: str) -> str:
        """Translate the target of a link in a file of the repository; "" if the repository has no public name.

        Raises:
            ValueError: its target does not exist.
        """
        path, _, fragment = link.partition("#")
        if _OUTSIDE.match(link):
            return link
        if not path:  # within the same file
            return self.anchors.get(f"{file}#{fragment}") or f"#{slug(fragment)}"
        place = posixpath.normpath(posixpath.join(posixpath.dirname(file), path))
        if part := self.anchors.get(f"{place}#{fragment}"):
            return part
        if page := self.pages.get(place):
            return f"/{page}" + (f"#{slug(fragment)}" if fragment else "")
        if place.startswith("..") or not (ROOT / place).exists():
            raise ValueError(f"{file} links to {link}, which does not exist")
        if place.endswith((".png", ".svg", ".gif")):
            self.images.add(place)
            return f"/{place}"
        if not web_address.is_published():
            return ""
        return web_address.address(place) + (f"#{fragment}" if fragment else "")

    def rewrite(self, text: str, file: str) -> str:
        """Translate all links in a file's Markdown with `target`; code is left unchanged.

        A link without a target is replaced by its text.
        """

        def change(prose: str) -> str:
            return _TO_NOWHERE.sub(r"\1", _LINK.sub(lambda match: self.target(match[1], file), prose))

        return outside_code(text, change)


def run_on_cpu(module: str, what: str, *words: str) -> str:
    """Run a module in a separate process on the CPU engine, whatever device this process uses; return its output.

    Raises:
        RuntimeError: it failed; the message begins with `what` and gives the reason.
    """
    # Builds with less optimisation take less time; counts and findings are the same.
    settings = {"COURSE_DEVICE": "cpu", "COURSE_CPU_OPTIMISATION": "1"}
    command = [sys.executable, "-m", f"helpers.site.{module}", *words]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{what}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode()


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Change a text except in its fenced code blocks."""
    parts, at = [], 0
    for fence in _FENCED.finditer(text):
        parts += [change(text[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, change(text[at:])])


def slug(heading: str) -> str:
    """Return the anchor of a heading on GitHub and in MyST; JupyterLab's keeps the capitals."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
