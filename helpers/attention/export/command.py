"""`course.py export`: a stage as one file."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from helpers import device
from helpers.attention.export import render
from helpers.attention.export.plan import TARGETS, CannotExport, Request
from helpers.attention.ladder import LADDER, Stage
from helpers.attention.ladder.limits import Limits

EPILOG = """\
examples:
  course.py export flash_mma --dtype bfloat16 --causal -o flash.py
  course.py export 05 --head-dim 128 --window 256 0 --lse
  course.py export backward_mma --dtype float16 --cpp -o backward.cu
  course.py export flash_mma --dtype bfloat16 --causal --torch -o flash_torch.py
"""


def parser() -> argparse.ArgumentParser:
    """Define the command line of `course.py export`."""
    top = argparse.ArgumentParser(
        prog="course.py export",
        description="Write a stage as one file that needs nothing of the course: the kernel, its launch, and a check.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ", ".join(LADDER)
    top.add_argument("stage", help=f"its number, its name or its file: {names}")
    top.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to; without it the text is printed")
    form = top.add_mutually_exclusive_group()
    form.add_argument("--cpp", action="store_true", help="a .cu file with a small host program, for nvcc")
    tensors = "a Python file for PyTorch's tensors, with autograd: forward and backward, where there are gradients"
    form.add_argument("--torch", action="store_true", help=tensors)
    top.add_argument("--head-dim", type=int, default=64, metavar="D", help="64 if not given")
    top.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="the stage's first if not given")
    top.add_argument("--causal", action="store_true", help="a row sees no key after its own position")
    window = "how many keys before and after its own position a row sees; -1 for all"
    top.add_argument("--window", type=int, nargs=2, metavar=("LEFT", "RIGHT"), help=window)
    top.add_argument("--lse", action="store_true", help="also return the log-sum-exp of each row")
    top.add_argument("--deterministic", action="store_true", help="gradients: the same bits in every run")
    top.add_argument(
        "--arch", choices=tuple(TARGETS), help="the GPU that tiles are chosen for; this machine's, or sm_90 without one"
    )
    check = top.add_argument_group("sizes of the arrays in the file's check")
    for name, default in (("batch", 2), ("heads", 4), ("kv-heads", None), ("seq", 1000), ("seq-kv", None)):
        check.add_argument(f"--{name}", type=_positive, default=default, metavar="N")
    return top


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def stage_of(name: str) -> Stage:
    """Find a stage by name, number or file.

    Raises:
        CannotExport: no stage matches, or several have the number.
    """
    stem = Path(name).name.removesuffix(".cu")
    matches = [s for s in LADDER.values() if stem in (s.name, s.file.removesuffix(".cu"))]
    if not matches and stem.isdecimal():
        matches = [s for s in LADDER.values() if s.number == int(stem)]
    if len(matches) != 1:
        names = ", ".join(s.name for s in matches or LADDER.values())
        raise CannotExport(f"{name!r} is {'several stages' if matches else 'no stage'}: {names}")
    return matches[0]


def here() -> Limits:
    """Return the limits of this machine's GPU; without one, sm_90's, which are also the CPU engine's."""
    if not device.ON_GPU:
        return TARGETS["sm_90"]
    from helpers.attention.ladder import limits

    return Limits(limits.most_shared(), limits.multiprocessors(), limits.compute_capability())


def export(words: Sequence[str]) -> str:
    """Render the file that a command line asks for.

    Raises:
        CannotExport: see `helpers.attention.export.plan.plan`; or sizes that do not match.
        SystemExit: argparse refuses the command line.
    """
    given = parser().parse_args(words)
    stage = stage_of(given.stage)
    left, right = given.window or (-1, -1)
    if min(left, right) < -1:
        raise CannotExport(f"--window {left} {right}: sizes of at least 0, or -1 for no limit")
    request = Request(
        stage,
        head_dim=given.head_dim,
        dtype=given.dtype or stage.dtypes[0],
        window=(left, 0 if given.causal else right),
        return_lse=given.lse,
        deterministic=given.deterministic,
        target=TARGETS[given.arch] if given.arch else here(),
    )
    gqa = "gqa" in stage.features
    kv_heads = given.kv_heads or (max(given.heads // 2, 1) if gqa and given.heads % 2 == 0 else given.heads)
    if given.heads % kv_heads or (kv_heads != given.heads and not gqa):
        raise CannotExport(f"--heads {given.heads} --kv-heads {kv_heads}: stage {stage.name} cannot share them out")
    sizes = render.Sizes(given.batch, given.seq, given.seq_kv or given.seq, given.heads, kv_heads)
    form = render.for_nvcc if given.cpp else render.for_torch if given.torch else render.for_cupy
    return form(request, sizes)


def _why(output: Path, error: OSError) -> str:
    if not output.parent.is_dir():
        return f"there is no folder {output.parent}"
    return "it is a folder" if output.is_dir() else error.strerror


def main(words: Sequence[str]) -> int:
    """Write the file, or print it, and return the exit code."""
    try:
        text = export(words)
    except CannotExport as reason:
        print(f"course.py export: {reason}", file=sys.stderr)
        return 1
    given = parser().parse_args(words)
    if given.output is None:
        sys.stdout.write(text)
        return 0
    try:
        given.output.write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"course.py export: cannot write {given.output}: {_why(given.output, error)}", file=sys.stderr)
        return 1
    path = shlex.quote(str(given.output))
    how = f"nvcc -std=c++17 -arch=... {path}" if given.cpp else f"python3 {path}"
    print(f"{given.output}: {len(text.splitlines())} lines. On a machine with a GPU: {how}")
    return 0
