"""A stage that computes gradients, called: what `Stage.prepare` and `Stage.ready` are for the forward.

    run, (dq, dk, dv) = backward.prepare(BACKWARD["backward"], do, q, k, v, o, lse, causal=True)

Arrays are (batch, heads, rows, head_dim), as stages take them. For models see `helpers.attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from helpers import device
from helpers.attention.ladder.call import Call, Spec, check_gradient_arrays, softmax_scale_of
from helpers.attention.ladder.contract import Ready, Stage
from helpers.attention.ladder.layout import four_axes, is_aligned

WITH_HEAD_DIM = ("do", "q", "k", "v", "o", "dq", "dk", "dv")


def prepare(
    stage: Stage,
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    deterministic: bool = False,
    cu_seqlens: tuple[Any, Any] | None = None,
    source: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> tuple[Callable[[], None], tuple[Any, Any, Any]]:
    """Everything but the launches: a function that launches them, and what they write, filled with NaN until then.

    Args:
        do, o: the gradient of the output and the output, as q. lse: as the forward returns it.
        deterministic: the same bits in every run.
        cu_seqlens, source, sizes: as `Stage.prepare` has them.

    Raises:
        TypeError, ValueError: as `Stage.__call__`.
    """
    cp = device.cp
    asked = {"causal": causal, "window": window, "varlen": cu_seqlens is not None, "deterministic": deterministic}
    limits_of_mask = stage.check(q, k, v, **asked)
    check_gradient_arrays(do, q, o, lse, q.shape[:-1])
    scale = softmax_scale_of(softmax_scale, q.shape[-1])
    gradients = tuple(cp.full(a.shape, cp.nan, dtype=a.dtype) for a in (q, k, v))
    longest = None
    if cu_seqlens is not None:
        longest = tuple(int(np.diff(cp.asnumpy(cu)).max(initial=0)) for cu in cu_seqlens)
        cu_seqlens = tuple(cp.asarray(cu) for cu in cu_seqlens)
    bound, held = ready(
        stage,
        *(cp.asarray(a) for a in (do, q, k, v, o, lse)),
        *gradients,
        cu_seqlens,
        longest,
        softmax_scale=scale,
        window=limits_of_mask,
        deterministic=deterministic,
        source=source,
        sizes=sizes,
    )
    return bound.bind(held), gradients


def ready(
    stage: Stage,
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    cu_seqlens: tuple[Any, Any] | None,
    longest: tuple[int, int] | None,
    *,
    softmax_scale: float,
    window: tuple[int, int],
    deterministic: bool,
    source: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> tuple[Ready, dict[str, Any]]:
    """A call that has been checked, compiled; and its arrays by name.

    Args:
        do, q, k, v, o, dq, dk, dv: device arrays (..., rows, head_dim). lse, cu_seqlens: device arrays.
        longest: rows and keys of the longest sequence, where they are packed.
    """
    arrays = dict(zip(WITH_HEAD_DIM, (do, q, k, v, o, dq, dk, dv), strict=True))
    arrays = {name: four_axes(a if name in ("dq", "dk", "dv") else stage.readable(a)) for name, a in arrays.items()}
    aligned = all(map(is_aligned, arrays.values()))
    arrays["lse"] = device.cp.ascontiguousarray(lse)
    if cu_seqlens is not None:
        arrays["cu_seqlens_q"], arrays["cu_seqlens_k"] = cu_seqlens
    batch, _, n, head_dim = arrays["q"].shape
    kv_heads, n_kv = arrays["k"].shape[1:3]
    rows, keys = longest or (n, n_kv)
    call = Call(
        {name: Spec.of(a) for name, a in arrays.items()},
        softmax_scale,
        window,
        rows=rows,
        sequences=batch if cu_seqlens is None else len(cu_seqlens[0]) - 1,
        aligned=aligned,
        keys=keys,
        deterministic=deterministic,
    )
    defines = stage.defines_for(head_dim, keys, kv_heads * call.sequences, uneven=call.uneven)
    defines.update(stage.variant(call))
    defines.update(sizes or {})
    return Ready(stage, call, defines, source), arrays
