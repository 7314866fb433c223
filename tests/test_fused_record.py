"""Records of fused neighbours: timed ways are right, wrong ones are reported, tables are read."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers import device
from helpers.attention import rotary_and_projection
from helpers.bench.results import NO_RECORD
from helpers.bench.studies import fused

TINY = fused.case_of(96, 64, tokens=192, columns=128)  # two sequences of two heads

pytestmark = pytest.mark.skipif(
    device.ON_GPU, reason="on a GPU the record itself compares all of its ways with float64"
)


@pytest.mark.parametrize("section", ["rotary", "projection"])
def test_all_ways_of_a_section_are_right_with_a_mask(section: str) -> None:
    rows = list(fused.rows_of(section, replace(TINY, causal=True), rounds=1))
    assert not [row for row in rows if "failed" in row]
    compared = [row for row in rows if "max_error" in row]
    assert len(compared) >= 5 and all(0 <= row["max_error"] <= row["tolerance"] < 0.1 for row in compared)
    names = {row["name"] for row in rows}
    here = {name for _, of, *pair in fused.PAIRS for name in pair if of == section}
    assert here <= names, "PAIRS name ways that there are"


def test_what_a_way_needs_beyond_its_inputs() -> None:
    extra = {row["name"]: row["extra_bytes"] for name in ("rotary", "projection") for row in _rows(name)}
    of_q = 2 * math.prod(TINY.shape)
    assert extra["11, half-split in the load"] == extra["11, atomics"] == 0
    assert (extra["rotary, then 07"], extra["07, then GEMM"]) == (2 * of_q, of_q)


def _rows(section: str) -> list[dict[str, Any]]:
    return list(fused.rows_of(section, TINY, rounds=1))


def test_a_wrong_way_is_told_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rotary_and_projection.cos_sin
    monkeypatch.setattr(rotary_and_projection, "cos_sin", lambda *args: tuple(a[::-1].copy() for a in right(*args)))
    truth = fused.rotate
    monkeypatch.setattr(fused, "rotate", lambda *args, **how: -truth(*args, **how))
    rows = _rows("rotary")
    assert any("wrong: error" in row.get("failed", "") for row in rows)
    assert {row["name"] for row in rows if "ms" in row} >= {"07, not rotated", "copies of q and k"}


def test_a_way_that_cannot_be_made_does_not_lose_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(rotary_and_projection, "plan_projection", fail)
    rows = _rows("projection")
    assert [row["failed"] for row in rows if "failed" in row] == ["MemoryError: no memory"] * 2
    assert {"07, then GEMM", "10, then GEMM"} <= {row["name"] for row in rows if "ms" in row}


@pytest.mark.parametrize("form", fused.FORMS)
def test_rotate(form: str) -> None:
    a = np.random.default_rng(0).standard_normal((3, 8))
    found = fused.rotate(a, form)
    assert np.abs(found[0] - a[0]).max() < 0.02  # position 0 is not rotated
    assert np.abs(np.linalg.norm(found, axis=1) / np.linalg.norm(a, axis=1) - 1).max() < 0.01


RECORD = {
    "device": "a GPU",
    "dtype": "bfloat16",
    "kernels": [
        {"name": "07", "head_dim": 64, "registers": 255, "local_bytes": 0, "shared_bytes": 81920, "threads": 128}
    ],
    "rows": [
        {
            **{"section": "rotary", "shape": [32, 512, 32, 64], "causal": False, "name": name, "extra_bytes": extra},
            **{"ms": rounds[1], "rounds": rounds},
        }
        for name, extra, rounds in (
            ("rotary, then 07", 2**27, [2.0, 2.2, 4.0]),
            ("11, half-split in the load", 0, [1.0, 2.0, 1.0]),
        )
    ]
    + [{"section": "rotary", "shape": [1, 1, 1, 1], "causal": False, "name": "way 3", "failed": "MemoryError: no"}],
}


def test_tables() -> None:
    record = json.loads(json.dumps(RECORD))
    words = "rotary in the load v. a pass, 07"
    assert fused.gain(words, 512, 64, record=record) == pytest.approx(
        {"speed": 2.0, "speed_min": 1.1, "speed_max": 4.0, "speed_q1": 1.55, "speed_q3": 3.0}
    )
    assert fused.gain(words, 4096, 64, record=record) is None
    assert fused.gains_table(record=record).splitlines()[2].split() == [*words.split(), "2.00×"]
    assert fused.memory_table(record).splitlines()[2:] == [
        f"{'rotary in the load':40}{'0':>11}",
        f"{'a pass of its own':40}{'128':>11}",
    ]
    text = fused.table(record)
    assert "a GPU" in text and "way 3: MemoryError: no" in text and "255" in text
    assert "2.00× (1.55 to 3.00)" in text and "128 MiB" in text


def test_without_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "recorded", lambda: None)
    for shown in (fused.table, fused.gains_table, fused.memory_table, fused.kernels_table):
        assert shown() == NO_RECORD
    assert fused.section_table("rotary") == NO_RECORD
    assert fused.rows("rotary", 512, 64) == {}


def test_the_committed_record() -> None:
    """The record is complete: nothing failed, and each pair exists at every shape."""
    record = fused.recorded()
    if record is None:
        pytest.skip(NO_RECORD)
    assert not [row for row in record["rows"] if "failed" in row]
    for words, section, *_ in fused.PAIRS:
        for d in fused.HEAD_DIMS:
            for n in fused.LENGTHS:
                assert fused.gain(words, n, d, record=record), (section, words, n, d)
