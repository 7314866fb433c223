"""The page of what runs on each GPU, from Turing to Blackwell, and what the compiler makes of it there."""

from __future__ import annotations

from collections.abc import Iterator

from helpers.attention.compile_report import CompileReport, NvrtcMissing, nvrtc_version
from helpers.attention.ladder import LADDER, Rung
from helpers.bench.architectures import (
    CARDS,
    LARGE,
    SMALL,
    STAGES,
    TYPES,
    compiled,
    defaults,
    instead,
    types_of,
    why_not,
)
from helpers.lesson.exercises.holes import number_of
from helpers.site import notebook_pages

HOPPERS = ("10", "13", "16")  # notebooks whose kernels run on one architecture only


def page() -> str:
    """Write the page in Markdown."""
    heads = [f"sm_{cc}" for cc in CARDS]
    lines = [
        *("# What your GPU runs", ""),
        "Everything here is computed from the conditions by which the course's code chooses a stage. "
        "`python3 helpers/course.py ladder --gpus` prints the same, and `ladder` on a GPU begins with its part.",
        *("", "| | GPUs |", "|---|---|", *(f"| sm_{cc} | {cards} |" for cc, cards in CARDS.items()), ""),
        *("## Which stages run", "", *_table(["stage", *heads], (_types(stage) for stage in STAGES.values())), ""),
        "32, 16 and b16 stand for float32, float16 and bfloat16, 8 for e4m3. A stage that a GPU does not run "
        "still runs on the CPU engine of the same machine, under the X-ray too: set `COURSE_DEVICE=cpu` first.",
        *("", "## Which one a call gets", ""),
        f"A call that names no stage, head_dim {LARGE[3]}, no mask: large is {LARGE[0]} × {LARGE[1]} heads of "
        f"{LARGE[2]} rows, small is one head of {SMALL[2]}; without either, both get the same.",
        *("", *_table(["call", *heads], _default_rows()), ""),
        *("## Notebooks for one architecture", ""),
        *_hoppers(),
        *("## What the compiler makes of it", "", *_compiled(heads), ""),
        "## Measured",
        "",
        "Records are of Hopper so far: [GPUs, side by side](/gpus.md). **With a GPU of Ampere, Ada or Blackwell, "
        "one command makes its record**, and [this is what to do with it](/CONTRIBUTING.md#the-record-of-your-gpu):",
        *("", "```sh", "python3 helpers/course.py bench --peers --json record.json", "```", ""),
    ]
    return "\n".join(lines)


def _table(head: list[str], rows: Iterator[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|---|{'---|' * (len(head) - 1)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def _link(stage: Rung) -> str:
    return f"[{stage.name}](/kernels/{stage.file}.md)"


def _types(stage: Rung) -> list[str]:
    short = {"float32": "32", "float16": "16", "bfloat16": "b16", "uint8": "8"}
    return [_link(stage), *(", ".join(short[dtype] for dtype in types_of(stage, cc)) or "–" for cc in CARDS)]


def _default_rows() -> Iterator[list[str]]:
    by_cc = {cc: {each[:3]: each.stage for each in defaults(cc)} for cc in CARDS}
    for direction, title in (("forward", ""), ("backward", "gradients, ")):
        for dtype in TYPES:
            large, small = ([by_cc[cc].get((direction, dtype, shape)) for cc in CARDS] for shape in (LARGE, SMALL))
            sizes = ((large, ""),) if large == small else ((large, ", large"), (small, ", small"))
            for stages, size in sizes:
                if any(stages):
                    name = "e4m3" if dtype == "uint8" else dtype
                    yield [f"{title}{name}{size}", *(_breakable(stage.name) if stage else "–" for stage in stages)]


def _breakable(name: str) -> str:
    """Allow line breaks after a name's underscores, so that all architectures fit side by side."""
    return name.replace("_", "_<wbr>")


def _hoppers() -> Iterator[str]:
    """Name replacements for notebooks whose kernels run on one architecture, and say what their stages report."""
    rows, reasons = [], []
    for path in notebook_pages.paths():
        number = number_of(path.name)
        stages = [stage for stage in LADDER.values() if f"{stage.number:02}" == number and stage.only_cc]
        if number not in HOPPERS:
            continue
        stage, row = stages[-1], [f"[{path.stem}](/notebooks/{path.name})"]
        for cc in CARDS:
            other = instead(stage, cc)
            row.append("itself" if not why_not(stage, cc) else "–" if other is None else _notebook(other))
        rows.append(row)
        reasons += [f"- sm_{cc}: {stage.name}: {why_not(stage, cc)}" for cc in (80, 120) if number == HOPPERS[0]]
    yield "What calls of the same type get there, and so what to read instead; a dash: no stage takes the type."
    yield ""
    yield from _table(["notebook", *(f"sm_{cc}" for cc in CARDS)], iter(rows))
    yield from ("", "A call that names such a stage is refused, with the reason:", "", *reasons, "")
    yield (
        "On such a GPU a notebook that was opened alone, as on Colab, lets the CPU engine run its kernels and says so. "
        "Every cell then runs, X-rays included; its times are recorded ones of an H200."
    )
    yield ""


def _notebook(stage: Rung) -> str:
    idea = stage.file.partition("_")[2].partition(".")[0]
    paths = notebook_pages.paths()
    path = next((p for p in paths if p.stem.partition("_")[2] == idea), None) or next(
        p for p in paths if number_of(p.name) == f"{stage.number:02}"
    )
    return f"[{_breakable(path.stem)}](/notebooks/{path.name})"


def _compiled(heads: list[str]) -> Iterator[str]:
    """Compile every stage for every architecture, head_dim 64: registers, and bytes of spills if there are any."""
    try:
        major, minor = nvrtc_version()
    except NvrtcMissing as error:
        yield f"*(not made here: {error})*"
        return
    yield (
        f"Registers of a thread by NVRTC {major}.{minor}, at head_dim 64 with the sizes and the last type that a stage "
        "has there; in brackets, bytes of spills. A stage of several kernels shows the one with the most."
    )
    yield ""
    yield from _table(
        ["stage", *heads], ([_link(stage), *(_most(stage, cc) for cc in CARDS)] for stage in STAGES.values())
    )


def _most(stage: Rung, cc: int) -> str:
    if stage.unavailable():
        return "not compiled here" if types_of(stage, cc) else "–"
    try:
        reports: list[CompileReport] = compiled(stage, cc)
    except ValueError:  # this NVRTC does not know the architecture
        return "?"
    if not reports:
        return "–"
    most = max(reports, key=lambda report: (report.registers, report.spill_bytes))
    spills = max(report.spill_bytes for report in reports)
    return f"{most.registers}" + (f" ({spills})" if spills else "")
