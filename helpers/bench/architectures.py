"""Say what runs on each architecture from Turing to Blackwell, computed from the stages' own conditions.

python3 helpers/course.py ladder --gpus       # prints it; the site has it as a page
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from helpers import device
from helpers.attention.compile_report import CompileReport, compile_report
from helpers.attention.decoders import SPLIT_KV
from helpers.attention.ladder import LADDER, Rung, limits
from helpers.attention.ladder.table import backward_of, default_of, forward_of
from helpers.attention.ladder.tiles import LIMITS

CARDS: Mapping[int, str] = {  # compute capability -> GPUs
    75: "Turing: T4, RTX 20",
    80: "Ampere: A100, A30",
    86: "Ampere: RTX 30, A10, A40",
    89: "Ada: RTX 40, L4, L40",
    90: "Hopper: H100, H200, GH200",
    100: "Blackwell: B200, GB200",
    120: "Blackwell: RTX 50, RTX PRO",
}
STAGES: Mapping[str, Rung] = {**LADDER, SPLIT_KV.name: SPLIT_KV}  # decoding's stage has its own table
TYPES = ("float32", "float16", "bfloat16", "uint8")
LARGE, SMALL = (4, 16, 4096, 64), (1, 1, 256, 64)  # batch, heads, rows, head_dim


class Default(NamedTuple):
    """The stage that a call gets if it names none; None if no stage supports the call."""

    direction: str
    dtype: str
    shape: tuple[int, int, int, int]
    stage: Rung | None


@contextlib.contextmanager
def planned_for(cc: int) -> Iterator[None]:
    """Plan in this context as on a GPU of a compute capability. Nothing can be launched there."""
    shared = next(limit for limit, where in LIMITS.items() if re.search(rf"\bsm_{cc}\b", where))
    here, device.ON_GPU = device.ON_GPU, True  # it decides about defaults; no arrays are made
    try:
        with limits.pretend_gpu(limits.Limits(shared, 100, cc)):
            yield
    finally:
        device.ON_GPU = here


def types_of(stage: Rung, cc: int, head_dim: int = 64) -> list[str]:
    """List the types that a stage takes on a compute capability, ignoring headers that may not be installed."""
    with planned_for(cc):
        able = stage.changed(unavailable=lambda: None)
        return [dtype for dtype in stage.dtypes if able.why_not(head_dim=head_dim, dtype=dtype) is None]


def why_not(stage: Rung, cc: int) -> str:
    """Return why a stage does not run on a compute capability, or "" if it runs with some type."""
    if types_of(stage, cc):
        return ""
    with planned_for(cc):
        return stage.why_not(head_dim=64, dtype=stage.dtypes[0]) or ""


def defaults(cc: int) -> list[Default]:
    """List the stages that large and small calls get on a compute capability, for head_dim 64 without a mask."""
    found = []
    for direction, stages in (("forward", forward_of(LADDER)), ("backward", backward_of(LADDER))):
        for dtype in TYPES:
            for shape in (LARGE, SMALL):
                batch, heads, rows, head_dim = shape
                with planned_for(cc):
                    stage = default_of(stages, rows, batch * heads * rows, head_dim=head_dim, dtype=dtype)
                found.append(Default(direction, dtype, shape, stage))
    return [
        each for each in found if any(each.dtype in s.dtypes and s.direction == each.direction for s in LADDER.values())
    ]


def instead(stage: Rung, cc: int) -> Rung | None:
    """Return the stage that large calls with a stage's direction and first type get on a compute capability."""
    wanted = (stage.direction, stage.dtypes[0], LARGE)
    return next((each.stage for each in defaults(cc) if each[:3] == wanted), None)


def compiled(stage: Rung, cc: int, head_dim: int = 64) -> list[CompileReport]:
    """Compile a stage's kernels for a compute capability with NVRTC, with its sizes and last type there.

    Returns:
        Their registers, spills and shared memory; an empty list if the stage does not run there.

    Raises:
        NvrtcMissing: NVRTC is not installed. ValueError: it does not know the architecture.
    """
    dtypes = types_of(stage, cc, head_dim)
    if not dtypes:
        return []
    with planned_for(cc):
        defines = stage.defines(head_dim)
    names = stage.kernel_names(dtypes[-1])
    return [compile_report(stage.file, defines, stage.architecture(cc), name=name) for name in names]


def text(cc: int) -> str:
    """Describe one compute capability in lines: what runs, the defaults, what does not run and the reasons."""
    runs = [name for name, stage in STAGES.items() if types_of(stage, cc)]
    lines = [f"sm_{cc}  {CARDS[cc]}", f"    runs      {', '.join(runs)}"]
    for direction in ("forward", "backward"):
        shown = []
        for dtype in TYPES:
            of_type = [each.stage for each in defaults(cc) if each[:2] == (direction, dtype)]
            names = list(dict.fromkeys(stage.name for stage in of_type if stage))
            if names:
                shown.append(f"{_title(dtype)} {' (small: '.join(names)}{')' * (len(names) > 1)}")
        lines.append(f"    {'default' if direction == 'forward' else 'gradients':10}{', '.join(shown)}")
    by_reason: dict[str, list[str]] = {}
    for name, stage in STAGES.items():
        if reason := why_not(stage, cc):
            by_reason.setdefault(reason, []).append(name)
    lines += [f"    not       {', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    return "\n".join(lines)


def _title(dtype: str) -> str:
    return "e4m3" if dtype == "uint8" else dtype
