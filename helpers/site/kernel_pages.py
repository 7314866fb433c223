"""A page for each file in kernels/: its description, its diff to the previous file, its text with an X-ray."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from helpers.attention.kernel import KERNELS
from helpers.attention.ladder import LADDER
from helpers.attention.ladder.steps import BASES, CLIMBS
from helpers.attention.ladder.steps import files as climb_files
from helpers.lesson.exercises.holes import number_of
from helpers.site import listing, notebook_pages, web_address
from helpers.site.readme_pages import toctree

GROUPS = {  # folder below kernels/ -> the heading of its list
    "": "The stages, and the headers that they include",
    "steps": "The steps between two stages",
    "exercises": "Solutions of the exercises",
}
INTRO = {
    "": "One file a stage: the kernel of the notebook with its number. Each stands alone but for the headers in the "
    "same folder.",
    "steps": "Each file is a whole kernel and differs from the one before by one idea. Its page begins with that "
    "difference.",
    "exercises": "Each file is complete and right; the part between two `hole` comments is what a learner writes. "
    "Try the exercise in its notebook first.",
}


@functools.cache  # every page calls it
def files() -> list[Path]:
    """List all kernel files, stages first."""
    paths = [path for path in KERNELS.rglob("*") if path.suffix in (".cu", ".cuh")]
    return sorted(paths, key=lambda path: (list(GROUPS).index(_group(path)), path.name))


def ideas() -> dict[str, str]:
    """Map files below kernels/ to their ideas, from the tables of stages and climbs."""
    of_steps = {step.file: step.idea for climb in (*CLIMBS.values(), BASES.values()) for step in climb}
    return of_steps | {stage.file: stage.idea for stage in LADDER.values()}


def before() -> dict[str, str]:
    """Map the file of each step or stage to the file that it was made from, if any."""
    files_before = {}
    for name in CLIMBS:
        files_before.update((after, file) for file, after in pairwise(climb_files(name)))
    return files_before


def page(path: Path, ideas: Mapping[str, str], before: Mapping[str, str], xray: Mapping[str, Any] | None = None) -> str:
    """Write the page of one kernel file in Markdown.

    Args:
        ideas: from `ideas()`.
        before: from `before()`.
        xray: from `xrays.xray_of`, for a file that is launched.
    """
    name = path.relative_to(KERNELS).as_posix()
    lines = [f"# {path.name}", "", *([f"**{ideas[name]}**", ""] if name in ideas else []), *_facts(path, before)]
    if old := before.get(name):
        lines += _difference(old, name)
    if xray:
        lines += _xray(xray, name)
    folded = _group(path) == "exercises"
    lines += ["<details class='solution'><summary>Show the solution</summary>", ""] if folded else []
    by_line = xray["lines"].get(name, {}) if xray else None
    lines += ["````{raw} html", listing.code(name, by_line, xray["shared"] if xray else ()), "````", ""]
    return "\n".join(lines + (["</details>", ""] if folded else []))


def _facts(path: Path, before: Mapping[str, str]) -> list[str]:
    """Link to related pages: its notebook, the files before and after it, those it includes, those that include it."""
    name = path.relative_to(KERNELS).as_posix()
    facts = []
    if notebook := _notebook_of(path):
        facts.append(f"Notebook [{notebook.stem}](/notebooks/{notebook.name})")
    if name in before:
        facts.append(f"Before it: {_link(before[name])}")
    facts += [f"After it: {_link(after)}" for after, old in before.items() if old == name]
    if web_address.is_published():
        facts.append(web_address.link("In the repository", f"kernels/{name}"))
    lines = [" · ".join(facts) + ("" if not facts else "."), ""]
    if included := listing.includes(name):
        lines += [f"Includes {', '.join(map(_link, included))}.", ""]
    users = [other.relative_to(KERNELS).as_posix() for other in files() if path.suffix == ".cuh"]
    if users := [other for other in users if name in listing.includes(other)]:
        lines += [f"Included by {', '.join(map(_link, users))}.", ""]
    return lines


def _link(file: str) -> str:
    return f"[{file.rpartition('/')[2]}](/kernels/{file}.md)"


def _xray(xray: Mapping[str, Any], name: str) -> list[str]:
    """Describe the X-rayed launch and the figures in the margin; fold the table of lines."""
    launched = " and ".join(
        f"`{kernel}` with {_product(grid)} block{'s' * (grid != [1, 1, 1])} of {_product(block)} threads"
        for kernel, grid, block in xray["launches"]
    )
    clean = "no finding" if not xray["findings"] else f"{xray['findings']} findings"
    return [
        f"**[X-ray](/about/x-ray.md)** of {xray['what']}: {launched}; {clean}. Beside each line: the bytes of global "
        "memory and of shared memory that its threads asked for, and how many times as many wavefronts bank conflicts "
        "make. Point at the figures for each array. They include what a line's calls do in headers.",
        *("", "<details><summary>Each line and array, in a table that sorts</summary>", ""),
        *listing.lines_table(xray["lines"].get(name, {})),
        *("", "</details>", ""),
    ]


def _product(sizes: list[int]) -> str:
    return " × ".join(map(str, [size for size in sizes if size > 1] or [1]))


def _notebook_of(kernel: Path) -> Path | None:
    """Find a kernel's notebook: a workshop with its name, such as 08b_backward_mma, or the notebook with its number."""
    number, _, idea = kernel.stem.partition("_")
    workshop = re.compile(rf"{number}[a-z]_{re.escape(idea)}")
    paths = notebook_pages.paths()
    named = [p for p in paths if workshop.fullmatch(p.stem)] if kernel.parent == KERNELS else []
    return next(iter([*named, *(p for p in paths if number_of(p.name) == number)]), None)


def _difference(old: str, new: str) -> list[str]:
    """Show the differing lines with some context: folded for a stage, open for a step."""
    before, after = ((KERNELS / file).read_text(encoding="utf-8").splitlines() for file in (old, new))
    diff = list(difflib.unified_diff(before, after, old, new, lineterm="", n=2))
    added, gone = (sum(line[0] == sign for line in diff[2:]) for sign in "+-")
    opened = " open" if new.startswith("steps/") and added + gone <= 80 else ""
    return [
        f"<details{opened}><summary>What changes from {old}: {added} lines new, {gone} gone</summary>",
        *("", f"From [{old}](/kernels/{old}.md):", ""),
        *("````{code-block} diff", "", *diff[2:], "````", "", "</details>", ""),
    ]


def index() -> str:
    """Write the list of all kernel files in Markdown."""
    by_file, paths = ideas(), files()
    lines = ["# Kernels", "", "Every `.cu` file of the course. The button at the top right of each copies it.", ""]
    for group, heading in GROUPS.items():
        mine = [path for path in paths if _group(path) == group]
        lines += [f"## {heading}", "", INTRO[group], ""]
        if group:
            lines += [f"[The list of all {len(mine)}](/kernels/{group}/index.md).", ""]
            continue
        lines += [*(_row(path, by_file) for path in mine), ""]
    hidden = [path.name + ".md" for path in paths if not _group(path)] + [f"{g}/index.md" for g in GROUPS if g]
    return "\n".join([*lines, toctree(hidden)])


def group_index(group: str) -> str:
    """Write the list of one folder's files in Markdown."""
    by_file, mine = ideas(), [path for path in files() if _group(path) == group]
    lines = [f"# {GROUPS[group]}", "", INTRO[group], "", *[_row(path, by_file) for path in mine], ""]
    return "\n".join([*lines, toctree(path.name + ".md" for path in mine)])


def _row(path: Path, ideas: Mapping[str, str]) -> str:
    name = path.relative_to(KERNELS).as_posix()
    return f"- [{path.name}](/kernels/{name}.md)" + (f": {ideas[name]}" if name in ideas else "")


def _group(path: Path) -> str:
    return path.parent.relative_to(KERNELS).as_posix().removeprefix(".")
