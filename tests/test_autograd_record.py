"""A record of forward and backward passes by torch.autograd is told, and taken by the study's command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.bench import records, study
from helpers.bench.records import NO_RECORD
from helpers.bench.studies import autograd


def row(name: str, ms: float, **more: Any) -> dict[str, Any]:
    of_case = {"shape": [4, 16, 4096, 128], "dtype": "bfloat16", "causal": True}
    return {"name": name, **of_case, "ms": ms, "ms_min": ms, "ms_max": ms, "tflops": 512.4, **more}


def test_the_record_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    path = tmp_path / "autograd.json"
    monkeypatch.setattr(autograd, "recorded", lambda: records.load(path))
    assert autograd.table() == NO_RECORD
    speed = {"speed": 1.25, "speed_min": 1.2, "speed_max": 1.3}
    measured = {"rows": [row(autograd.OURS, 2.0), row("SDPA cuDNN", 2.5, **speed)]}
    monkeypatch.setattr(autograd, "measure", lambda: measured)
    assert study.main(["autograd", str(path)]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "N = 4096" in line)
    assert " ".join(line.split()) == "4 x 16 heads of 128, N = 4096, causal 2.00 ms 512 1.25× (1.20 to 1.30)"
    assert autograd.table().count("\n") == 1


def test_cases_have_as_many_tokens_and_columns() -> None:
    for case in autograd.CASES:
        batch, heads, n, d = case.shape
        assert (batch * n, heads * d) == (16384, 2048)
