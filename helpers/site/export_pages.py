"""A page for each stage: one file that runs without the course, to copy or download."""

from __future__ import annotations

from helpers.attention.export import command
from helpers.attention.export.plan import CannotExport
from helpers.attention.ladder import LADDER, Stage
from helpers.site.readme_pages import toctree

# 99 KB of shared memory per block: the A100 and all GPUs after it have that much.
ARCH = "sm_86"
FORMS = {"py": (), "cu": ("--cpp",)}
LANGUAGES = {"py": "python", "cu": "c++"}
ABOUT = {
    "py": "Python with CuPy and NumPy. `python3 {file}` runs its check on a GPU.",
    "cu": "A kernel and a small host program. `nvcc -std=c++17 -arch=native {file}`, and run what it makes.",
}


def files(stage: Stage) -> dict[str, str]:
    """Map file names to texts, one for each form that the stage can be exported to."""
    texts = {}
    for ending, words in FORMS.items():
        try:
            arch = f"sm_{stage.min_cc}" if stage.only_cc else ARCH
            texts[f"{stage.name}.{ending}"] = command.export([stage.name, "--arch", arch, *words])
        except CannotExport:  # `course.py export` gives the reason; here the form is just left out
            continue
    return texts


def pages() -> dict[str, str]:
    """Map paths in the site's source to pages: the exported files of each stage, and their list."""
    written, lines = {}, ["# To take with you", "", *_intro()]
    for stage in LADDER.values():
        if not (texts := files(stage)):
            continue
        written |= {f"exports/{name}": text for name, text in texts.items()}
        written[f"exports/{stage.name}.md"] = _page(stage, texts)
        lines.append(f"- [{stage.name}](/exports/{stage.name}.md), from `{stage.file}`: {stage.idea}")
    hidden = [name.removeprefix("exports/") for name in written if name.endswith(".md")]
    written["exports/index.md"] = "\n".join([*lines, "", toctree(hidden)])
    return written


def _intro() -> list[str]:
    return [
        "Each stage as one file that needs nothing of the course: the kernel with its headers pasted in, its launch, "
        "and a check against NumPy.",
        "",
        "These are made for rows of 64 numbers and for GPUs with 99 KB of shared memory for a block (A100, L4, H100, "
        "RTX 30, 40 and 50). The command makes others, with masks, other types and other sizes:",
        "",
        "```sh",
        "python3 helpers/course.py export flash_mma --dtype bfloat16 --head-dim 128 --causal -o flash.py",
        "```",
        "",
    ]


def _page(stage: Stage, texts: dict[str, str]) -> str:
    lines = [f"# {stage.name}", "", f"**{stage.idea}**", "", f"From [{stage.file}](/kernels/{stage.file}.md).", ""]
    for name, text in texts.items():
        ending = name.rpartition(".")[2]
        lines += [f"## {name}", "", ABOUT[ending].format(file=name) + f" [Download {name}]({name}).", ""]
        lines += [f"````{{code-block}} {LANGUAGES[ending]}", "", text.rstrip("\n"), "````", ""]
    return "\n".join(lines)
