"""The three things that notebooks do with a kernel once they have shown how: build it, run it, look inside.

    from helpers.workbench import build, look, run
    o = run("flash_mma", q, k, v, causal=True)                    # one launch; the output as a NumPy array
    report = look("flash_mma", q, k, v, code=changed)             # its X-ray, with no GPU

A stage is given by its name, or is itself a `Stage`, such as a step of a climb. `code` is another text of its kernel,
`sizes` other tile sizes. Arrays are (rows, head_dim), (heads, rows, head_dim), or (batch, seq, heads, head_dim).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from helpers import kernel
from helpers.device import cp
from helpers.draw.picture import Html
from helpers.draw.sources import diff
from helpers.ladder import LADDER, Stage
from helpers.ladder.steps import BEFORE, CLIMBS
from helpers.xray import Report, xray


def stage_of(stage: str | Stage) -> Stage:
    """The stage of that name. Raises ValueError with the names there are."""
    if isinstance(stage, Stage):
        return stage
    if stage not in LADDER:
        raise ValueError(f"no stage {stage!r}; there are: {', '.join(LADDER)}")
    return LADDER[stage]


def build(
    stage: str | Stage,
    head_dim: int,
    *,
    code: str | None = None,
    dtype: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> kernel.Kernel:
    """The stage's kernel, compiled for a head dimension and a type, its first one if none is given."""
    found = stage_of(stage)
    defines = {**found.defines(head_dim), **(sizes or {})}
    return kernel.load(code or found.file, found.kernel_name(dtype or found.dtypes[0]), defines=defines)


def run(
    stage: str | Stage,
    q: Any,
    k: Any,
    v: Any,
    *,
    code: str | None = None,
    sizes: Mapping[str, int] | None = None,
    **options: Any,
) -> np.ndarray:
    """The output of one call on this device, as a NumPy array of q's shape. options: as `Stage.prepare` has them."""
    launch, o = stage_of(stage).prepare(*map(_heads_first, (q, k, v)), source=code, sizes=sizes, **options)
    launch()
    return cp.asnumpy(_heads_first(o))  # an exchange of two axes undoes itself


def look(
    stage: str | Stage,
    q: Any,
    k: Any,
    v: Any,
    *,
    code: str | None = None,
    sizes: Mapping[str, int] | None = None,
    **options: Any,
) -> Report:
    """The X-ray of one launch, on the CPU.

    Raises:
        ValueError: the stage needs several launches for these arrays.
    """
    ready, arrays, _ = stage_of(stage).plan(*map(_heads_first, (q, k, v)), source=code, sizes=sizes, **options)
    launches = [] if ready is None else ready.filled(arrays)
    if len(launches) != 1:
        raise ValueError(f"{len(launches)} launches; look at one: give the arrays of one head")
    ((launch, compiled, args),) = launches
    return xray(compiled, launch.grid, launch.block, args, launch.shared_bytes)


def _heads_first(a: Any) -> Any:
    """(batch, seq, heads, head_dim) with its middle axes exchanged; arrays of fewer axes as they are."""
    return cp.asarray(a).transpose(0, 2, 1, 3) if a.ndim == 4 else cp.asarray(a)


def fetched_keys(stage: str | Stage, q: Any, k: Any, v: Any, *, sizes: Mapping[str, int], **options: Any) -> np.ndarray:
    """(rows of q, rows of k): 1 where the block of a row fetches the key, else 0, by the X-ray.

    The launch runs with a grid of one block, of two, and so on: what one more block fetches is what its rows need.

    Args:
        q, k, v: of one head, (rows, head_dim). sizes: the tile sizes, BLOCK_M among them.

    Raises:
        ValueError: arrays of several heads.
    """
    if q.ndim != 2:
        raise ValueError(f"q has shape {q.shape}: give the arrays of one head")
    ready, arrays, _ = stage_of(stage).plan(*map(cp.asarray, (q, k, v)), sizes=sizes, **options)
    ((launch, compiled, args),) = ready.filled(arrays)
    keys, before, rows = np.zeros((len(q), len(k)), int), 0, sizes["BLOCK_M"]
    for block in range(launch.grid[0]):
        report = xray(compiled, (block + 1, 1, 1), launch.block, args, launch.shared_bytes)
        now = report.fetches["K"].reshape(len(k), -1)[:, 0]
        keys[block * rows : (block + 1) * rows] = now - before
        before = now
    return keys


def step_diff(stage: str, n: int, *, context: int = 1, folded: bool = False) -> Html:
    """What step n of the climb to a stage changes; folded: to be opened by a click on its idea."""
    climb = CLIMBS[stage]
    files = [BEFORE[stage], *(step.file for step in climb)]
    made = diff(files[n - 1], files[n], context=context)
    if not folded:
        return made
    summary = f"step {n}, {climb[n - 1].idea}"
    return Html(f"<details><summary>{summary}</summary>{made.markup}</details>", made.text)


def shared_per_1000(
    stage: str | Stage, rows: int, head_dim: int, sizes: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Requests, wavefronts and conflicts of a kernel's dynamic shared memory for 1000 multiply-adds of a warp.

    By the X-ray of one head with as many keys as rows; only the multiply-adds of the two products count.
    """
    report = look(stage, *np.random.default_rng(0).standard_normal((3, rows, head_dim), dtype=np.float32), sizes=sizes)
    seen = report.shared["dynamic shared memory"]
    warp_ffmas = 2 * rows * rows * head_dim / 32
    return {name: round(1000 * getattr(seen, name) / warp_ffmas) for name in ("requests", "wavefronts", "conflicts")}
