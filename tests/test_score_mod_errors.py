"""A caller whose function of scores does not compile, or reads out of range, gets the text and the place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers import device
from helpers.attention import flash_attention, flash_attention_backward
from helpers.attention.score_mods import relative_bias, soft_cap
from helpers.device import cp
from helpers.lesson.shortcuts import xray_stage

DOES_NOT_COMPILE: dict[str, tuple[dict[str, Any], str]] = {
    "unknown name": ({"score_mod": "score - slope * distanse"}, "score_mod does not compile: .*distanse"),
    "in a mask": ({"mask_mod": "kv_idx <= row"}, "mask_mod does not compile: .*row"),
    "float as an index": ({"mask_mod": "near[position[kv_idx]] < 2"}, "mask_mod does not compile: "),
    "not closed": ({"score_mod": "fmaf(slope, distance, score"}, "score_mod does not compile: "),
    "a comment at the end": ({"score_mod": "slope * scores  // one too many"}, "score_mod does not compile: .*scores"),
    "a double": ({"score_mod": "0.5 * score"}, "score_mod does not compile: a score is a float: write 0.5f"),
    "a float in a mask": ({"mask_mod": "position[kv_idx]"}, "mask_mod does not compile: mask_mod says true or false"),
}


def inputs(n: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, n, 1, 32)).astype(np.float16) for _ in range(3)]


def args() -> dict[str, Any]:
    arrays = {"position": cp.zeros(40, np.float32), "near": cp.zeros(40, np.float32)}
    return {**arrays, "slope": np.float32(0.5)}


@pytest.mark.parametrize("name", DOES_NOT_COMPILE)
def test_a_text_that_does_not_compile(name: str) -> None:
    options, words = DOES_NOT_COMPILE[name]
    with pytest.raises(ValueError, match=words) as raised:
        flash_attention(*inputs(40), **options, mod_args=args())
    assert str(raised.value).endswith(f"\n    {next(iter(options.values()))}")


def test_a_derivative_that_does_not_compile() -> None:
    q, k, v = inputs(40)
    lse = np.zeros((1, 1, 40), np.float32)
    with pytest.raises(ValueError, match=r"score_mod_grad does not compile: .*z") as raised:
        flash_attention_backward(q, q, k, v, q, lse, score_mod="score * score", score_mod_grad="2.0f * z")
    assert str(raised.value).endswith("\n    2.0f * z")


def test_all_lines_of_a_text_are_shown() -> None:
    with pytest.raises(ValueError, match=r"\n    score\n    - slop$"):
        flash_attention(*inputs(40), score_mod="score\n- slop")


@pytest.mark.parametrize("text", ["score + slope", "kv_idx - q_idx  // an int", "kv_idx == q_idx"])
def test_numbers_that_are_scores(text: str) -> None:
    """An int and a bool are accepted."""
    o = flash_attention(*inputs(40), score_mod=text, mod_args=args())
    assert np.isfinite(o.astype(np.float32)).all()


def test_the_x_ray_names_the_text_and_the_array() -> None:
    short = cp.zeros(64, np.float32)
    report = xray_stage("flash_mma", *inputs(70), score_mod="score + table[kv_idx]", mod_args={"table": short})
    first = report.findings[0]
    assert (first.kind, first.file, first.line, first.array) == ("out of bounds", "score_mod", 1, "mod_table")


@pytest.mark.skipif(device.ON_GPU, reason="a GPU has no such message")
def test_so_does_the_error_of_a_launch() -> None:
    short = cp.zeros(64, np.float32)
    with pytest.raises(Exception, match=r"mod_table\[\d+\].* at score_mod:1 .*\n.*score \+ table\[9999 \+ kv_idx\]"):
        flash_attention(*inputs(70), score_mod="score + table[9999 + kv_idx]", mod_args={"table": short})


@pytest.mark.parametrize(
    ("cap", "error", "message"),
    [
        (0, ValueError, "cap = 0.0; a number from"),
        (-30, ValueError, "cap = -30.0"),
        (1e-45, ValueError, "cap = 1e-45"),
        (1e39, ValueError, "cap = 1e[+]39"),
        (float("nan"), ValueError, "cap = nan; a finite number"),
        (float("inf"), ValueError, "cap = inf"),
        ("30", TypeError, "cap must be a number; got str"),
        (None, TypeError, "cap must be a number; got NoneType"),
    ],
    ids=str,
)
def test_caps_that_are_none(cap: Any, error: type[Exception], message: str) -> None:
    """Each gave NaN silently, or an error without a name."""
    with pytest.raises(error, match=message):
        soft_cap(cap)
    assert soft_cap(np.float32(30))["mod_args"] == soft_cap(30)["mod_args"]


def test_tables_of_a_relative_bias() -> None:
    """With an even number of columns the last distance would be the next head's first."""
    table = cp.zeros((4, 5), np.float32)
    wrong: list[tuple[Any, Any, type[Exception], str]] = [
        (table[:, :4], None, ValueError, "table has 4 columns; an odd number"),
        (table[:, :0], None, ValueError, "table has 0 columns"),
        (table[0], None, TypeError, r"table must be float32 \(heads, 2 \* reach \+ 1\); got float32 \(5,\)"),
        (table.astype("float64"), None, TypeError, r"got float64 \(4, 5\)"),
        ([[1.0]], None, TypeError, "got list"),
        (table, 0, ValueError, "longest = 0; 1 or more"),
        (table, 2.5, TypeError, "longest must be a whole number"),
    ]
    for given, longest, error, message in wrong:
        with pytest.raises(error, match=message):
            relative_bias(given, longest)
    assert relative_bias(table, np.int64(3)) == relative_bias(table, 3)
    q = cp.zeros((1, 4, 4, 8), np.float32)
    flash_attention(q[:, :3], q[:, :3], q[:, :3], **relative_bias(table, 3))
    with pytest.raises(ValueError, match="for 3 rows and keys or fewer, and a sequence has 4: give it longest=4"):
        flash_attention(q[:, :3], q, q, **relative_bias(table, 3))
