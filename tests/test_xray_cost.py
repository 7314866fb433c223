"""The cost of a checked run, relative to one thread of the fast build; the table ends the test run.

The goals are 30 times for findings and bytes and 70 times with the profile. All three are measured in turns, in seconds
of CPU time; the limits asserted here are loose, because other work on the machine still affects its caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from helpers import engine
from helpers.attention import kernel
from helpers.attention.check import make_inputs
from helpers.attention.ladder import FORWARD, LADDER
from helpers.engine import checked, runtime

N, D = 256, 64


def _best(runs: Sequence[Callable[[], object]], turns: int = 4) -> list[float]:
    """Return the milliseconds of CPU time of the fastest of some runs each, in turns, after one of each to compile."""
    for run in runs:
        run()
    best = [float("inf")] * len(runs)
    for _ in range(turns):
        for i, run in enumerate(runs):
            began = time.process_time()
            run()
            best[i] = min(best[i], time.process_time() - began)
    return [1e3 * seconds for seconds in best]


@pytest.mark.parametrize("name", [name for name, stage in FORWARD.items() if stage.number <= 3])
def test_cost(name: str, record_row: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    stage = LADDER[name]
    sizes = stage.defines(D)
    options = kernel.options(sizes)
    function = engine.RawModule(code=kernel.source(stage.file), options=options).get_function(name)
    q, k, v = (engine.asarray(a) for a in make_inputs(N, N, D))
    scratch = (engine.empty((N, N), np.float32),) if name == "naive" else ()
    o = engine.empty((N, D), np.float32)
    args: tuple[Any, ...] = (q, k, v, *scratch, o, np.int32(N), np.int32(N), np.float32(0.125))
    grid, block = (-(-N // sizes["BLOCK_M"]),), (sizes["BLOCK_M"],)

    monkeypatch.setattr(runtime, "n_workers", lambda: 1)
    fast, bytes_ms, profile_ms = _best(
        [
            lambda: function(grid, block, args),
            lambda: checked.observe(function, grid, block, args),
            lambda: checked.observe(function, grid, block, args, profile=True),
        ]
    )
    record_row(
        f"cost of a checked run, N = {N}, d = {D}, against one thread of the fast build",
        stage=name,
        fast_ms=f"{fast:.1f}",
        checked_ms=f"{bytes_ms:.0f}",
        checked_times=f"{bytes_ms / fast:.0f}",
        profiled_ms=f"{profile_ms:.0f}",
        profiled_times=f"{profile_ms / fast:.0f}",
    )
    assert bytes_ms < 150 * fast
    assert profile_ms < 350 * fast
