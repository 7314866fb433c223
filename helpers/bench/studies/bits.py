"""How many elements of the gradients are not the same, bit by bit, in every run of one call on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from helpers.attention import flash_attention
from helpers.attention.ladder import BACKWARD, backward
from helpers.bench import records
from helpers.bench.cases import Inputs, Shape
from helpers.device import cp, describe
from helpers.renamed import old_names

RECORD = records.MEASURED / "nvidia-h200-bits.json"
recorded = functools.partial(records.load, RECORD)
_shown = records.table_of(lambda: recorded())
SHAPE = (1, 16, 4096, 64)
RUNS = 10


def differing_elements(
    name: str, *, deterministic: bool, dtype: str, shape: Shape = SHAPE, runs: int = RUNS
) -> dict[str, int]:
    """Elements of each gradient that differ between the runs of one call of a stage."""
    inputs = Inputs(shape, dtype)
    q, k, v = inputs.device
    o, lse = flash_attention(*(a.swapaxes(1, 2) for a in (q, k, v)), return_lse=True)
    arrays = cp.asarray(inputs.do), q, k, v, o.swapaxes(1, 2), lse
    run, gradients = backward.prepare(BACKWARD[name], *arrays, deterministic=deterministic)
    first: list[np.ndarray] = []
    changed: list[np.ndarray] = []
    for _ in range(runs):
        run()
        bits = [np.array(cp.asnumpy(a)).view(f"u{a.dtype.itemsize}") for a in gradients]
        first = first or bits
        changed = changed or [np.zeros(a.shape, bool) for a in bits]
        for all_changed, a, b in zip(changed, first, bits, strict=True):
            all_changed |= a != b
    return {name: int(a.sum()) for name, a in zip(("dQ", "dK", "dV"), changed, strict=True)}


def measure(shape: Shape = SHAPE, runs: int = RUNS) -> dict[str, Any]:
    """The record: every stage that computes gradients, in its types and both of its ways."""
    rows = [
        {
            "stage": stage.name + " deterministic" * deterministic,
            "dtype": dtype,
            "different": differing_elements(
                stage.name, deterministic=deterministic, dtype=dtype, shape=shape, runs=runs
            ),
        }
        for stage in BACKWARD.values()
        for dtype in stage.dtypes
        for deterministic in (False, True)
        if not deterministic or "deterministic" in stage.features
    ]
    return {"device": describe(), "shape": list(shape), "runs": runs, "rows": rows}


@_shown
def table(record: Mapping[str, Any] | None = None) -> str:
    """A record as text, a stage a line; the committed one where none is given."""
    batch, heads, n, d = record["shape"]
    lines = [
        f"Elements that differ between {record['runs']} runs, of {batch * heads * n * d:,} each; {record['device']}",
        f"{'':32}{'':10}{'dQ':>12}{'dK':>12}{'dV':>12}",
    ]
    for row in record["rows"]:
        lines.append(f"{row['stage']:32}{row['dtype']:10}" + "".join(f"{n:12,}" for n in row["different"].values()))
    return "\n".join(lines)


old_names(__name__, different="differing_elements")
