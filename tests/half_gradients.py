"""Gradients in half types, from single launches, compared with float64 that is rounded where a kernel has to round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from helpers.attention.ladder import Stage, backward
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
    alibi_slopes: np.ndarray | None = None,
    rounded: Any = None,
) -> Arrays:
    """Return dq, dk, dv, o and lse in float64. rounded: the type that o, P, dS and the gradients are rounded to."""

    def as_type(x: np.ndarray) -> np.ndarray:
        return x if rounded is None else x.astype(rounded).astype(np.float64)

    group = q.shape[1] // k.shape[1]
    q, k, v, do = (a.astype(np.float64) for a in (q, k, v, do))
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = scale * q @ k.swapaxes(-1, -2)
    i, j = np.arange(s.shape[-2])[:, None] + s.shape[-1] - s.shape[-2], np.arange(s.shape[-1])
    if alibi_slopes is not None:
        s -= np.asarray(alibi_slopes, np.float64)[..., None, None] * abs(i - j)
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
    """Make do, q, k and v; q has `shape`, (batch, heads, N, d). Logits are `grow` times as large."""
    batch, _, _, d = shape
    rng = np.random.default_rng([*shape, n_kv, kv_heads])
    kv = (batch, kv_heads, n_kv, d)
    means = ((shape, 0.1, 1.0), (shape, 0.3, grow**0.5), (kv, 0.2, grow**0.5), (kv, 0.5, 1.0))
    return tuple(((rng.standard_normal(size) + mean) * by).astype(TYPES[dtype]) for size, mean, by in means)


def compare(name: str, got: Arrays, given: Arrays, *, wanted: Arrays | None = None, **options: Any) -> None:
    """Check that the error is at most twice that of float64 gradients with O, P, dS and results rounded to the type.

    wanted: the result of `reference` for given and the options, if the caller has it.

    If that rounding error happens to be small, one unit in the last place of the largest gradient is allowed; where dP
    - D cancels, as with a single key, float32's rounding of dP is allowed.
    """
    do, q, k, v = (a.astype(np.float64) for a in given)
    dtype = given[1].dtype
    length = np.linalg.norm(do, axis=-1).max(initial=0) * np.linalg.norm(v, axis=-1).max(initial=0)
    of_float32 = 4e-7 * length * max(np.abs(q).max(initial=0), np.abs(k).max(initial=0))
    wanted, rounded = wanted or reference(*given, **options), reference(*given, **options, rounded=dtype)
    for which, x, want, near in zip(("dq", "dk", "dv"), got, wanted, rounded, strict=False):
        x = cp.asnumpy(x).astype(np.float64)
        step = float(ml_dtypes.finfo(dtype).eps) * np.abs(want).max(initial=0)
        tolerance = max(2 * np.abs(near - want).max(initial=0), step, of_float32)
        error = np.abs(x - want).max(initial=0)
        assert error <= tolerance, f"{name}: {which} is off by {error:.2e}; {tolerance:.2e} is allowed"  # false for NaN


# ---- launching a stage or a step


Launch = Callable[..., object]


def launched(kernel: Any, grid: Any, block: Any, args: Any, shared_mem: int = 0) -> None:
    kernel(grid, block, args, shared_mem=shared_mem)


def gradients(
    stage: Stage,
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    sizes: Mapping[str, int],
    *,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    cu_seqlens: tuple[np.ndarray, np.ndarray] | None = None,
    alibi_slopes: np.ndarray | None = None,
    code: str | None = None,
    launch: Launch = launched,
) -> Arrays:
    """Return dq, dk and dv: device arrays like q, k and v, (batch, heads, N, d). Each kernel is launched by `launch`.

    Unwritten elements stay NaN, in the gradients and in scratch memory; integers in scratch start at 99.
    """
    how = {"softmax_scale": softmax_scale, "window": window, "cu_seqlens": cu_seqlens, "source": code, "sizes": sizes}
    how["alibi_slopes"] = alibi_slopes
    ready, arrays, found = backward.plan(stage, do, q, k, v, o, lse, **how)  # sizes may depend on deterministic
    launches = ready.resolve_arguments(arrays)
    for each, _, args in launches:
        for name, a in zip(each.args, args, strict=True):
            if isinstance(name, str) and name in ready.scratch:
                a[...] = cp.nan if a.dtype == np.float32 else 99
    for each, compiled, args in launches:
        launch(compiled, each.grid, each.block, args, shared_mem=each.shared_bytes)
    return found


def check(stage: Stage, name: str, sizes: Mapping[str, int], given: Arrays, **options: Any) -> Arrays:
    """Return the gradients of do, q, k and v after `compare` has checked them. options: those of `gradients`."""
    code, launch = options.pop("code", None), options.pop("launch", launched)
    *_, o, lse = wanted = reference(*given, **options)
    arrays = (cp.asarray(a) for a in (*given, o.astype(given[1].dtype), lse.astype(np.float32)))
    got = gradients(stage, *arrays, sizes, code=code, launch=launch, **options)
    compare(name, got, given, wanted=wanted, **options)
    return got


def check_packed(
    stage: Stage,
    sizes: Mapping[str, int],
    rows: Sequence[int],
    keys: Sequence[int],
    d: int,
    code: str | None = None,
) -> None:
    """Check causal gradients of packed sequences of these lengths, four query heads to two KV heads, in bfloat16."""
    cu_q, cu_k = (np.cumsum([0, *lengths], dtype=np.int32) for lengths in (rows, keys))
    do, q, k, v = inputs((1, 4, sum(rows), d), sum(keys), 2, "bfloat16")
    o, lse = np.zeros_like(q), np.full(q.shape[:3], -np.inf, dtype=np.float32)
    parts = [(slice(*cu_q[i : i + 2]), slice(*cu_k[i : i + 2])) for i in range(len(rows))]
    given = [(do[:, :, own], q[:, :, own], k[:, :, its], v[:, :, its]) for own, its in parts]
    for (own, its), one in zip(parts, given, strict=True):
        if own.start < own.stop and its.start < its.stop:
            *_, some, own_lse = reference(*one, window=(-1, 0))
            o[:, :, own], lse[:, :, own] = some, own_lse
    arrays = (cp.asarray(a) for a in (do, q, k, v, o, lse))
    dq, dk, dv = map(cp.asnumpy, gradients(stage, *arrays, sizes, window=(-1, 0), cu_seqlens=(cu_q, cu_k), code=code))
    for i, ((own, its), one) in enumerate(zip(parts, given, strict=True)):
        got = dq[:, :, own], dk[:, :, its], dv[:, :, its]
        if rows[i] and keys[i]:
            compare(f"{stage.file}, sequence {i}", got, one, window=(-1, 0))
        else:
            assert not any(a.any() for a in got)
