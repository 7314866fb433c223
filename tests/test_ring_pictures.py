"""The pictures of notebook 17: bars are as long as the work, and maps have each pair once."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.attention.ring import SCHEDULES, steps
from helpers.draw import ring as draw
from helpers.lesson import show


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_bars_are_as_long_as_the_work(size: int, schedule: str) -> None:
    rows = 8
    places = draw.bars(steps(schedule, size, causal=True, rows=rows), rows * rows)
    done = max(place[2] for place in places)
    work = sum(end - begin for _, begin, end, *_ in places)
    n = size * rows
    assert work == pytest.approx(n * (n + 1) / 2 / rows**2)
    if schedule != "ring":
        assert done == pytest.approx(work / size), "somebody waits"
    assert "done after" in repr(show.schedules({schedule: places}, ylabel="rank", xlabel="time"))


def test_a_map_has_each_pair_once() -> None:
    for schedule in SCHEDULES:
        ranks, numbers = draw.maps(schedule, 3, 4)
        assert np.array_equal(ranks >= 0, np.tri(12, dtype=bool)) and np.array_equal(ranks >= 0, numbers >= 0)
    ranks, numbers = draw.maps("ring", 3, 2)
    assert ranks[:, 0].tolist() == [0, 0, 1, 1, 2, 2] and numbers[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    ranks, numbers = draw.maps("zigzag", 2, 4, causal=True)
    assert ranks[:, 0].tolist() == [0, 0, 1, 1, 1, 1, 0, 0] and numbers[6].tolist() == [0, 0, 1, 1, 1, 1, 0, -1]
    assert "zigzag" in repr(draw.work(["ring", "zigzag"], 4))
