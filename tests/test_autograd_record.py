"""The record of forward and backward passes by torch.autograd, as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.bench.studies import autograd


def row(name: str, ms: float, **more: Any) -> dict[str, Any]:
    of_case = {"shape": [4, 16, 4096, 128], "dtype": "bfloat16", "causal": True}
    return {"name": name, **of_case, "ms": ms, "ms_min": ms, "ms_max": ms, "tflops": 512.4, **more}


def test_a_line_sets_ours_beside_each_peer() -> None:
    speed = {"speed": 1.25, "speed_min": 1.2, "speed_max": 1.3}
    head, line = autograd.table({"rows": [row(autograd.OURS, 2.0), row("SDPA cuDNN", 2.5, **speed)]}).splitlines()
    assert "SDPA cuDNN" in head
    assert " ".join(line.split()) == "4 x 16 heads of 128, N = 4096, causal 2.00 ms 512 1.25× (1.20 to 1.30)"


def test_cases_have_as_many_tokens_and_columns() -> None:
    for case in autograd.CASES:
        batch, heads, n, d = case.shape
        assert (batch * n, heads * d) == (16384, 2048)


def test_readme_has_the_recorded_speeds_compared_with_flashattention_4() -> None:
    record = autograd.recorded()
    assert record is not None
    speeds = autograd.flash4_speeds(record)
    readme = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
    assert f"{speeds[0]:.2f} to {speeds[-1]:.2f} times as fast as FlashAttention-4" in readme
    assert autograd.table(record).count("\n") == len(autograd.CASES) + 2 + len(speeds)
