"""What gradients in half types are compared with: float64, and float64 rounded where a kernel has to round."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from helpers.device import cp

TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

Arrays = tuple[Any, ...]


def reference(
    do: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    rounded: Any = None,
) -> Arrays:
    """dq, dk, dv, o and lse in float64. rounded: the type that o, P, dS and the gradients are rounded to."""

    def as_type(x: np.ndarray) -> np.ndarray:
        return x if rounded is None else x.astype(rounded).astype(np.float64)

    group = q.shape[1] // k.shape[1]
    q, k, v, do = (a.astype(np.float64) for a in (q, k, v, do))
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = scale * q @ k.swapaxes(-1, -2)
    i, j = np.arange(s.shape[-2])[:, None] + s.shape[-1] - s.shape[-2], np.arange(s.shape[-1])
    left, right = window
    s[..., (left >= 0) & (j < i - left) | (right >= 0) & (j > i + right)] = -np.inf
    largest = s.max(-1, keepdims=True)
    largest = np.where(np.isfinite(largest), largest, 0)
    p = np.exp(s - largest)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (largest + np.log(total))[..., 0]
    p /= np.where(total > 0, total, 1)
    o = p @ v
    ds = as_type(p * (do @ v.swapaxes(-1, -2) - (do * as_type(o)).sum(-1, keepdims=True)))
    dk, dv = scale * ds.swapaxes(-1, -2) @ q, as_type(p).swapaxes(-1, -2) @ do
    dk, dv = (a.reshape(a.shape[0], -1, group, *a.shape[2:]).sum(2) for a in (dk, dv))
    return (*(as_type(a) for a in (scale * ds @ k, dk, dv)), o, lse)


def inputs(shape: tuple[int, ...], n_kv: int, kv_heads: int, dtype: str, *, grow: float = 1.0) -> Arrays:
    """do, q, k and v; q has `shape`, (batch, heads, N, d). Logits are `grow` times as large."""
    batch, _, _, d = shape
    rng = np.random.default_rng([*shape, n_kv, kv_heads])
    kv = (batch, kv_heads, n_kv, d)
    means = ((shape, 0.1, 1.0), (shape, 0.3, grow**0.5), (kv, 0.2, grow**0.5), (kv, 0.5, 1.0))
    return tuple(((rng.standard_normal(size) + mean) * by).astype(TYPES[dtype]) for size, mean, by in means)


def compare(name: str, got: Arrays, given: Arrays, **options: Any) -> None:
    """The error is at most twice that of float64 gradients whose O, P, dS and results are rounded to the type.

    Where that rounding happens to be kind, one step of the type at the largest gradient is allowed; where dP - D
    cancels, as with one key, float32's rounding of dP is.
    """
    do, q, k, v = (a.astype(np.float64) for a in given)
    dtype = given[1].dtype
    length = np.linalg.norm(do, axis=-1).max(initial=0) * np.linalg.norm(v, axis=-1).max(initial=0)
    of_float32 = 4e-7 * length * max(np.abs(q).max(initial=0), np.abs(k).max(initial=0))
    wanted, rounded = reference(*given, **options), reference(*given, **options, rounded=dtype)
    for which, x, want, near in zip(("dq", "dk", "dv"), got, wanted, rounded, strict=False):
        x = cp.asnumpy(x).astype(np.float64)
        step = float(ml_dtypes.finfo(dtype).eps) * np.abs(want).max(initial=0)
        tolerance = max(2 * np.abs(near - want).max(initial=0), step, of_float32)
        error = np.abs(x - want).max(initial=0)
        assert error <= tolerance, f"{name}: {which} is off by {error:.2e}; {tolerance:.2e} is allowed"  # NaN is not
