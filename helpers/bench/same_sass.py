"""Tell whether a change of the kernels' text has changed what a GPU runs. Needs NVRTC, and no GPU.

    git worktree add ../before HEAD~1
    python3 -m helpers.bench.same_sass ../before/kernels                 # all stages and steps, sm_80 and sm_90a
    python3 -m helpers.bench.same_sass ../before/kernels --only 07 08_0  # those whose file begins so
    python3 -m helpers.bench.same_sass ../before/kernels --only 07 --dtypes bfloat16 --head-dims 64

Each kernel is compiled twice, from the text in either folder with the same sizes, and its machine code compared byte by
byte. Where it is the same, what was measured before the change still holds. The exit code is the number of differences.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile

from helpers.attention import kernel
from helpers.attention.compile_report import program
from helpers.attention.ladder import LADDER, Stage
from helpers.attention.ladder.steps import BASES, CLIMBS
from helpers.engine import CompileError
from helpers.engine.nvrtc import header_options

HEAD_DIMS = (64, 128)


def machine_code(code: str, options: tuple[str, ...], arch: str, names: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Compile a source, and return the instructions of each kernel by its symbol.

    Args:
        code: the source, complete. options: such as -DHEAD_DIM=64. arch: such as "sm_90a".
        names: name expressions of the templates' instances that are wanted.

    Raises:
        CompileError: NVRTC refuses the source; the message is its log.
    """
    from cupy.cuda import nvrtc

    with program(code, (*options, *header_options(code)), arch, names) as compiled:
        sections = ELFFile(io.BytesIO(nvrtc.getCUBIN(compiled))).iter_sections()
    return {s.name.removeprefix(".text."): s.data() for s in sections if s.name.startswith(".text.")}


def text_of(folder: Path, file: str) -> str | None:
    """Read the complete source of a file in a folder of kernels; None if it is not there."""
    before, kernel.KERNELS = kernel.KERNELS, folder
    try:
        return kernel.source(file) if (folder / file).is_file() else None
    finally:
        kernel.KERNELS = before


def stages(only: list[str]) -> Iterator[Stage]:
    """Yield every stage, and every step of a climb, whose file's name begins with one of `only`."""
    steps = (*BASES.values(), *(step for climb in CLIMBS.values() for step in climb))
    for file, stage in {stage.file: stage for stage in (*LADDER.values(), *steps)}.items():
        if not only or file.removeprefix("steps/").startswith(tuple(only)):
            yield stage


def compare(stage: Stage, before: Path, head_dim: int, dtype: str, arch: str) -> str:
    """Compare a stage's machine code before and now: "same", "DIFFERS: ...", "new" or "FAILS: ..."."""
    texts = text_of(before, stage.file), text_of(kernel.KERNELS, stage.file)
    if texts[0] is None:
        return "new"
    options = kernel.options(stage.defines(head_dim))
    names = tuple(name for name in stage.kernel_names(dtype) if "<" in name)
    try:
        old, new = (machine_code(text, options, arch, names) for text in texts)
    except CompileError as error:
        return f"FAILS: {str(error)[:2000]}"
    if old == new:
        return "same"
    sizes = (f"{name}: {len(old.get(name, b''))} -> {len(new.get(name, b''))} bytes" for name in sorted({*old, *new}))
    return "DIFFERS: " + ", ".join(sizes)


def architectures(stage: Stage, wanted: list[str]) -> list[str]:
    """List those of the wanted architectures that a stage is compiled for."""
    numbers = {arch: int(arch.removeprefix("sm_").rstrip("a")) for arch in wanted}
    return [arch for arch, n in numbers.items() if (n == stage.min_cc if stage.only_cc else n >= stage.min_cc)]


def main(arguments: list[str] | None = None) -> int:
    """Compare, print a line for each kernel that was compiled, and count the differences."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("before", type=Path, help="the folder kernels/ of another checkout")
    parser.add_argument("--only", nargs="+", default=[], metavar="START", help="files whose names begin so")
    parser.add_argument("--arch", nargs="+", default=["sm_80", "sm_90a"])
    parser.add_argument("--dtypes", nargs="+", default=[])
    parser.add_argument("--head-dims", nargs="+", type=int, default=HEAD_DIMS)
    options: Mapping[str, Any] = vars(parser.parse_args(arguments))
    differences = 0
    for stage in stages(options["only"]):
        if reason := stage.unavailable():
            print(f"{stage.file}: {reason}")
            continue
        for dtype in [dtype for dtype in stage.dtypes if dtype in (options["dtypes"] or stage.dtypes)]:
            for arch in architectures(stage, options["arch"]):
                for head_dim in options["head_dims"]:
                    verdict = compare(stage, options["before"], head_dim, dtype, arch)
                    differences += verdict not in ("same", "new")
                    print(f"{stage.file} {dtype} d={head_dim} {arch}: {verdict}", flush=True)
    return differences


if __name__ == "__main__":
    sys.exit(main())
