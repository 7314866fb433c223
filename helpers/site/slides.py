"""Slides for three lectures: the notebooks' questions, answers and pictures, in order.

    python3 -m helpers.site.slides [FOLDER]        # HTML files, which load reveal.js from the net

They come from the committed notebooks, so a slide shows what the notebook shows; the notebook's text says the rest.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from helpers.lesson.exercises.holes import number_of
from helpers.site import notebook_pages

LECTURES = {
    "1_why_flash_attention_is_fast": ("00", "01", "02", "03"),
    "2_registers_and_masks": ("04", "05"),
    "3_tensor_cores": ("06", "07"),
}
_QUESTION = re.compile(r'predict\(\s*"([^"]+)"(?:[^)]*?unit="([^"]+)")?')


def slides(notebook: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Return the cells of a notebook's slides: title and idea, then questions, answers and pictures by heading."""
    heading, names = f"## {notebook_pages.title(notebook)}", []
    yield _words(f"{heading}\n\n{notebook_pages.idea(notebook)}")
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            heading = "\n".join(re.findall(r"^##+ .*", cell["source"], re.M)[-1:]) or heading
            continue
        for name, unit in _QUESTION.findall(cell["source"]):
            names.append(name)
            yield _words(f"{heading}\n\n**{name}{unit and f': how many {unit}'}?**")
        for output in cell["outputs"]:
            for line in "".join(output.get("text", "")).splitlines() if ".answer(" in cell["source"] else ():
                if line.startswith(tuple(f"{name}: " for name in names)) and "guess=" not in line:
                    yield _words(line.split(". ")[0], "fragment")
            if "image/png" in output.get("data", {}):
                yield _words(heading)
                picture = {**output, "data": {"image/png": output["data"]["image/png"]}}
                yield {**_words("", "-"), "cell_type": "code", "execution_count": None, "outputs": [picture]}


def _words(source: str, kind: str = "slide") -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {"slideshow": {"slide_type": kind}}, "source": source}


def write(folder: Path) -> list[Path]:
    """Write one HTML file for each lecture."""
    from nbconvert import SlidesExporter  # comes with JupyterLab, which this module's other users do not need

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, numbers in LECTURES.items():
        notebooks = [notebook_pages.read(path) for path in notebook_pages.paths() if number_of(path.name) in numbers]
        content = {"cells": [cell for one in notebooks for cell in slides(one)], "metadata": {"title": name[2:]}}
        notebook = io.StringIO(json.dumps({**content, "nbformat": 4, "nbformat_minor": 4}))
        page, _ = SlidesExporter(exclude_input=True, exclude_output_prompt=True).from_file(notebook)
        written.append(folder / f"{name}.html")
        written[-1].write_text(page, encoding="utf-8")
    return written


if __name__ == "__main__":
    try:
        print("\n".join(map(str, write(Path((sys.argv[1:] or ["book/slides"])[0])))))
    except (ModuleNotFoundError, OSError) as error:
        print(f"no slides: {error}", file=sys.stderr)
        sys.exit(2)
