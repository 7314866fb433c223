"""The pictures of notebook 13: they show their input, and what an X-ray of the kernel recorded."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from helpers.bench.studies import backward_timeline
from helpers.draw import hopper_backward as pictures
from helpers.draw.hopper_backward import Operand
from helpers.lesson import shortcuts


def test_a_product_says_how_its_operands_are_stored() -> None:
    """K-major: contiguous in the dimension that is summed over, a left operand's columns or a right operand's rows."""
    products = [
        (Operand("Sᵀ", (64, 64)), Operand("K", (64, 128), "rows"), Operand("Qᵀ", (128, 64), "columns")),
        (Operand("dV", (64, 128)), Operand("Pᵀ", (64, 64)), Operand("dO", (64, 128), "rows")),
    ]
    drawn = pictures.products(products)
    assert drawn.alt.startswith(
        "products: Sᵀ = K (K-major) times Qᵀ (K-major); dV = Pᵀ (registers) times dO (MN-major)"
    )
    assert drawn.png().startswith(b"\x89PNG")
    assert pictures.major(Operand("Kᵀ", (64, 128), "columns"), left=True) == "MN-major"


def test_readings_and_budgets() -> None:
    assert "K-major: 32 bytes a step; MN-major: 2,048" in pictures.two_readings({"K-major": 32, "MN-major": 2048}).alt
    bars = pictures.budget({"64 rows": {"K": 32, "dQ": 32.5}, "128 rows": {"K": 300}}, 227, unit="KiB")
    assert bars.alt == "64 rows: 64.5 KiB; 128 rows: 300 KiB; the limit is 227" and bars.png()


@pytest.mark.usefixtures("cpu_engine", "only_x_rayed")
def test_steps_of_an_xray() -> None:
    """Four steps of one block: each has five products per consumer, two copies and one addition."""
    rng = np.random.default_rng(0)
    given = [rng.standard_normal((n, 64)).astype(np.float16) for n in (256, 256, 100, 100)]
    sizes: Any = {"BLOCK_M": 64, "BLOCK_N": 128}
    report = shortcuts.xray_gradients("hopper_backward", *given, sizes=sizes)["hopper_backward"]
    rows = pictures.steps_of(report.events)
    for consumer in ("consumer 1", "consumer 2"):
        spans = Counter(what for *_, what in rows[consumer])
        assert all(spans[product] == 4 for product in pictures.PRODUCTS) and spans["waits"]
        order = [what for begin, _, what in sorted(rows[consumer]) if what != "waits"]
        assert order == 4 * list(pictures.PRODUCTS)
    assert [len(rows[name]) for name in ("stage 0", "stage 1", "dQ")] == [4, 4, 4]
    assert all(begin < end for spans in rows.values() for begin, end, _ in spans)
    drawn = pictures.roles_of_backward(report.events, 1, 2)
    (ax,) = drawn.figure.axes
    assert {"full", "empty", "dS ready", "dQ full", "dQ empty"} <= {text.get_text() for text in ax.texts}


def test_a_recorded_step_is_counted_from_when_its_barrier_opens() -> None:
    """The clock after a barrier may be read before it opens, which happens when the later consumer has arrived."""
    early = [
        0,
        10,
        20,
        110,
        210,
        220,
        300,
        301,
        500,
        501,
        600,
        610,
    ]  # 100 cycles early at the barrier of dS
    late = [0, 10, 20, 110, 210, 220, 400, 401, 520, 521, 640, 650]
    row = {
        "shape": [1, 1, 512, 128],
        "consumers": [[[700 * step + mark for mark in marks] for step in range(5)] for marks in (early, late)],
        "adders": [[700 * step + mark for mark in (5, 6, 900)] for step in range(5)],
    }
    parts = backward_timeline.parts(row)
    assert parts["wait for the other's dS"] == [100, 0] and parts["dV, dQ"] == [100, 120]
    assert parts.pop("together") == [700, 700] == [sum(cycles) for cycles in zip(*parts.values(), strict=True)]
    gaps = backward_timeline.gaps(row)
    assert list(gaps.values()) == [80, 60, 260, 300]
    drawn = pictures.timeline_of_backward(row, 2, 3)
    (ax,) = drawn.figure.axes
    bars = {(bar.get_x(), bar.get_width()) for bar in ax.patches}
    assert drawn.alt.endswith("1,350 cycles") and {(300, 100), (640, 260)} <= bars
    assert backward_timeline.table({"rows": [row]}).count("\n") == len(parts) + 1 + len(gaps)
