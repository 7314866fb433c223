"""Count the elements of gradients whose bits differ between runs of one call on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from helpers.attention import flash_attention
from helpers.attention.ladder import BACKWARD, backward
from helpers.bench import records
from helpers.bench.cases import Inputs, Shape
from helpers.bench.harness import Study
from helpers.device import cp, describe

recorded = records.reader("nvidia-h200-bits.json")
SHAPE = (1, 16, 4096, 64)
RUNS = 10


def differing_elements(
    name: str, *, deterministic: bool, dtype: str, shape: Shape = SHAPE, runs: int = RUNS
) -> dict[str, int]:
    """Count the elements of each gradient that differ between the runs of one call of a stage."""
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


def rows(shape: Shape = SHAPE, runs: int = RUNS) -> Iterator[dict[str, Any]]:
    """Count for every stage that computes gradients, in each of its types, with and without `deterministic`."""
    for stage in BACKWARD.values():
        for dtype, deterministic in itertools.product(stage.dtypes, (False, True)):
            if not deterministic or "deterministic" in stage.features:
                how: dict[str, Any] = {"deterministic": deterministic, "dtype": dtype, "shape": shape, "runs": runs}
                name = stage.name + " deterministic" * deterministic
                yield {"stage": name, "dtype": dtype, "different": differing_elements(stage.name, **how)}


STUDY = Study("bits", {"rows": rows}, lambda: {"device": describe(), "shape": list(SHAPE), "runs": RUNS})
take = STUDY.take


@records.shown
def table(record: Mapping[str, Any] | None = None) -> str:
    """Format a record as text, a stage a line."""
    batch, heads, n, d = record["shape"]
    lines = [
        f"Elements that differ between {record['runs']} runs, of {batch * heads * n * d:,} each; {record['device']}",
        f"{'':32}{'':10}{'dQ':>12}{'dK':>12}{'dV':>12}",
    ]
    for row in record["rows"]:
        lines.append(f"{row['stage']:32}{row['dtype']:10}" + "".join(f"{n:12,}" for n in row["different"].values()))
    return "\n".join(lines)
