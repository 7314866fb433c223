"""Attention in float64, and the tolerance of a kernel's output in each type.

Tolerances by type come from `check.expect`; those of gradients in half types, from half_gradients.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from helpers.attention import check, reference
from helpers.device import cp


def _on_host(value: Any) -> Any:
    return cp.asnumpy(value) if isinstance(value, cp.ndarray) else value


def exact(q: Any, k: Any, v: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Compute o (..., rows, heads, d) and lse (..., heads, rows) for arrays in models' layout."""
    q, k, v = (check.in_float64(cp.asnumpy(a)).swapaxes(-3, -2) for a in (q, k, v))
    share = q.shape[-3] // k.shape[-3]
    o, lse = reference.attention(q, k.repeat(share, -3), v.repeat(share, -3), return_lse=True, **options)
    return o.swapaxes(-3, -2), lse


def expected(q: Any, k: Any, v: Any, **options: Any) -> check.Expected:
    """Compute o, lse and the tolerance for arrays (batch, heads, rows, d); it grows with float32's spacing at lse."""
    options = {name: _on_host(value) for name, value in options.items()}
    o, lse, tolerance = check.expect(*(cp.asnumpy(a).swapaxes(1, 2) for a in (q, k, v)), **options)
    largest = np.abs(lse[np.isfinite(lse)]).max(initial=0)
    tolerance = max(tolerance, 16 * float(np.spacing(np.float32(largest))))
    return check.Expected(o.swapaxes(1, 2), lse, tolerance)


def check_output(name: str, got: tuple[Any, Any], want: Any, *, more: float = 0.0, of_sums: float = 0.0) -> None:
    """Compare o and lse with those of `want`, which includes a tolerance.

    more: added to both tolerances. of_sums: what the sums of a row's weights add to the error of its lse.

    lse is float32, -inf exactly where no key is seen, and elsewhere as near as float32 adds up.
    """
    check.check(name, got[0], want.o, tolerance=want.tolerance + more)
    seen, lse = np.isfinite(want.lse), cp.asnumpy(got[1])
    assert lse.dtype == np.float32 and np.array_equal(np.isneginf(lse), ~seen), f"{name}: lse of rows that see no key"
    near = 1e-5 * (1 + np.abs(want.lse[seen]).max(initial=0)) + more + of_sums
    check.check(f"{name}, lse", np.where(seen, lse, 0), np.where(seen, want.lse, 0), tolerance=near)


def check_call(name: str, o: Any, lse: Any, q: Any, k: Any, v: Any, **options: Any) -> None:
    """Compare o (batch, heads, rows, d) and lse for inputs in models' layout."""
    want = check.expect(q, k, v, **options)
    check_output(name, (cp.asnumpy(o).swapaxes(1, 2), lse), want, of_sums=_of_sums(q))


def _of_sums(q: Any) -> float:
    """Return what rounding adds to the error of lse: with e4m3 weights log(1 + 1 / 16), for a row with one key."""
    return 0.06 if q.dtype == np.uint8 else 0.0


def check_packed(
    name: str, attend: Callable[..., tuple[Any, Any]], q: Any, k: Any, v: Any, lengths: tuple[Any, Any], **options: Any
) -> None:
    """Compare each packed sequence with the same sequence alone; 0 and -inf if it has no key.

    Args:
        attend: returns o (rows, heads, d) and lse (heads, rows) for q, k, v and cu_seqlens of both. q, k, v: (rows,
            heads, d). lengths: the sequences' numbers of rows and keys.
    """
    cu_q, cu_k = (np.cumsum([0, *each], dtype=np.int32) for each in lengths)
    o, lse = map(cp.asnumpy, attend(q, k, v, cu_q, cu_k))
    for i, (rows, keys) in enumerate(zip(*lengths, strict=True)):
        own, its = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        if rows and keys:
            want = check.expect(q[None, own], k[None, its], v[None, its], **options)
            check_output(f"{name}, sequence {i}", (o[None, own], lse[None, :, own]), want, of_sums=_of_sums(q))
        else:
            assert not o[own].any() and np.isneginf(lse[:, own]).all()


def check_gradients(
    got: Any, want: Any, *, name: str = "", relative: float = check.TOLERANCE, least: float = 1.0
) -> None:
    """Compare dQ, dK and dV: they are sums of products without a fixed scale, so the largest one sets the tolerance."""
    for what, a, b in zip(("dQ", "dK", "dV"), got, want, strict=True):
        check.check(f"{name}: {what}", a, b, tolerance=relative * max(least, float(np.abs(b).max())))
