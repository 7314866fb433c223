"""The first screen of a notebook: lines generated from its text, its exercises, the table of stages and the repository.

    python3 -m helpers.site.first_screen        # writes them into all notebooks, and the badges into README

A title cell has them between `<!-- made by helpers.site.first_screen -->` and the next empty line; the first code cell
begins with `opening` and is collapsed. `tests/test_notebooks.py` compares both with what is made here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helpers.attention.ladder import LADDER, Rung
from helpers.lesson.exercises import exercise
from helpers.lesson.exercises.holes import number_of
from helpers.site import web_address

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
README = FOLDER.parent / "README.md"
MARK = "<!-- made by helpers.site.first_screen -->"
# A reader new to CUDA took 45 to 90 minutes for 2,400 to 3,600 words, 170 to 300 lines and one exercise.
WORDS_A_MINUTE, LINES_A_MINUTE = 80, 10
# For the lines of kernels and diffs in cells: a graduate of 00 to 03 took 55 to 100 minutes for 04 to 07.
LISTED_A_MINUTE = 25
STEP = 5  # minutes are rounded to multiples of this
# Readers' own estimates, where words and lines do not suffice: all hardware in 10 is new. For 07, 07b, 08 and 08b, the
# time that a reader took; 10 and 10b share 105 minutes in proportion to their estimates.
READERS_SAY = {"07": 60, "07b": 40, "08": 65, "08b": 60, "10": 50, "10b": 55}
USES = {11: 7, 14: 7, 17: 7}  # a notebook without a stage -> one that runs on the same GPUs
GPUS = {"T4": 75, "A100": 80, "L4": 89, "H100": 90}  # name -> compute capability


def words(notebook: Mapping[str, Any]) -> int:
    """Count a notebook's words of prose: Markdown cells with formulas and tables, no comments or generated lines."""
    return sum(len(_plain(cell).split()) for cell in notebook["cells"] if cell["cell_type"] == "markdown")


def lines(notebook: Mapping[str, Any]) -> int:
    """Count the lines of a notebook's code cells, without empty lines, exercises and the generated beginning."""
    sources = [_source(cell) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    sources[:1] = [_OPENING.sub("", text, count=1) for text in sources[:1]]
    return sum(bool(line.strip()) for text in sources if not text.startswith("%%") for line in text.splitlines())


def listed(notebook: Mapping[str, Any]) -> int:
    """Count the lines of kernels that cells show: pieces of files, and diffs."""
    count = 0
    for cell in notebook["cells"]:
        for data in (output.get("data", {}) for output in cell.get("outputs", ())):
            pieces = re.findall(r"```c\+\+\n(.*?)```", "".join(data.get("text/markdown", "")), re.S)
            rows = re.findall(r"<div(?: style=\"background[^>]*)?>", "".join(data.get("text/html", "")))
            count += sum(piece.count("\n") for piece in pieces) + len(rows)
    return count


def minutes(path: Path, notebook: Mapping[str, Any]) -> tuple[int, int]:
    """Estimate the minutes to read and run a notebook, and those for its exercises."""
    reading = words(notebook) / WORDS_A_MINUTE + lines(notebook) / LINES_A_MINUTE + listed(notebook) / LISTED_A_MINUTE
    reading = READERS_SAY.get(number_of(path.name), reading)
    return STEP * math.ceil(reading / STEP), exercise.minutes(path.name)


def stage_of(path: Path) -> int:
    """Return the number of a notebook's stage: 4 for 04 and for 04b."""
    return int(number_of(path.name)[:2])


def kernel_of(path: Path) -> str:
    """Return the kernel named after a workshop: 15_fp16x3.cu for 15b_fp16x3; "" if the kernel is its stage's."""
    number, _, idea = path.stem.partition("_")
    return f"{number[:2]}_{idea}.cu" if number[2:] else ""


def _stages(number: int, kernel: str = "") -> list[Rung]:
    """List a notebook's stages, by its kernel or its number; those for one architecture only if there are no others."""
    if own := [stage for stage in LADDER.values() if stage.file == kernel]:
        return own
    stages = [stage for stage in LADDER.values() if stage.number == USES.get(number, number)]
    return [stage for stage in stages if not stage.only_cc] or stages


def works_on(number: int, kernel: str = "") -> str:
    """Describe which GPUs run a number's stage, or a workshop's kernel, from the table of stages."""
    stage = next(iter(_stages(number, kernel)), None)
    least = stage.min_cc if stage else 0
    all_types = max(least, 80 if stage and "bfloat16" in stage.dtypes else 0)  # the notebook uses both half types
    names = [name for name, capability in GPUS.items() if capability >= all_types]
    if stage and stage.only_cc:
        return f"the CPU, without a GPU; NVIDIA GPUs of compute capability {least / 10}, such as H100 and H200"
    text = f"the CPU, without a GPU; NVIDIA GPUs such as {', '.join(names[:-1])} and {names[-1]}"
    half = [name for name, capability in GPUS.items() if least <= capability < all_types]
    return f"{text}; its kernel in float16 on {' and '.join(half)} too" if half else text


def generated(path: Path, notebook: Mapping[str, Any]) -> str:
    """Write the generated lines of a notebook's first screen."""
    read, do = minutes(path, notebook)
    exercises = sum(one.notebook == number_of(path.name) for one in exercise.GRADERS.values())
    todo = f"{do} for {exercises} exercise{'s' * (exercises != 1)}" if exercises else "no exercises"
    where = works_on(stage_of(path), kernel_of(path))
    return (
        f"{MARK}\n**Minutes:** {read} to read and run, {todo}.<br>\n**Works on:** {where}.<br>\n"
        f"**Read on:** [references](references.md#{path.stem})." + _opens(path.name)
    )


def _opens(notebook: str) -> str:
    """Write the line of links that open the notebook; "" while the course is not published."""
    if not web_address.is_published():
        return ""
    links = " · ".join(f"[{name}]({link})" for name, link in web_address.open_in(notebook).items())
    return f"<br>\n**Open in:** {links}"


# How a first code cell begins: in the old form, and up to the last line of the new one.
_OPENING = re.compile(
    r"""\Aimport sys\n\nsys\.path\.insert\(0, "\.\."\)[^\n]*\n"""
    r"""(?:try:\n    import helpers\n.*?    colab\.set_up\([^\n]*\)\n)?""",
    re.S,
)


def opening(number: int, kernel: str = "") -> str:
    """Write the first lines of a notebook's first cell: they find the course, or fetch it if only the notebook exists.

    number, kernel: they decide which GPU the notebook needs.
    """
    stages = _stages(number, kernel)
    least = max((max(stage.min_cc, 80 if "bfloat16" in stage.dtypes else 0) for stage in stages), default=0)
    needs = f"least={least}" * (least > 0) + ", only=True" * any(stage.only_cc for stage in stages)
    address = web_address.address() if web_address.is_published() else ""
    return f"""import sys

sys.path.insert(0, "..")  # where this notebook was not opened by course.py
try:
    import helpers
except ModuleNotFoundError:  # opened alone, as in Colab: the course is fetched
    import os
    from subprocess import run

    REPOSITORY = os.environ.get("COURSE_REPOSITORY") or "{address}"
    said = "" if REPOSITORY else "none is set"
    if REPOSITORY and not os.path.isdir("course"):
        clone = ["git", "clone", "-q", "--depth", "1", REPOSITORY, "course"]
        try:
            said = run(clone, capture_output=True, text=True).stderr.partition("\\n")[0]
        except OSError:
            said = "git is not installed"
    if not os.path.isdir("course"):
        wanted = 'This notebook needs the rest of the course: write its address into this cell, REPOSITORY = "...", '
        wanted += f"or upload its folder to {{os.getcwd()}} under the name course ({{said}})."
        in_one_line = {{"_render_traceback_": lambda self: [str(self)]}}
        raise type("CourseMissing", (ImportError,), in_one_line)(wanted) from None
    sys.path.insert(0, "course")
    from helpers.lesson import colab

    colab.set_up({needs})
"""


def first_code(path: Path, notebook: Mapping[str, Any]) -> str:
    """Return the first code cell with up-to-date generated lines.

    Raises:
        ValueError: it does not begin like a first code cell.
    """
    source = next(_source(cell) for cell in notebook["cells"] if cell["cell_type"] == "code")
    text, count = _OPENING.subn(lambda _: opening(stage_of(path), kernel_of(path)), source, count=1)
    if count != 1:
        raise ValueError(
            f'{path.name}: the first code cell does not begin with import sys and sys.path.insert(0, "..")'
        )
    return text


BADGES = re.compile(r"<!-- badges: made by helpers\.site\.first_screen -->\n.*?<!-- end of badges -->\n", re.S)


def badges() -> str:
    """Write README's line of badges, between its markers; empty while the course is not published."""
    shown = {
        "Colab": "https://colab.research.google.com/assets/colab-badge.svg",
        "Binder": "https://mybinder.org/badge_logo.svg",
        "Codespaces": "https://github.com/codespaces/badge.svg",
    }
    links = web_address.open_in("00_attention.ipynb")
    line = " ".join(f"[![open in {name}]({image})]({links[name]})" for name, image in shown.items())
    inside = f"{line}\n" if web_address.is_published() else ""
    return f"<!-- badges: made by helpers.site.first_screen -->\n{inside}<!-- end of badges -->\n"


def screen(path: Path, notebook: Mapping[str, Any]) -> str:
    """Return the title cell with up-to-date generated lines.

    Raises:
        ValueError: the cell lacks the markers.
    """
    text, count = re.subn(
        rf"{MARK}.*?(?=\n\n|\Z)",
        lambda _: generated(path, notebook),
        _source(notebook["cells"][0]),
        flags=re.S,
    )
    if count != 1:
        raise ValueError(f"{path.name}: the title cell has {count} places for {MARK}, expected one")
    return text


def write() -> list[str]:
    """Update first screens, first code cells and README's badges. Returns the names of the changed files."""
    changed = []
    readme = README.read_text(encoding="utf-8")
    if BADGES.sub(lambda _: badges(), readme) != readme:
        README.write_text(BADGES.sub(lambda _: badges(), readme), encoding="utf-8")
        changed.append(README.name)
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        before = json.dumps(notebook)
        code = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
        code["metadata"] = {"jupyter": {"source_hidden": True}, **code["metadata"]}
        for cell, text in ((notebook["cells"][0], screen(path, notebook)), (code, first_code(path, notebook))):
            cell["source"] = text.splitlines(keepends=True)
        if json.dumps(notebook) != before:
            path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            changed.append(path.name)
    return changed


def _plain(cell: Mapping[str, Any]) -> str:
    return re.sub(rf"{MARK}.*?(?=\n\n|\Z)|<!--.*?-->", "", _source(cell), flags=re.S)


def _source(cell: Mapping[str, Any]) -> str:
    return "".join(cell["source"])


if __name__ == "__main__":
    print("\n".join(write()) or "all up to date")
