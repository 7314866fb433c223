"""The first screen of a notebook: the two lines that follow from its text, its exercises and the table of stages.

    python3 -m helpers.pages        # writes them into all notebooks, in place of what stands between the marks

A title cell has them between `<!-- made by helpers.pages -->` and the next empty line. `tests/test_notebooks.py` holds
them against what is made here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helpers.exercises import exercise
from helpers.ladder import LADDER

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
MARK = "<!-- made by helpers.pages -->"
# A reader new to CUDA took 45 to 90 minutes for 2,400 to 3,600 words, 170 to 300 lines and one exercise.
WORDS_A_MINUTE, LINES_A_MINUTE = 80, 10
STEP = 5  # minutes are given in multiples of it
GPUS = {"T4": 75, "A100": 80, "L4": 89, "H100": 90}  # name -> compute capability


def words(notebook: Mapping[str, Any]) -> int:
    """The words of its prose: of markdown cells, formulas and tables included, comments left out."""
    return sum(len(_plain(cell).split()) for cell in notebook["cells"] if cell["cell_type"] == "markdown")


def lines(notebook: Mapping[str, Any]) -> int:
    """The lines of its code cells, empty ones and exercises left out."""
    sources = [_source(cell) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return sum(bool(line.strip()) for text in sources if not text.startswith("%%") for line in text.splitlines())


def minutes(path: Path, notebook: Mapping[str, Any]) -> tuple[int, int]:
    """To read a notebook and run it, and to do its exercises."""
    reading = words(notebook) / WORDS_A_MINUTE + lines(notebook) / LINES_A_MINUTE
    return STEP * math.ceil(reading / STEP), exercise.minutes(path.name[:2])


def works_on(number: int) -> str:
    """Where the stage of a number runs, from the table of stages."""
    stage = next((stage for stage in LADDER.values() if stage.number == number), None)
    least = stage.min_cc if stage else 0
    all_types = max(least, 80 if stage and "bfloat16" in stage.dtypes else 0)  # what a notebook shows both types on
    names = [name for name, capability in GPUS.items() if capability >= all_types]
    if stage and stage.only_cc:
        return f"the CPU, without a GPU; NVIDIA GPUs of compute capability {least / 10}, such as H100 and H200"
    text = f"the CPU, without a GPU; NVIDIA GPUs such as {', '.join(names[:-1])} and {names[-1]}"
    half = [name for name, capability in GPUS.items() if least <= capability < all_types]
    return f"{text}; its kernel in float16 on {' and '.join(half)} too" if half else text


def generated(path: Path, notebook: Mapping[str, Any]) -> str:
    """The lines of a notebook's first screen that nobody writes by hand."""
    read, do = minutes(path, notebook)
    exercises = sum(name.startswith(path.name[:2]) for name in exercise.GRADERS)
    todo = f"{do} for {exercises} exercise{'s' * (exercises != 1)}" if exercises else "no exercises"
    return f"{MARK}\n**Minutes:** {read} to read and run, {todo}.<br>\n**Works on:** {works_on(int(path.name[:2]))}."


def screen(path: Path, notebook: Mapping[str, Any]) -> str:
    """The title cell with its generated lines as they should be.

    Raises:
        ValueError: the cell has no place for them.
    """
    text, count = re.subn(
        rf"(?:{MARK}|<!-- generated -->).*?(?=\n\n|\Z)",
        lambda _: generated(path, notebook),
        _source(notebook["cells"][0]),
        flags=re.S,
    )
    if count != 1:
        raise ValueError(f"{path.name}: the title cell has {count} places for {MARK}, expected one")
    return text


def write() -> list[str]:
    """Bring the first screens up to date. Returns the names of the notebooks that changed."""
    changed = []
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        text = screen(path, notebook)
        if text != _source(notebook["cells"][0]):
            notebook["cells"][0]["source"] = text.splitlines(keepends=True)
            path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            changed.append(path.name)
    return changed


def _plain(cell: Mapping[str, Any]) -> str:
    return re.sub(r"<!--.*?-->", "", _source(cell), flags=re.S)


def _source(cell: Mapping[str, Any]) -> str:
    return "".join(cell["source"])


if __name__ == "__main__":
    print("\n".join(write()) or "all up to date")
