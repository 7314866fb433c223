"""What both forms of an exported file share: what it says of itself, the licence, and the kernel's text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from helpers.attention import kernel
from helpers.attention.export.plan import Plan
from helpers.attention.ladder.tiles import KB

_ROOT = Path(__file__).resolve().parents[3]


class Sizes(NamedTuple):
    """Of the arrays that a file checks itself with."""

    batch: int
    n: int
    n_kv: int
    heads: int
    kv_heads: int


def about(plan: Plan) -> list[str]:
    """The first lines: what it computes, from which file, and for which GPUs."""
    request = plan.request
    stage = request.stage
    left, right = request.window
    mask = "no mask"
    if (left, right) == (-1, 0):
        mask = "causal: the last row sees all keys, each row before it one key less"
    elif request.masked:
        sides = [f"{size} keys {word}" for size, word in ((left, "before"), (right, "after")) if size >= 0]
        mask = f"a row sees its own position and at most {' and '.join(sides)} it"
    least = max(stage.min_cc, 80 if request.dtype == "bfloat16" else 0)
    needs = [f"compute capability {least / 10}{' and no other' if stage.only_cc else ' or newer'}"] if least else []
    shared = max(launch.shared_bytes for launch in plan.launches)
    if shared > 48 * KB:
        needs.append(f"{shared:,} bytes of shared memory for a block")
    tiles = f"with tiles for sm_{request.target.compute_capability}"
    return [
        f"{stage.idea[:1].upper()}{stage.idea[1:]}." if request.backward else f"Attention in CUDA: {stage.idea}.",
        f"{request.dtype}, head dimension {request.head_dim}; {mask}.",
        *([f"Needs {' and '.join(needs)}."] if needs else []),
        f"The kernel is {stage.file}, stage {stage.number} of the course, {tiles}.",
    ]


def licence() -> list[str]:
    """Two lines: the licence's name and whose it is."""
    text = (_ROOT / "LICENSE").read_text(encoding="utf-8")
    owner = re.search(r"^Copyright.*$", text, re.M)
    return ["SPDX-License-Identifier: MIT", owner.group(0) if owner else ""]


def kernel_text(*files: str) -> str:
    """The kernels' files with their headers pasted in, each once, and without what only the pasting needs."""
    first, *others = files
    text = kernel.source(first)
    if others:
        text = kernel.with_headers("".join(f'#include "{file}"\n' for file in files), "all")
    lines = []
    for line in text.splitlines():
        begin = re.match(r'#line (\d+) "(.*)"', line)
        if begin:
            opened = begin.group(1) == "1" and begin.group(2) not in (first, "all")
            lines += ["", f"// ---- {begin.group(2)}"] if opened else []
        elif line.strip() != "#pragma once":
            lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines).strip("\n")) + "\n"
