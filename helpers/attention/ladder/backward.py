"""Call a stage that computes gradients, like `Rung.prepare` and `Rung.plan` call a forward stage.

    run, (dq, dk, dv) = backward.prepare(BACKWARD["backward"], do, q, k, v, o, lse, causal=True)

Arrays are (batch, heads, rows, head_dim), as stages take them. For models see `helpers.attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from helpers import device
from helpers.attention.ladder.call import BackwardOptions, check_gradient_arrays
from helpers.attention.ladder.extras import extra_inputs
from helpers.attention.ladder.plan import CompiledPlan, plan_arrays
from helpers.attention.ladder.score_mod import parse_score_mod
from helpers.attention.ladder.stage import Stage


def prepare(
    stage: Stage, do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, **options: Any
) -> tuple[Callable[[], None], tuple[Any, Any, Any]]:
    """Do everything except launch: return a function that launches, and the arrays that it writes, filled with NaN.

    Args: see `plan`.

    Raises:
        TypeError, ValueError: as for `Rung.__call__`.
    """
    ready, arrays, gradients = plan(stage, do, q, k, v, o, lse, **options)
    return ready.bind(arrays), gradients


def plan(
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
    score_mod: str | None = None,
    mask_mod: Any = None,
    mod_args: Mapping[str, Any] | None = None,
    score_mod_grad: str | None = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    cu_seqlens: tuple[Any, Any] | None = None,
    source: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> tuple[CompiledPlan, dict[str, Any], tuple[Any, Any, Any]]:
    """Plan: return the launches, the arrays by name, and (dq, dk, dv), which are among them.

    Args:
        do, o: the gradient of the output and the output, like q. lse: from the forward pass.
        deterministic: the same bits in every run.
        score_mod, mask_mod, mod_args, score_mod_grad, bias, alibi_slopes, sinks: see
            `helpers.attention.flash_attention_backward`. cu_seqlens, source, sizes: see `Rung.plan`.
    """
    mod, of_mod = parse_score_mod(score_mod, mask_mod, mod_args, score_mod_grad, backward=True)
    options = BackwardOptions(window, causal, softmax_scale, deterministic, mod=mod)
    extras = extra_inputs(bias, alibi_slopes, sinks=sinks) | of_mod
    options = stage.check(q, k, v, options, packed=cu_seqlens is not None, extras=extras)
    check_gradient_arrays(do, q, o, lse, q.shape[:-1])
    outputs = {
        f"d{n}": device.cp.full(a.shape, device.cp.nan, dtype=a.dtype) for n, a in zip("qkv", (q, k, v), strict=True)
    }
    inputs = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse, **extras}
    ready, arrays = plan_arrays(stage, inputs, outputs, options, cu_seqlens, source=source, sizes=sizes)
    return ready, arrays, tuple(outputs.values())
