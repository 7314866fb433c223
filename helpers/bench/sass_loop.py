"""Count the SASS of the tile loop of flash_mma and of the last steps to it.

    python3 -m helpers.bench.sass_loop FILE       # where nvcc and nvdisasm are in PATH: writes JSON; no GPU is needed
    sass_loop.table(("HMMA", "LDSM", "moves"))     # anywhere: the record as a table

The record has the steps whose tile loops are unrolled, so that each line is executed once a tile.
"""

from __future__ import annotations

import collections
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from helpers.attention import kernel
from helpers.attention.ladder import Stage
from helpers.attention.ladder.steps import CLIMBS, by_number
from helpers.attention.ladder.steps import ideas as ideas_of_climb
from helpers.bench import records

recorded = records.reader("sass-07.json")
ARCH, HEAD_DIM, DTYPE = "sm_90", 128, "bfloat16"
FIRST = "64 keys a tile"  # the first step whose loop is unrolled
TYPES = {"bfloat16": "__nv_bfloat16", "float16": "__half"}

CLIMB = "flash_mma"
STAGE = "the stage"  # the record's idea for the last step

# What `excerpt` shows: (a step's idea, the instruction that it begins with, lines).
EXCERPTS = {
    "second product": (STAGE, r"F2FP\.BF16\.F32\.PACK_AB", 24),
    "register moves": ("rescale when it pays", r"IMAD\.MOV\.U32 R163", 12),
}


@records.shown
def table(opcodes: Sequence[str], *, record: Mapping[str, Any] | None = None) -> str:
    """Format instructions of the tile loop, a step a line.

    Args:
        opcodes: a column each, without modifiers; "moves" are register-to-register copies.
    """
    lines = [f"{'':32}{'instructions':>14}" + "".join(f"{name:>8}" for name in opcodes)]
    for number, row in _numbered(record):
        counts = "".join(f"{row['opcodes'].get(name, 0):8}" for name in opcodes)
        lines.append(f"{number:3}  {row['idea']:27}{row['instructions']:14,}{counts}")
    return "\n".join(lines)


def _numbered(record: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
    """Return the rows of the record with the current numbers of their steps."""
    numbers = dict(zip([*ideas_of_climb(CLIMB)[:-1], STAGE], by_number(CLIMB), strict=True))
    return [(numbers[row["idea"]], row) for row in record["steps"] if row["idea"] in numbers]


def instructions(step: int, *, record: Mapping[str, Any] | None = None) -> int | None:
    """Return instructions of the tile loop of a step, or None if it is not in the record."""
    record = record or recorded() or {"steps": []}
    return next((row["instructions"] for number, row in _numbered(record) if number == step), None)


@records.shown
def excerpt(name: str, *, record: Mapping[str, Any] | None = None) -> str:
    """Return some lines of SASS. name: a key of EXCERPTS."""
    return "\n".join(record["excerpts"][name])


# ------------------------------------------------------------------------------------------------ making the record


class Instruction(NamedTuple):
    """One line of SASS."""

    address: int
    opcode: str
    text: str


def disassembled(stage: Stage, folder: Path) -> tuple[list[Instruction], dict[str, int]]:
    """Return a stage's SASS, and the address of each label."""
    text = kernel.source(stage.file)
    head = re.search(r"__global__ void __launch_bounds__\([^)]*\) (\w+)\((.*?)\) \{", text, re.DOTALL)
    assert head, stage.file
    parameters = re.sub(r"\bT\b", TYPES[DTYPE], re.sub(r"//[^\n]*", "", head[2]))
    source, cubin = folder / "kernel.cu", folder / "kernel.cubin"
    source.write_text(f"{text}\ntemplate __global__ void {stage.kernel_name(DTYPE)}({parameters});\n")
    defines = [f"-D{name}={value}" for name, value in stage.defines(HEAD_DIM).items()]
    flags = ("-std=c++17", f"-arch={ARCH}", "-ftz=true", "-w", "-cubin")  # CuPy adds -ftz=true
    subprocess.run(["nvcc", *flags, *defines, "-o", str(cubin), str(source)], check=True)
    return parsed(subprocess.run(["nvdisasm", "-c", str(cubin)], check=True, capture_output=True, text=True).stdout)


def parsed(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    """Parse nvdisasm's text: its instructions, and the address of each label."""
    instructions, labels, waiting = [], {}, []
    for line in sass.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            waiting.append(label[1])
        elif it := re.match(r"\s*/\*([0-9a-f]{4,6})\*/\s+((?:@\S+\s+)?([A-Z][A-Z0-9_]*).*?)\s*;?\s*$", line):
            labels |= dict.fromkeys(waiting, int(it[1], 16))
            waiting = []
            instructions.append(Instruction(int(it[1], 16), it[3], it[2]))
    return instructions, labels


def tile_loop(instructions: Sequence[Instruction], labels: Mapping[str, int]) -> list[Instruction]:
    """Find the innermost loop with all products, without code that most tiles skip: masks and lazy rescaling."""
    jumps = [
        (i.address, labels[to[0]]) for i in instructions if (to := re.findall(r"\.L_x_\d+", i.text)) and "BRA" in i.text
    ]
    products = [i.address for i in instructions if i.opcode == "HMMA"]
    last, first = min(
        ((at, to) for at, to in jumps if to <= products[0] and at >= products[-1]), key=lambda jump: jump[0] - jump[1]
    )
    loop = [i for i in instructions if first <= i.address <= last]
    for at, to in jumps:
        skipped = [i for i in loop if at < i.address < to <= last]
        if first <= at and not {"HMMA", "LDGSTS"} & {i.opcode for i in skipped}:
            loop = [i for i in loop if i not in skipped]
    return loop


def _steps() -> Iterator[tuple[int, Stage]]:
    first = ideas_of_climb(CLIMB).index(FIRST)
    yield from list(by_number(CLIMB).items())[first:]


def measure() -> dict[str, Any]:
    """Return the record, measured with this machine's compiler."""
    version = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True).stdout
    release = re.search(r"V([\d.]+)", version)
    rows, loops = [], {}
    for number, stage in _steps():
        with tempfile.TemporaryDirectory() as folder:
            loop = tile_loop(*disassembled(stage, Path(folder)))
        opcodes = collections.Counter("moves" if is_move(i) else i.opcode for i in loop)
        idea = stage.idea if stage is not CLIMBS[CLIMB][-1] else STAGE
        loops[idea] = loop
        row = {"step": number, "idea": idea, "file": stage.file, "instructions": len(loop)}
        rows.append({**row, "opcodes": dict(opcodes.most_common())})
    excerpts = {}
    for name, (idea, pattern, lines) in EXCERPTS.items():
        texts = [i.text for i in loops[idea]]
        at = next(i for i, text in enumerate(texts) if re.match(pattern, text))
        excerpts[name] = texts[at : at + lines]
    how = {
        "compiler": f"nvcc {release[1] if release else '?'}, -arch={ARCH} -ftz=true, disassembled by nvdisasm",
        "kernel": f"flash_mma<{TYPES[DTYPE]}>, HEAD_DIM = {HEAD_DIM}",
        "counted": "instructions of a warp for one tile, without masks and rescales, which most tiles skip",
    }
    return {"how": how, "steps": rows, "excerpts": excerpts}


def is_move(instruction: Instruction) -> bool:
    """Return True if it only copies one register to another."""
    return bool(re.match(r"(IMAD\.MOV\.U32 R\d+, RZ, RZ, R\d|MOV R\d+, R\d)", instruction.text))


def main(words: Sequence[str]) -> int:
    """Write the record to a file. Return 2 without nvcc or nvdisasm, or if no record can be written there."""
    missing = [program for program in ("nvcc", "nvdisasm") if shutil.which(program) is None]
    try:
        if len(words) != 1:
            raise records.Refused("python3 -m helpers.bench.sass_loop FILE")
        if missing:
            raise records.Refused(f"{missing[0]} is not in PATH: it comes with the CUDA toolkit")
        records.check_file(Path(words[0]))
    except records.Refused as error:
        print(error, file=sys.stderr)
        return 2
    records.save(Path(words[0]), measure())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
