"""A notebook as a page: links lead to pages, collapsed cells are folded, exercises have a folded solution."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from helpers.lesson.exercises import holes
from helpers.site import first_screen, guesses
from helpers.site.links import ROOT, Links

Notebook = dict[str, Any]
FOLDER = ROOT / "notebooks"


def paths() -> list[Path]:
    """List all notebooks in order."""
    return sorted(FOLDER.glob("*.ipynb"))


def read(path: Path) -> Notebook:
    """Read a notebook, and join the lines of each source and each output text."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
    return notebook


def title(notebook: Mapping[str, Any]) -> str:
    """Return a notebook's first line, without the #."""
    return notebook["cells"][0]["source"].partition("\n")[0].removeprefix("# ").strip()


def idea(notebook: Mapping[str, Any]) -> str:
    """Return the paragraph below a notebook's title as one line."""
    return " ".join(notebook["cells"][0]["source"].split("\n\n")[1].split())


def moving_figure(path: Path) -> str:
    """Return the HTML of a notebook's first moving figure.

    Raises:
        LookupError: it has none.
    """
    for cell in read(path)["cells"]:
        for output in cell.get("outputs", ()):
            markup = "".join(output.get("data", {}).get("text/html", ""))
            if 'class="moving"' in markup:
                return markup
    raise LookupError(f"{path.name} shows no moving figure")


def page(path: Path, links: Links) -> Notebook:
    """Prepare a notebook for MyST-NB: translate links, and insert a box for each question of `predict`.

    Raises:
        ValueError: a link is broken.
    """
    file = path.relative_to(ROOT).as_posix()
    notebook = read(path)
    notebook["cells"] = [new for cell in notebook["cells"] for new in _cells(cell, links, file)]
    first = notebook["cells"][0]
    own = f"<a href='{path.name}' download>this notebook</a>"  # the file itself is next to its page
    first["source"] = re.sub(
        r"^(\*\*Read on:\*\*.*?)(<br>)?$", rf"\1<br>\n**Download:** {own}.\2", first["source"], flags=re.M
    )
    return notebook


def _cells(cell: Notebook, links: Links, file: str) -> Iterator[Notebook]:
    if cell["cell_type"] == "markdown":
        yield {**cell, "source": links.rewrite(cell["source"].replace(first_screen.MARK + "\n", ""), file)}
        return
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        if "text/markdown" in data:
            data["text/markdown"] = links.rewrite("".join(data["text/markdown"]), file)
    if "outputs" in cell:
        cell["outputs"] = [new for output in _joined(cell["outputs"]) for new in guesses.with_boxes(output)]
    yield {**cell, "metadata": _described(_folded(cell), cell)}
    if exercise := re.match(r"%%cuda[ \t]+(\w+)", cell["source"]):
        yield _solution(exercise[1], cell["id"])


def _folded(cell: Notebook) -> dict[str, Any]:
    """Return metadata that makes MyST-NB fold what the notebook collapses, with a label."""
    source, hidden = cell["source"], cell["metadata"].get("jupyter", {})
    if source.startswith("import sys\n"):
        return {"tags": ["hide-input"], "mystnb": {"code_prompt_show": "Set-up", "code_prompt_hide": "Set-up"}}
    names = {"source_hidden": "hide-input", "outputs_hidden": "hide-output"}
    tags = [tag for name, tag in names.items() if hidden.get(name)]
    if not tags:
        return {}
    what = "the answer" if ".answer(" in source else "the output" if tags == ["hide-output"] else "the code"
    if len(tags) == 2:
        tags = ["hide-cell"]
        what = "the answer" if ".answer(" in source else "the code and its output"
    return {"tags": tags, "mystnb": {"code_prompt_show": f"Show {what}", "code_prompt_hide": f"Hide {what}"}}


def _joined(outputs: list[Notebook]) -> list[Notebook]:
    """Join consecutive pieces of printed text in the outputs."""
    joined: list[Notebook] = []
    for output in outputs:
        if output["output_type"] == "stream":
            output = {**output, "text": "".join(output["text"])}
            if joined and joined[-1]["output_type"] == "stream" and joined[-1]["name"] == output["name"]:
                joined[-1]["text"] += output["text"]
                continue
        joined.append(output)
    return joined


def _described(metadata: dict[str, Any], cell: Notebook) -> dict[str, Any]:
    """Add alternative text to a cell's metadata: what its picture prints if it cannot be displayed."""
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        if "image/png" in data:
            words = "".join(data.get("text/plain", "")).strip("<>").removeprefix("picture: ")
            shown = {**metadata.get("mystnb", {}), "image": {"alt": words or "a figure"}}
            return {**metadata, "mystnb": shown}
    return metadata


def _solution(name: str, cell_id: str) -> Notebook:
    """Make a folded cell with our solution, and mark the learner's lines."""
    ours, skeleton = holes.ours(name).rstrip("\n"), holes.skeleton(name)
    blocks = difflib.SequenceMatcher(None, skeleton.splitlines(), ours.splitlines(), autojunk=False).get_opcodes()
    marked = [f"{j1 + 1}-{j2}" for kind, _, _, j1, j2 in blocks if kind != "equal" and j2 > j1]
    option = f":emphasize-lines: {','.join(marked)}\n" if marked else ""
    source = (
        "<details class='solution'><summary>Show a solution</summary>\n\n"
        f"````{{code-block}} c++\n{option}\n{ours}\n````\n\n</details>"
    )
    return {"cell_type": "markdown", "id": f"{cell_id}-solution"[:64], "metadata": {}, "source": source}
