"""Score functions of published models, for `helpers.attention.flash_attention(q, k, v, **soft_cap(30))`.

Each is text in CUDA C++, which ladder/score_mod.py inserts before a kernel.
For biases stored as arrays, ALiBi and sinks, use the arguments bias, alibi_slopes and sinks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from helpers.attention.ladder.score_mod import DISTANCE, DISTANCE_TABLE
from helpers.attention.scalars import finite_number, whole_number


def soft_cap(cap: float) -> dict[str, Any]:
    """Keep scores within -cap and cap by cap * tanh(score / cap), as Gemma 2 does (Gemma Team 2024, section 2).

    tanh(x) is 1 - 2 / (1 + exp(2 x)): two instructions of the special function units, and an error of some 1e-7 * cap.

    Raises:
        TypeError, ValueError: cap is not a number from 1e-30 to 1e30.
    """
    cap = finite_number("cap", cap)
    if not 1e-30 <= cap <= 1e30:
        raise ValueError(f"cap = {cap}; a number from 1e-30 to 1e30 is needed, and without a cap no function of scores")
    args = {"cap": cap, "minus_two_caps": -2 * cap, "per_cap": 1 / cap, "log2_per_cap": 2 / cap * math.log2(math.e)}
    return {
        "score_mod": "fmaf(minus_two_caps, __fdividef(1.0f, 1.0f + exp2f(score * log2_per_cap)), cap)",
        "score_mod_grad": "fmaf(-(y * per_cap), y * per_cap, 1.0f)",
        "mod_args": {name: np.float32(value) for name, value in args.items()},
    }


def relative_bias(table: Any, longest: int | None = None) -> dict[str, Any]:
    """Add table[head, reach + kv_idx - q_idx] to the scores; beyond `reach` the nearest distance's number (T5).

    Raffel et al. 2020, section 2.1, have few numbers for many distances: a table of all distances repeats them. Its
    gradient: flash_attention_backward(..., wrt=["table"]).

    Args:
        table: float32 (heads, 2 * reach + 1), on the device.
        longest: at least the rows and the keys of all calls; more are refused. If the table reaches that far, distances
            are not clamped, and the address of each number differs from its neighbour's by a constant.

    Raises:
        TypeError, ValueError: a table of another kind, or with an even number of columns; longest is below 1.
    """
    if getattr(table, "ndim", None) != 2 or str(table.dtype).removeprefix("torch.") != "float32":
        got = f"{table.dtype} {tuple(table.shape)}" if hasattr(table, "dtype") else type(table).__name__
        raise TypeError(f"table must be float32 (heads, 2 * reach + 1); got {got}")
    width = int(table.shape[1])
    if width % 2 == 0:
        raise ValueError(
            f"table has {width} columns; an odd number, 2 * reach + 1, is needed: the middle one is distance 0"
        )
    if longest is not None:
        longest = whole_number("longest", longest, least=1)
    clamps = longest is None or longest > width // 2 + 1
    distance = f"min(max({DISTANCE}, -reach), reach)" if clamps else DISTANCE
    return {
        "score_mod": DISTANCE_TABLE.format(distance),
        "score_mod_grad": "1",
        "mod_args": {"table": table, "width": np.int32(width), "reach": np.int32(width // 2)},
    }
