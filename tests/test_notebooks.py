"""The form of the notebooks: executed, in order, complete, free of this machine's paths, and true to the kernels."""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import functools
import importlib.util
import io
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nbval.plugin import get_sanitize_patterns

from helpers.attention import flash_attention, flash_attention_backward
from helpers.device import ON_GPU
from helpers.lesson import show
from helpers.lesson.exercises import exercise
from helpers.lesson.exercises.holes import number_of
from helpers.site import first_screen

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
MOST_BYTES = 600_000

# The headings (##) of every stage, in this order, except those in ANYWHERE; a heading may continue after these words,
# and others may come in between. An exercise comes before the kernel that it prepares, or at the end.
SECTIONS = (
    "What it costs today",
    "The idea",
    "Predict",
    "Read the kernel",
    "Launch it",
    "Check",
    "Look inside",
    "Break it",
    "Measure",
    "Exercise",
    "What limits us now",
)
ANYWHERE = "Exercise", "Measure"
# Workshops, and notebooks with several kernels or none, have these and any others; 10b breaks the kernel of 10.
ALWAYS = "Break it", "What limits us now"
OTHERS = {"00", "04", "04b", "07b", "08", "08b", "09", "10", "10b", "11", "14", "15", "15b", "16", "17"}

# Limits on words of prose. Some notebooks have a lower limit than the others, and three still exceed it.
MOST_WORDS = {"00": 1620, "01": 1375, "03": 1850, "05": 1600, "09": 1860, "11": 1670, "14": 1720, "17": 1660}
MOST_WORDS_OF_OTHERS = 1700
MOST_WORDS_OF_TITLE = 190
MOST_CELLS = 85
# Rewritten notebooks: printed sentences count as prose, and no cell has many lines of code.
TOLD_AGAIN = {"04", "04b", "07", "07b", "08", "08b", "10", "10b", "16"}
MOST_CELLS_TOLD_AGAIN, MOST_LINES_OF_A_CELL, MOST_COLUMNS = 45, 30, 100
TAGS = {"nbval-ignore-output", "nbval-skip", "skip-execution", "raises-exception"}
MACHINE_PATH = re.compile(r"(?<![\w.\])}-])/(?:home|root|tmp|work|usr|Users|mnt|opt|var|private|builds?)/\w|[A-Z]:\\\w")
ADDRESS = re.compile(r"\b0x[0-9a-f]{9,}\b")  # longer than a kernel's 32-bit constant
CAPTION = re.compile(r"\[(\S+?)\]\(\.\./kernels/\1\), lines (\d+)–(\d+)(?:, without (.+?))?:\n")

Notebook = dict[str, Any]


@functools.cache
def read(path: Path) -> Notebook:
    return json.loads(path.read_text(encoding="utf-8"))


def text(lines: str | list[str]) -> str:
    return lines if isinstance(lines, str) else "".join(lines)


def tags(cell: Notebook) -> set[str]:
    return set(cell["metadata"].get("tags", ()))


def code_cells(notebook: Notebook) -> list[Notebook]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def output_texts(cell: Notebook) -> Iterator[tuple[str, str]]:
    """Return (kind, text) of everything that a cell printed or displayed, without pictures."""
    for output in cell.get("outputs", ()):
        if output["output_type"] == "stream":
            yield output["name"], text(output["text"])
        elif output["output_type"] == "error":
            yield "error", "\n".join(output["traceback"])
        for kind, data in output.get("data", {}).items():
            if not kind.startswith("image/"):
                yield kind, text(data)


# ------------------------------------------------------------------------------------ the rules, one function each
# Each yields what is wrong. `path` is the notebook's place; the notebook itself may be a changed copy.


def executed(notebook: Notebook, path: Path) -> Iterator[str]:
    for number, cell in enumerate(code_cells(notebook), start=1):
        if not text(cell["source"]).strip():
            yield f"cell {cell['id']} is empty"
        if cell["execution_count"] != number:
            count = cell["execution_count"]
            yield f"cell {cell['id']} has execution_count {count}, expected {number}: run all cells, once"
        for kind, _ in output_texts(cell):
            if kind == "error" and "raises-exception" not in tags(cell):
                yield f"cell {cell['id']} ends in an exception"
            if kind == "stderr":
                yield f"cell {cell['id']} writes to stderr, which nbval compares"


def has_title(notebook: Notebook, path: Path) -> Iterator[str]:
    first = notebook["cells"][0]
    if first["cell_type"] != "markdown" or not text(first["source"]).startswith(f"# {number_of(path.name)} · "):
        yield f"the first cell is not the title '# {number_of(path.name)} · ...'"


def has_sections(notebook: Notebook, path: Path) -> Iterator[str]:
    cells = (text(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    headings = [line[3:] for cell in cells for line in re.findall(r"^## .*$", cell, re.M)]
    at = -1
    for section in SECTIONS:
        places = [i for i, heading in enumerate(headings) if heading.startswith(section)]
        number = number_of(path.name)
        if not places and number in OTHERS and (section not in ALWAYS or (number, section) == ("10", "Break it")):
            continue
        after = -1 if section in ANYWHERE else at
        if not places or places[-1] <= after:
            yield f"no heading '## {section}' after {headings[at] if at >= 0 else 'the title'!r}; there are {headings}"
        elif section not in ANYWHERE:
            at = next(place for place in places if place > at)


def finds_helpers(notebook: Notebook, path: Path) -> Iterator[str]:
    """Check that it finds helpers when it was not opened by course.py, and when it was fetched alone."""
    try:
        current = first_screen.first_code(path, notebook) == text(code_cells(notebook)[0]["source"])
    except ValueError as error:
        yield str(error)
    else:
        if not current:
            yield "the lines that find the course are old: run python3 -m helpers.site.first_screen"
        if not code_cells(notebook)[0]["metadata"].get("jupyter", {}).get("source_hidden"):
            yield "the set-up cell is not collapsed: run python3 -m helpers.site.first_screen"


def speaks_of_no_machine(notebook: Notebook, path: Path) -> Iterator[str]:
    for cell in notebook["cells"]:
        for where, words in (("source", text(cell["source"])), *output_texts(cell)):
            if match := MACHINE_PATH.search(words):
                yield f"cell {cell['id']}, {where}: a path of one machine: {words[match.start() :][:60]!r}"
            if where != "source" and (match := ADDRESS.search(words)):
                yield f"cell {cell['id']}, {where}: an address: {match[0]}"


def is_small_and_plain(notebook: Notebook, path: Path) -> Iterator[str]:
    size = len(json.dumps(notebook, ensure_ascii=False))
    if size > MOST_BYTES:
        yield f"{size:,} bytes, at most {MOST_BYTES:,}: fewer or smaller pictures"
    if (notebook["nbformat"], notebook["nbformat_minor"] >= 5) != (4, True):
        yield "not nbformat 4.5: cells have no ids"
    name = notebook["metadata"].get("kernelspec", {}).get("name")
    if name != "python3" or set(notebook["metadata"]) - {"kernelspec", "language_info"}:
        yield f"metadata {notebook['metadata']}: expected the kernelspec python3 and nothing of one machine"
    ids = [cell["id"] for cell in notebook["cells"]]
    if len(set(ids)) != len(ids):
        yield "two cells have the same id"
    for cell in notebook["cells"]:
        collapsed = cell["metadata"].get("jupyter", {})
        is_known = set(collapsed) <= {"outputs_hidden", "source_hidden"} and set(collapsed.values()) <= {True}
        if set(cell["metadata"]) - {"tags", "jupyter"} or tags(cell) - TAGS or not is_known:
            yield f"cell {cell['id']}: metadata {cell['metadata']}"
        if any("widget" in kind for kind, _ in output_texts(cell)):
            yield f"cell {cell['id']} shows a widget, which nobody sees who only reads"


def is_compared(notebook: Notebook, path: Path) -> Iterator[str]:
    free = [cell["id"] for cell in code_cells(notebook) if "nbval-ignore-output" in tags(cell)]
    if len(free) > len(code_cells(notebook)) / 4:
        yield f"nbval compares too little: {free} are left out"


def links_resolve(notebook: Notebook, path: Path) -> Iterator[str]:
    for cell in notebook["cells"]:
        texts = [words for kind, words in output_texts(cell) if kind == "text/markdown"]
        if cell["cell_type"] == "markdown":
            texts.append(text(cell["source"]))
        for target in re.findall(r"\]\(([^)\s]+)\)", "\n".join(texts)):
            if not re.match(r"https?://|#", target) and not (path.parent / target.partition("#")[0]).exists():
                yield f"cell {cell['id']} links to {target}, which is not there"


def shows_the_kernels_of_today(notebook: Notebook, path: Path) -> Iterator[str]:
    for cell in notebook["cells"]:
        for kind, words in output_texts(cell):
            caption = CAPTION.match(words) if kind == "text/markdown" else None
            if not caption:
                continue
            without = re.findall("`(.+?)`", caption[4] or "")
            if words != show.code(caption[1], (int(caption[2]), int(caption[3])), without=without).markdown:
                yield f"cell {cell['id']} shows {caption[1]} as it no longer is: run the notebook again"


@functools.cache
def kernel_lines() -> set[str]:
    kernels = [file.read_text(encoding="utf-8") for file in (ROOT / "kernels").rglob("*.cu*")]
    return {line.strip() for kernel in kernels for line in kernel.splitlines() if len(line.strip()) > 12}


def copies_no_kernel(notebook: Notebook, path: Path) -> Iterator[str]:
    """Yield three consecutive lines that are also in a kernel file: a copy, which would age; show.code makes none."""
    for cell in notebook["cells"]:
        source = text(cell["source"])
        if source.startswith("%%cuda"):
            continue
        lines = [line.strip() in kernel_lines() for line in source.splitlines() if line.strip()]
        if any(all(lines[i : i + 3]) for i in range(len(lines) - 2)):
            yield f"cell {cell['id']} holds a copy of a kernel's lines: use show.code"


def holds_the_skeletons(notebook: Notebook, path: Path) -> Iterator[str]:
    for cell in code_cells(notebook):
        source = text(cell["source"])
        if magic := re.match(r"%%cuda[ \t]*(\S*)", source):
            if magic[1] not in exercise.GRADERS:
                yield f"cell {cell['id']}: no exercise {magic[1]!r}"
            elif source != exercise.cell(magic[1]):
                yield f"cell {cell['id']} is not the skeleton of kernels/exercises/{magic[1]}.cu"
            elif max(map(len, source.splitlines())) > MOST_COLUMNS:
                yield f"cell {cell['id']} has a line of more than {MOST_COLUMNS} columns"
            elif "[FAIL]" not in "".join(words for _, words in output_texts(cell)):
                yield f"cell {cell['id']} does not show how the skeleton fails"


def has_first_screen(notebook: Notebook, path: Path) -> Iterator[str]:
    """Check that a notebook begins with prerequisites, outcomes, minutes and where it runs."""
    title = text(notebook["cells"][0]["source"])
    for part in ("**You need:**", "**You will be able to:**", "[Glossary](glossary.md)"):
        if part not in title:
            yield f"the title cell lacks {part!r}"
    bullets = re.findall(r"^- .+$", title.partition("**You will be able to:**")[2], re.M)
    if not 3 <= len(bullets) <= 5:
        yield f"{len(bullets)} things that one will be able to do, expected 3 to 5"
    if len(title.split()) > MOST_WORDS_OF_TITLE:
        yield f"the first screen has {len(title.split())} words, at most {MOST_WORDS_OF_TITLE}"
    try:
        current = first_screen.screen(path, notebook) == title
    except ValueError as error:
        yield str(error)
    else:
        if not current:
            yield "minutes or devices of the first screen are old: run python3 -m helpers.site.first_screen"


def is_short(notebook: Notebook, path: Path) -> Iterator[str]:
    count, most = first_screen.words(notebook), MOST_WORDS.get(number_of(path.name), MOST_WORDS_OF_OTHERS)
    if count > most:
        yield f"{count} words of prose, at most {most}: cut"
    if len(notebook["cells"]) > MOST_CELLS:
        yield f"{len(notebook['cells'])} cells, at most {MOST_CELLS}"


def printed_words(cell: Notebook) -> int:
    """Return the words of the sentences that a cell printed: lines of at least eight words that end like a sentence.

    The messages of `predict` instead of its box, its verdict, and a grader's messages about a skeleton do not count.
    """
    if text(cell["source"]).startswith("%%cuda"):
        return 0
    lines = (line for kind, words in output_texts(cell) if kind == "stdout" for line in words.splitlines())
    own = re.compile(r"after guess=|No guess yet\.$")
    sentences = (line for line in lines if line.rstrip().endswith((".", "?")) and not own.search(line))
    return sum(len(line.split()) for line in sentences if len(line.split()) >= 8)


def is_told_again(notebook: Notebook, path: Path) -> Iterator[str]:
    """At most 45 cells, 1,700 words including printed prose, 30 lines of code a cell, 100 columns."""
    if number_of(path.name) not in TOLD_AGAIN:
        return
    count = first_screen.words(notebook) + sum(map(printed_words, code_cells(notebook)))
    if count > MOST_WORDS_OF_OTHERS:
        yield f"{count} words, printed prose counted, at most {MOST_WORDS_OF_OTHERS}: cut"
    if len(notebook["cells"]) > MOST_CELLS_TOLD_AGAIN:
        yield f"{len(notebook['cells'])} cells, at most {MOST_CELLS_TOLD_AGAIN}"
    for cell in code_cells(notebook)[1:]:
        lines = text(cell["source"]).splitlines()
        if not lines[0].startswith("%%cuda") and sum(map(bool, map(str.strip, lines))) > MOST_LINES_OF_A_CELL:
            yield f"cell {cell['id']} has more than {MOST_LINES_OF_A_CELL} lines of code"
        if not cell["metadata"].get("jupyter", {}).get("source_hidden") and max(map(len, lines)) > MOST_COLUMNS:
            yield f"cell {cell['id']} has a line of more than {MOST_COLUMNS} columns"


def asks_before_it_tells(notebook: Notebook, path: Path) -> Iterator[str]:
    """Each prediction is a line to write a number into, and its answer comes later, in a collapsed cell."""
    cells = code_cells(notebook)
    asked: dict[str, int] = {}
    for number, cell in enumerate(cells):
        for name in re.findall(r"^(\w+) = predict\(", text(cell["source"]), re.M):
            asked[name] = number
            if "guess=..." not in text(cell["source"]):
                yield f"cell {cell['id']} ships with a guess"
    answered = {}
    for number, cell in enumerate(cells):
        for name in re.findall(r"\b(\w+)\.answer\(", text(cell["source"])):
            answered[name] = number
            if not cell["metadata"].get("jupyter", {}).get("outputs_hidden"):
                yield f"cell {cell['id']} shows the answer {name}: set jupyter.outputs_hidden"
    if not 3 <= len(asked) <= 6:
        yield f"{len(asked)} predictions, expected 3 to 6"
    for name, number in asked.items():
        if answered.get(name, -1) <= number:
            yield f"the prediction {name} has no answer in a later cell"
    boards = [n for n, cell in enumerate(cells) if re.search(r"^board\(\)$", text(cell["source"]), re.M)]
    if len(boards) != 1 or boards[0] <= max(answered.values(), default=-1):
        yield "no board() after the last answer"
    prose = "\n".join(text(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    if match := re.search(r"\*+Predict:", prose):
        yield f"{prose[match.start() :][:60]!r}: ask by predict(), or ask a plain question"


def says_what_a_guess_takes(notebook: Notebook, path: Path) -> Iterator[str]:
    """The question before a guess says whether it can be counted, or only estimated."""
    cells = notebook["cells"]
    for before, cell in itertools.pairwise(cells):
        asks = "= predict(" in text(cell["source"])
        if asks and not re.search(r"\((?:count it|gut feeling)\b", text(before["source"])):
            yield f"the question before {cell['id']} does not say (count it) or (gut feeling)"


def answers_below_its_guess(notebook: Notebook, path: Path) -> Iterator[str]:
    """There is no code cell between a guess and its answer, since it might reveal the answer; the text says so."""
    cells = code_cells(notebook)
    for number, cell in enumerate(cells):
        for name in re.findall(r"^(\w+) = predict\(", text(cell["source"]), re.M):
            after = (at for at, later in enumerate(cells) if at > number and f"{name}.answer(" in text(later["source"]))
            between = next(after, number + 1) - number - 1
            if between:
                yield f"cell {cell['id']}: {between} code cells between the guess {name} and its answer"


def defined(tree: ast.AST) -> set[str]:
    """Return the names that a cell defines, including functions, their parameters and imports."""
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    names |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    aliases = [a for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names]
    names |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    return names | {a.asname or a.name.partition(".")[0] for a in aliases}


def needs_no_folded_cell(notebook: Notebook, path: Path) -> Iterator[str]:
    """JupyterLab's arrow keys skip cells with a folded source: later cells run without them."""
    elsewhere: set[str] = set(dir(builtins)) | {"get_ipython", "display"}
    folded: dict[str, str] = {}
    for cell in code_cells(notebook):
        source = text(cell["source"])
        if source.startswith("%%"):
            continue
        tree = ast.parse(re.sub(r"^[%!].*$", "pass", source, flags=re.M))
        read = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
        made = defined(tree)
        for name in dict.fromkeys(read):
            if name in folded and name not in elsewhere | made:
                yield f"cell {cell['id']} needs {name} of the folded cell {folded[name]}"
        if ".answer(" in source:
            folded |= dict.fromkeys(made - elsewhere, cell["id"])
        else:
            elsewhere |= made


def shows_tables_that_fit(notebook: Notebook, path: Path) -> Iterator[str]:
    """JupyterLab breaks lines of more than about 105 characters, which would destroy a text table."""
    for cell in code_cells(notebook):
        for kind, words in output_texts(cell):
            wide = [line for line in words.split("\n") if len(line) > 105 and len(re.findall(r"\S {2,}\S", line)) > 1]
            plain = kind == "stdout" and not text(cell["source"]).startswith("%%")
            if plain and len(wide) > 2:
                width = max(map(len, wide))
                yield f"cell {cell['id']} prints a table of {width} columns: narrower, or show.table(text)"


def labels_folded_outputs(notebook: Notebook, path: Path) -> Iterator[str]:
    """JupyterLab shows the first line of a folded output."""
    for cell in code_cells(notebook):
        for kind, words in output_texts(cell):
            first = next(filter(None, words.split("\n")), "")
            if kind == "text/html" and len(first) > 90:
                yield f"cell {cell['id']}: HTML that begins with a line of {len(first)} characters: run it again"


RULES: tuple[Callable[[Notebook, Path], Iterator[str]], ...] = (
    executed,
    has_title,
    has_sections,
    finds_helpers,
    speaks_of_no_machine,
    is_small_and_plain,
    is_compared,
    links_resolve,
    shows_the_kernels_of_today,
    copies_no_kernel,
    holds_the_skeletons,
    has_first_screen,
    is_short,
    is_told_again,
    asks_before_it_tells,
    says_what_a_guess_takes,
    answers_below_its_guess,
    needs_no_folded_cell,
    shows_tables_that_fit,
    labels_folded_outputs,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_form(path: Path, rule: Callable[[Notebook, Path], Iterator[str]]) -> None:
    assert not list(rule(read(path), path))


def test_names() -> None:
    assert PATHS, "there are no notebooks"
    numbers = [re.fullmatch(r"(\d\d[a-z]?)_[a-z0-9_]+", path.stem)[1] for path in PATHS]
    assert len(set(numbers)) == len(numbers)
    for path in PATHS:  # a stage's notebook and its kernel have the same name
        assert number_of(path.name) in OTHERS or (ROOT / "kernels" / f"{path.stem}.cu").is_file(), path.stem


def test_every_exercise_is_in_the_notebook_of_its_number() -> None:
    for name, one in exercise.GRADERS.items():
        assert re.fullmatch(rf"{number_of(name)}[a-z]?", one.notebook), "a workshop has exercises of its stage"
        (path,) = (path for path in PATHS if number_of(path.name) == one.notebook)
        assert any(text(c["source"]).startswith(f"%%cuda {name}\n") for c in code_cells(read(path))), name


# ------------------------------------------------------------------------------ each rule finds its violations


def cell_with(notebook: Notebook, words: str) -> Notebook:
    return next(cell for cell in notebook["cells"] if words in text(cell["source"]))


def change_source(old: str, new: str) -> Callable[[Notebook], None]:
    def change(notebook: Notebook) -> None:
        cell = cell_with(notebook, old)
        cell["source"] = text(cell["source"]).replace(old, new)

    return change


def print_in_first(name: str, words: str) -> Callable[[Notebook], None]:
    return lambda nb: code_cells(nb)[0]["outputs"].append({"output_type": "stream", "name": name, "text": words})


def no_count(nb: Notebook) -> None:
    code_cells(nb)[2]["execution_count"] = None


def swapped(nb: Notebook) -> None:
    cells = nb["cells"]
    check, look = (cells.index(cell_with(nb, heading)) for heading in ("## Check", "## Look inside"))
    nb["cells"] = [*cells[:check], *cells[look:], *cells[check:look]]


def exception(nb: Notebook) -> None:
    code_cells(nb)[3]["outputs"] = [{"output_type": "error", "ename": "E", "evalue": "", "traceback": ["E"]}]


def other_lines(nb: Notebook) -> None:
    for cell in code_cells(nb):
        for output in cell["outputs"]:
            if "text/markdown" in output.get("data", {}):
                output["data"]["text/markdown"] = text(output["data"]["text/markdown"]).replace("HEAD_DIM", "HEAD")


def pasted_kernel(nb: Notebook) -> None:
    lines = (ROOT / "kernels" / "01_naive.cu").read_text("utf-8").splitlines()[31:40]
    nb["cells"][1]["source"] = "```\n" + "\n".join(lines) + "\n```"


def passing_skeleton(nb: Notebook) -> None:
    cell_with(nb, "%%cuda")["outputs"] = []


def open_answer(nb: Notebook) -> None:
    cell_with(nb, ".answer(")["metadata"] = {}


def between(nb: Notebook) -> None:
    """A cell that may reveal the answer."""
    at = nb["cells"].index(cell_with(nb, '= predict("sectors'))
    nb["cells"].insert(at + 1, copy.deepcopy(cell_with(nb, "board()")))


def needed_later(nb: Notebook) -> None:
    cell_with(nb, ".answer(")["source"] = text(cell_with(nb, ".answer(")["source"]) + "\nonly_here = 1"
    code_cells(nb)[-1]["source"] = text(code_cells(nb)[-1]["source"]) + "\nprint(only_here)"


def long_first_line(nb: Notebook) -> None:
    output = {"output_type": "display_data", "metadata": {}, "data": {"text/html": "\n<p>" + "x" * 90}}
    code_cells(nb)[1]["outputs"].append(output)


WIDE = f"{'name':60}  {'one':>30}  {'two':>30}\n" * 3

BROKEN = {
    "no count": (executed, no_count),
    "out of order": (executed, swapped),
    "exception": (executed, exception),
    "stderr": (executed, print_in_first("stderr", "Warning: x\n")),
    "title": (has_title, change_source("# 01 · ", "# 02 · ")),
    "section gone": (has_sections, change_source("## Break it", "## Play")),
    "section moved": (has_sections, swapped),
    "no path": (finds_helpers, change_source('sys.path.insert(0, "..")', "pass")),
    "path": (speaks_of_no_machine, print_in_first("stdout", "see /home/me/x.cu:3")),
    "windows path": (speaks_of_no_machine, print_in_first("stdout", r"see C:\Users\me")),
    "address": (speaks_of_no_machine, print_in_first("stdout", "<object at 0x7f12ab34cd>")),
    "large": (is_small_and_plain, print_in_first("stdout", "x" * 600_000)),
    "metadata": (is_small_and_plain, lambda nb: nb["metadata"].update(widgets={})),
    "kernelspec": (is_small_and_plain, lambda nb: nb["metadata"]["kernelspec"].update(name="mine")),
    "cell metadata": (is_small_and_plain, lambda nb: nb["cells"][0]["metadata"].update(collapsed=True)),
    "same id": (is_small_and_plain, lambda nb: nb["cells"][0].update(id=nb["cells"][1]["id"])),
    "ignored": (is_compared, lambda nb: [c["metadata"].update(tags=["nbval-ignore-output"]) for c in nb["cells"]]),
    "dead link": (links_resolve, change_source("(../kernels/exercises/", "(../kernel/exercises/")),
    "old excerpt": (shows_the_kernels_of_today, other_lines),
    "copied kernel": (copies_no_kernel, pasted_kernel),
    "drifted skeleton": (holds_the_skeletons, change_source("// TODO", "// TO DO")),
    "unknown exercise": (holds_the_skeletons, change_source("%%cuda 01", "%%cuda 1")),
    "no failure shown": (holds_the_skeletons, passing_skeleton),
    "nothing needed": (has_first_screen, change_source("**You need:**", "Before this:")),
    "no verbs": (has_first_screen, change_source("\n- ", "\n* ")),
    "old minutes": (has_first_screen, change_source("to read and run", "to skim")),
    "long": (is_short, change_source("## Predict", "word " * 2000 + "\n\n## Predict")),
    "answer in the open": (asks_before_it_tells, open_answer),
    "a guess is there": (asks_before_it_tells, change_source("guess=...", "guess=1")),
    "no answer": (asks_before_it_tells, change_source(".answer(", ".take(")),
    "no board": (asks_before_it_tells, change_source("board()", "None")),
    "old form of a prediction": (asks_before_it_tells, change_source("## Predict", "*Predict: what?*\n\n## Predict")),
    "no word of what a guess takes": (says_what_a_guess_takes, change_source(" (count it)", "")),
    "a cell before the answer": (answers_below_its_guess, between),
    "a name of a folded cell": (needs_no_folded_cell, needed_later),
    "a table that does not fit": (shows_tables_that_fit, print_in_first("stdout", WIDE)),
    "no label": (labels_folded_outputs, long_first_line),
    "unknown collapse": (is_small_and_plain, lambda nb: nb["cells"][0]["metadata"].update(jupyter={"hidden": True})),
}


TOO_MUCH_FOR_A_SITTING = {
    "cells": lambda nb: nb["cells"].extend(copy.deepcopy(nb["cells"][:45])),
    "lines": lambda nb: code_cells(nb)[2].update(source="x = 1\n" * 31),
    "columns": lambda nb: code_cells(nb)[2].update(source=f"x = {'1' * 97}"),
    "printed": lambda nb: code_cells(nb)[2].update(
        outputs=[{"output_type": "stream", "name": "stdout", "text": "word " * 1700 + "end.\n"}]
    ),
}


@pytest.mark.parametrize("name", TOO_MUCH_FOR_A_SITTING)
def test_what_does_not_fit_one_sitting_is_found(name: str) -> None:
    path = FOLDER / "07_mma.ipynb"
    notebook = copy.deepcopy(read(path))
    TOO_MUCH_FOR_A_SITTING[name](notebook)
    assert list(is_told_again(notebook, path))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_notebook_is_found(name: str) -> None:
    rule, spoil = BROKEN[name]
    path = FOLDER / "01_naive.ipynb"
    notebook = copy.deepcopy(read(path))
    before = list(rule(notebook, path))
    spoil(notebook)
    assert len(list(rule(notebook, path))) > len(before)


def test_each_notebook_has_its_references() -> None:
    """Each has a section in references.md, which its first screen links to; each entry says where and why."""
    parts = (FOLDER / "references.md").read_text(encoding="utf-8").split("\n## ")[1:]
    sections = {section.partition("\n")[0]: section.partition("\n")[2].strip() for section in parts}
    assert not {path.stem for path in PATHS} - set(sections)
    assert list(sections) == sorted(sections)
    for name, section in sections.items():
        entries = section.split("\n")
        assert len(entries) >= 2 and all(re.match(r"- .+\]\(https://\S+\).*\. \S.*\.$", e) for e in entries), name


def test_the_glossary_is_in_order_and_says_each_word_once() -> None:
    """Sorted alphabetically; each with the notebook that explains it."""
    table = (FOLDER / "glossary.md").read_text(encoding="utf-8").partition("\n\n## ")[0]
    words = re.findall(r"^\| (?:\*\*(.+?)\*\*|`(.+?)`) \| .+ \((\d\d[a-z]?(?:, \d\d[a-z]?)*)\) \|$", table, re.M)
    names = [bold or code for bold, code, _ in words]
    assert len(names) == table.count("\n| ") - 1 and len(names) > 50
    keys = [re.sub("[`_]", "", name).lower() for name in names]
    assert keys == sorted(keys) and len(set(names)) == len(names)
    numbers_there = {number_of(path.name) for path in PATHS}
    assert all(set(numbers.split(", ")) <= numbers_there for _, _, numbers in words)


@pytest.mark.parametrize("torch", [True, False])
def test_cells_with_pytorch_are_right_with_and_without_it(torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """09 is committed with PyTorch's numbers; without PyTorch, nbval treats its other messages as equal."""
    path = ROOT / "notebooks" / "09_drop_in.ipynb"
    cells = {cell.get("id"): cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]}
    if not torch:
        monkeypatch.setitem(sys.modules, "torch", None)
    elif importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is optional, and not installed here")
    patterns = get_sanitize_patterns((ROOT / "tests" / "sanitize.cfg").read_text(encoding="utf-8"))
    names: dict[str, Any] = {
        "flash_attention": flash_attention,
        "flash_attention_backward": flash_attention_backward,
        "ON_GPU": ON_GPU,
    }
    exec("".join(cells["torch-class"]["source"]), names)
    for name in ("torch-compare", "torch-live"):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec("".join(cells[name]["source"]), names)
        saved = "".join(cells[name]["outputs"][0]["text"])
        assert "max difference" in saved and ("not installed" in printed.getvalue()) != torch
        if "nbval-ignore-output" not in cells[name]["metadata"].get("tags", []):
            texts = [saved, printed.getvalue()]
            for regex, replacement in patterns:
                texts = [re.sub(regex, replacement, text) for text in texts]
            assert texts[0] == texts[1], texts
