"""Bugs planted in 16: its check must find every one."""

from __future__ import annotations

import numpy as np
import pytest
from planted import ALL, Bug, check_all_can_be_planted

from helpers.attention import check, kernel, reference
from helpers.attention.fp8 import dequantise, quantise
from helpers.attention.ladder import LADDER, Stage
from helpers.device import cp

STAGE = LADDER["fp8"]
TOLERANCE = 0.03  # rounding P to e4m3 costs 0.008 here
HEADS = "descale_of(q_descale, head) * descale_of(k_descale, head_of_kv(tile, params));"
BUGS = (
    Bug("K's descale is forgotten", HEADS, "descale_of(q_descale, head);"),
    Bug("the largest weight does not fit", "WEIGHT_EXPONENT = 6;", "WEIGHT_EXPONENT = 10;"),
    Bug("O is not rescaled", "rescale[i] = exp2f(m_i[i] - m_new);", "rescale[i] = 1.0f;", times=2, which=ALL),
)


def run_check(stage: Stage, text: str) -> None:
    """Run 70 rows and 400 keys of two heads with a descale each, on this text of the kernel."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, 2, rows, 64), dtype=np.float32) for rows in (70, 400, 400)]
    descales = [np.abs(a).max((2, 3)) / np.float32(448) for a in arrays]
    e4m3 = [quantise(a, descale[..., None, None]) for a, descale in zip(arrays, descales, strict=True)]
    wide = [dequantise(a, d[..., None, None], np.float64) for a, d in zip(e4m3, descales, strict=True)]
    names = dict(zip(("q_descale", "k_descale", "v_descale"), map(cp.asarray, descales), strict=True))
    run, o = stage.prepare(*map(cp.asarray, e4m3), source=text, **names)
    run()
    check.check("o", o, reference.attention(*wide), tolerance=TOLERANCE)


def test_it_is_right_without_them() -> None:
    run_check(STAGE, kernel.source(STAGE.file))


def test_every_bug_can_be_planted() -> None:
    check_all_can_be_planted((kernel.source(STAGE.file), bug) for bug in BUGS)


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_the_check_sees_it(bug: Bug) -> None:
    with pytest.raises(bug.error):
        run_check(STAGE, bug.plant(kernel.source(STAGE.file)))
