"""Notebook 17's pictures: bars are as long as the work, maps contain each pair once, records are read."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.attention.ring_schedules import SCHEDULES, steps
from helpers.bench.studies import ring as study
from helpers.draw import ring as draw
from helpers.lesson import ring as lesson
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


def test_what_is_recorded_is_read() -> None:
    def row(name: str, rows: int, ms: float, **others: object) -> dict[str, object]:
        what = {"part": "forward", "causal": True, "heads": 16, "gpus": 2, "rows": rows, "host_ms": 0.5}
        return {**what, "name": name, "ms": ms, "speed": 1 / ms, **others}

    rows = [
        row("zigzag, nccl, 0 left", 2048, 4.0),
        row("zigzag, nccl, 8 left", 2048, 2.0),
        row("ring, peer", 2048, 1.0),
    ]
    rows += [row("zigzag, peer copies", 4096, 5.0), row("zigzag, nccl", 2048, 1.0, causal=False), {"part": "copies"}]
    record = {"rows": rows}
    best = lesson.fastest(record, "zigzag, nccl", causal=True, heads=16)
    assert {n: found["ms"] for n, found in best.items()} == {2048: 2.0}
    assert not lesson.fastest(None, "zigzag", causal=True, heads=16)
    backward = {**rows[3], "part": "backward", "speed": 0.25}
    lines = lesson.efficiency_table({"rows": [*rows, backward]}).splitlines()
    assert " ".join(lines[0].split()) == "tokens a GPU zigzag by NCCL plain ring gradients zigzag of the host"
    assert lines[1].split() == ["2,048", "0.50", "1.00"]
    assert lines[2].split() == ["4,096", "0.20", "0.25", "5.00", "ms", "0.50", "ms"]
    assert "zigzag" not in lesson.efficiency_table(record, heads=32).splitlines()[0].split()[3:-4]


def test_short_steps_and_an_all_gather_are_tabulated() -> None:
    def row(name: str, part: str, **others: object) -> dict[str, object]:
        what = {"part": part, "causal": True, "heads": 16, "gpus": 2, "rows": 8192, "name": name, "ms": 1.5}
        return {**what, "speed": 0.5, **others}

    rows = [row("calls, peer copies", "short forward"), row("graph, peer copies", "short backward", speed=0.91)]
    rows += [
        row("graph, nccl", "short forward"),
        *(row("its copies", "gathered", sustained_ms=1.5, sm_mhz=[1980, 1]) for _ in range(2)),
    ]
    lines = [line.split() for line in lesson.graph_table({"rows": rows}).splitlines()]
    assert lines[0][-1] == "8,192" and lines[1:] == [
        ["forward,", "causal", "calls", "0.50"],
        ["backward,", "causal", "graphs", "0.91"],
    ]
    apart = lesson.apart_table({"rows": [*rows, row("independent", "short forward", ms=1.25)]}).splitlines()
    assert apart[1].split() == ["graph", "1.50", "ms"] and apart[-1].split() == ["independent", "1.25", "ms"]
    pieces = lesson.gather_table({"rows": rows}, 8192).splitlines()
    assert pieces[1].split() == ["its", "copies", *["1.50", "ms", "1980", "MHz"] * 2]


def test_copies_and_long_runs_are_found() -> None:
    copies = [{"part": "copies", "name": name, "gpus": 2, "rows": 2048, "ms": 1.0} for name in ("nccl", "peer copies")]
    long = [{"part": "long", "name": f"zigzag, {way}", "gpus": 4, "ms": 2.0} for way in ("nccl", "peer copies")]
    record = {"rows": [*copies, *long]}
    assert lesson.copies_by_size(record) == {2048: copies[1]} and not lesson.copies_by_size(record, gpus=4)
    assert lesson.longest(record) == {4: {"nccl": long[0], "peer copies": long[1]}}


def test_rounding_partial_outputs_adds_to_the_error() -> None:
    once, each = (lesson.error_of_merges(8, store) for store in (lambda a: a, lesson.rounded))
    assert once < 6e-4 and each > 1.5 * once


def test_what_is_exact_is_in_the_layout_of_the_inputs() -> None:
    q, k, v, do = lesson.inputs(12)
    got = lesson.expected_gradients(do, q, k, v, causal=True)
    assert [a.shape for a in got] == [a.shape for a in (q, k, v)]
    h = 1e-4
    one = np.zeros(v.shape)
    one[0, 3, 1, 5] = h
    wide = v.astype(np.float64)
    change = lesson.expected(q, k, wide + one, causal=True) - lesson.expected(q, k, wide - one, causal=True)
    assert got[2][0, 3, 1, 5] == pytest.approx((change * do.astype(np.float64)).sum() / (2 * h), rel=1e-6)
    assert lesson.expected(q, *lesson.inputs(12, keys=20)[1:3]).shape == q.shape


def test_a_fixed_time_and_a_rate_are_found_in_copies() -> None:
    rows = [
        {"part": "copies", "name": "nccl", "gpus": 4, "rows": n, "bytes": 4096 * n, "ms": 0.2 + 4096 * n / 300e6}
        for n in (2048, 8192, 65536)
    ]
    fit = lesson.fit_copies({"rows": rows}, "nccl", gpus=4)
    assert fit == pytest.approx({"t0_ms": 0.2, "gb_per_s": 300.0, "error": 0.0}, abs=1e-9)
    link = {"t0_ms": fit["t0_ms"], "gb_per_s": fit["gb_per_s"]}
    short, long = (study.efficiency(2, n, 16, 16, **link) for n in (2048, 65536))
    assert short == pytest.approx(2 * 0.0573 / (0.2 + 16.78 / 300 + 0.0573), rel=1e-2) and long == 1
