"""The backward pass whose first block stores a tile of dQ: measured in turns with the other, and the record as text."""

from __future__ import annotations

from typing import Any

import pytest

from helpers import device
from helpers.bench.cases import Case
from helpers.bench.studies import first_store


@pytest.mark.skipif(device.ON_GPU, reason="times a call that is too small for a GPU")
def test_both_ways_are_timed_and_compared() -> None:
    (found,) = first_store.rows((Case((1, 1, 130, 64), "bfloat16", True, backward=True),), rounds=1)
    assert [row["name"] for row in found] == list(first_store.WAYS)
    assert "speed" in found[0] and "speed" not in found[1]


@pytest.mark.skipif(device.ON_GPU, reason="times a call that is too small for a GPU")
def test_shared_groups_are_timed_with_both_others() -> None:
    (found,) = first_store.shares(((Case((1, 4, 130, 64), "bfloat16", True, backward=True), 2),), rounds=1)
    assert [row["name"] for row in found] == [*first_store.SHARES, first_store.WHOLE]
    assert all(row["kv_heads"] == 2 for row in found) and "speed" in found[0]


def row(name: str, ms: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": [32, 16, 512, 128], "dtype": "bfloat16", "causal": True, "ms": ms, **more}


def test_a_line_of_shared_groups_has_three_times() -> None:
    speed = {"speed": 2.5, "speed_min": 2.4, "speed_max": 2.6}
    (shared, one), heads = first_store.SHARES, {"kv_heads": 4}
    rows = [row(shared, 0.2, **speed, **heads), row(one, 0.5, **heads), row(first_store.WHOLE, 0.25, **heads)]
    assert " ".join(first_store.shares_table({"shares": rows}).splitlines()[1].split()) == (
        "32 x 16/4 heads of 128, N = 512, causal 0.500 ms 0.200 ms 2.50× (2.40 to 2.60) 0.250 ms"
    )


def test_a_line_has_both_times() -> None:
    stores, zeros = first_store.WAYS
    speed = {"speed": 1.25, "speed_min": 1.2, "speed_max": 1.3}
    text = first_store.table({"rows": [row(stores, 0.4, **speed), row(zeros, 0.5)]})
    assert " ".join(text.splitlines()[1].split()) == (
        "32 x 16 heads of 128, N = 512, causal 0.500 ms 0.400 ms 1.25× (1.20 to 1.30)"
    )


def test_tries_have_their_range() -> None:
    record = {"tries": [{"name": "dQ a step later", "speeds": [0.91, 0.97]}]}
    assert first_store.tries_table(record).endswith("0.91 to 0.97×")
    assert first_store.table(record) == first_store.tries_table(record)
