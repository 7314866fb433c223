"""Compare an output with the reference and print the PASS line; make inputs to compare on; derive tolerances."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from helpers.attention import fp8, reference
from helpers.engine.cuda_source.signatures import dtype_of

REAL_INPUTS = Path(__file__).resolve().parents[1] / "data" / "minilm_qkv.npz"
TOLERANCE = 1e-5  # float32 against float64, unit-normal inputs


class CheckFailed(AssertionError):
    """An output that does not match. `result` holds the CheckResult."""

    def __init__(self, result: CheckResult) -> None:
        super().__init__(result.message)
        self.result = result


@dataclass(frozen=True)
class CheckResult:
    """The result of check(). True in an `if` when the check passed.

        max_error: largest absolute error; inf if an element is NaN or the shape is wrong.
    wrong: elements outside the tolerance, including NaN; all of them if the shape is wrong.
        nan: elements that are NaN.
        total: elements expected. message: the printed line.
        worst: index of the worst element: the first NaN, if there is one. None where the shape is wrong.
        worst_row, rows_wrong: its row, and how many rows hold a wrong element. Rows are along the axis
        before the last, or along the only one.
    """

    name: str
    passed: bool
    max_error: float
    tolerance: float
    wrong: int
    nan: int
    total: int
    message: str
    worst: tuple[int, ...] | None = None
    worst_row: int | None = None
    rows_wrong: int = 0

    def __bool__(self) -> bool:
        return self.passed

    def _ipython_display_(self) -> None:
        """Display nothing: as the last value of a cell, it has already printed its line."""


def check(name: str, out: Any, expected: Any, *, tolerance: float = TOLERANCE, must_pass: bool = True) -> CheckResult:
    """Compare like `compare`, and print one line, [PASS] or [FAIL].

    must_pass=False is for a cell that breaks a kernel on purpose: it prints [FAIL] and continues.

    Raises CheckFailed (an AssertionError) on failure unless must_pass is False; otherwise like `compare`.
    """
    result = compare(name, out, expected, tolerance=tolerance)
    print(result.message)
    if must_pass and not result.passed:
        raise CheckFailed(result)
    return result


def compare(name: str, out: Any, expected: Any, *, tolerance: float = TOLERANCE) -> CheckResult:
    """Compare out with expected, element by element, by absolute error.

    name: what the message calls the output. out: an array of the device or of NumPy, any real dtype. expected:
    the same shape, from helpers.attention.reference. tolerance: the largest absolute error that passes.

    NaN never passes, nor does another shape (nothing is broadcast). inf passes only if the same inf is expected. Raises
    ValueError for a comparison that could not mean anything: NaN in expected, nothing to compare, a tolerance that is
    negative, NaN or inf; TypeError for anything but an array of real numbers.
    """
    number = isinstance(tolerance, int | float | np.integer | np.floating) and not isinstance(tolerance, bool)
    if not (number and math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"tolerance is {tolerance!r}: expected a finite number, 0 or more.")
    got, want = _numbers("out", out), _numbers("expected", expected)
    if want.size == 0:
        raise ValueError(f"expected has shape {want.shape}: there is nothing to compare.")
    if np.isnan(want).any():
        raise ValueError(f"expected holds {int(np.isnan(want).sum())} NaN: correct the reference's inputs first.")
    return _compared(name, got, want, float(tolerance))


def make_inputs(
    n: int, n_kv: int, d: int, *, seed: int = 0, mean: float = 0.25
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make random q (n, d), k (n_kv, d), v (n_kv, d): float32, normal, variance 1, reproducible by seed.

    The mean is not zero, so that a kernel that forgets keys, or writes zeros, is far from the reference. Raises
    ValueError if a size is not a positive int.
    """
    for label, size in (("n", n), ("n_kv", n_kv), ("d", d)):
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f"{label} is {size!r}: expected an int of at least 1.")
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(s, dtype=np.float32) + np.float32(mean) for s in ((n, d), (n_kv, d), (n_kv, d)))
    return q, k, v


def in_type(x: np.ndarray, dtype: str) -> np.ndarray:
    """Round x to a dtype by its name in stages: "float32", a half type, or "uint8" for the bytes of e4m3."""
    return fp8.quantise(x) if dtype == "uint8" else x.astype(dtype_of(dtype), copy=False)


def in_float64(x: Any) -> np.ndarray:
    """Return an array's numbers in float64; for e4m3 in uint8, those that the bytes stand for."""
    x = np.asarray(x)
    return fp8.dequantise(x, dtype=np.float64) if x.dtype == np.uint8 else x.astype(np.float64)


def real_inputs(head: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return q, k, v, each (272, 32) float32: one of the 12 heads of layer 1 of all-MiniLM-L6-v2, reading Darwin.

    The scale is the usual 1 / sqrt(32). Heads worth a look: 8 attends to the next token and 9 to the one
    before, both sharply; 10 attends to [CLS], the first token, from almost everywhere; 5 spreads its weight
    widely. real_tokens() names the 272 tokens, real_provenance() the sources; helpers/data/make_minilm_qkv.py made the
    file. Raises ValueError for a head that does not exist.
    """
    with _real_file() as file:
        heads = len(file["q"])
        if isinstance(head, bool) or not isinstance(head, int | np.integer) or not 0 <= head < heads:
            raise ValueError(f"head is {head!r}: expected an int from 0 to {heads - 1}.")
        q, k, v = (file[name][head].copy() for name in ("q", "k", "v"))
    return q, k, v


def real_tokens() -> list[str]:
    """Return the 272 tokens of real_inputs(), row by row. `##` begins a token that continues the word before it."""
    with _real_file() as file:
        return file["tokens"].tolist()


def real_provenance() -> dict[str, str]:
    """Return the sources of real_inputs(): model, model_sha256, licence, layer, text_source, made_by."""
    with _real_file() as file:
        return {name: str(file[name]) for name in file.files if file[name].ndim == 0}


def tolerance_for(q: Any, k: Any, softmax_scale: float | None = None) -> float:
    """Derive the tolerance for float32 attention on these q and k, v near unit-normal: 1e-5, or more for large logits.

    Use it where the scaled logits are far above unit-normal ones. There the rounding of a logit, which grows
    with the logit, outweighs all else: exp turns an absolute error in a logit into a relative error of a
    probability.

    1.  A logit is s = scale * S, S a sum of d products t. Each product, each partial sum, the scaling and the
        change of base for exp2 round by a factor 1 + e, |e| <= u = 2^-24, of variance at most u^2 / 3
        (uniform; Higham & Mary 2019 justify treating the e as independent). For terms in no special order a
        partial sum of j of them has mean square  (j/d)^2 S^2 + j (1 - j/d) (T/d - S^2/d^2),  with T the sum
        of t^2. Summed over j, and rounded upward, the standard deviation of the computed logit is
            sigma = scale * u / sqrt(3) * sqrt(d S^2 / 3 + (1 + d/6) T + 3 S^2).
        Blocked, pairwise and fused sums have less.
    2.  Products that are all alike, as in constant rows, can all round the same way, and nothing averages
        out. The partial sums then grow evenly, and half an ulp of each adds up to  scale * u * d |S| / 3  at
        most. S^2 / (d T) is 1 for such products and near 1/d for random ones, so the share that counts is
            bias = scale * u |S|^3 / (3 T).
    3.  An error e_j in logit j moves the output by  sum_j p_j e_j (v_j - o), to first order. |v_j - o| is at
        most (1 - p_j) R, where R is the range of v. So row i moves by at most  R * sum_j p_j (1 - p_j) |e_j|.
        This is zero where one key takes all the weight and largest where two large logits nearly tie.
    4.  |e_j| <= 3 sigma_j + bias_j and R = 8 (unit-normal values lie within -4 .. 4).

    Measured on sequential float32 sums, logits up to 1e4: the error is 0.003 to 0.3 of this tolerance.
    Unit-normal inputs get 1e-5 to 2e-5; 1e-5 itself is enough for them.

    q: (..., N, d), k: (..., N_kv, d), real, finite, of NumPy or of the device. Costs about four calls of the
    reference. Raises ValueError for shapes that do not fit, and where the tolerance would exceed 0.5: float32
    logits of that size (near 1e6) leave no softmax to check; TypeError for what is not an array of real
    numbers.
    """
    q, k = _numbers("q", q), _numbers("k", k)
    if q.ndim < 2 or not np.isfinite(q).all():
        raise ValueError(f"q has shape {q.shape}: expected (..., N, d), with no NaN and no inf.")
    # The reference's own checks of shapes and values, on one row.
    reference.attention(q[..., :1, :], k, k, softmax_scale=softmax_scale)
    d = q.shape[-1]
    scale = 1.0 / math.sqrt(d) if softmax_scale is None else float(softmax_scale)
    batch = np.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    q = np.broadcast_to(q, batch + q.shape[-2:])
    k = np.broadcast_to(k, batch + k.shape[-2:])
    step = max(1, reference.CHUNK_BYTES // (8 * k.shape[-2]))
    worst = 0.0
    for head in np.ndindex(batch):
        for start in range(0, q.shape[-2], step):
            rows = q[head][start : start + step]
            s = rows @ k[head].T
            t = (rows**2) @ (k[head] ** 2).T
            sigma = np.sqrt(((d / 3 + 3) * s**2 + (1 + d / 6) * t) / 3)
            bias = np.abs(s) * s * s / np.where(t > 0, 3 * t, 1)  # t = 0 only where s = 0
            p = reference.softmax(scale * s)
            worst = max(worst, float((p * (1 - p) * (3 * sigma + bias)).sum(axis=-1).max()))
    tolerance = max(TOLERANCE, 8 * abs(scale) * 2.0**-24 * worst)
    if tolerance > 0.5:
        raise ValueError(
            f"the tolerance for these logits would be {tolerance:.1e}, as large as the output itself: "
            "float32 cannot hold their softmax. Use smaller q, k or softmax_scale."
        )
    return tolerance


class Expected(NamedTuple):
    """The expected result of a kernel: o and lse in float64, and the absolute tolerance for o."""

    o: np.ndarray
    lse: np.ndarray
    tolerance: float


def expect(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    **extras: Any,
) -> Expected:
    """Compute attention of arrays in models' layout in float64, and the tolerance for a kernel.

    float32: 1e-5. In a half type, or e4m3, the inputs are exact, and NumPy rounds P and O and nothing else: the kernel
    may have twice its error, or one unit in the last place of the largest output.

    Args:
        q: (batch, seq, heads, d), or without batch, or (rows, d), of float32, a half type, or e4m3 in uint8.
        k, v: the same with kv_heads, which divide heads.
        causal, window, softmax_scale: as in `reference.attention`.
        extras: bias, alibi_slopes, rotary_cos, rotary_sin, rotary_interleaved and rotary_positions, as there. In a half
            type q and k are rounded once more after the rotation, as a kernel rounds them. q_descale, k_descale,
            v_descale: (batch, heads), the factors of e4m3, or (batch, heads, blocks of rows).

    Returns:
        o as q; lse (batch, heads, seq); the tolerance.
    """
    dtype = np.asarray(q).dtype
    descales = (extras.pop(f"{name}_descale", None) for name in "qkv")
    q, k, v = (in_float64(a) * _by_row(descale, a) for a, descale in zip((q, k, v), descales, strict=True))
    if q.ndim > 2:
        share = q.shape[-2] // k.shape[-2]
        q, k, v = (a.swapaxes(-3, -2) for a in (q, k.repeat(share, -2), v.repeat(share, -2)))
    if "rotary_cos" in extras:
        names = [name for name in extras if name.startswith("rotary_")]
        q, k = reference.rotated(q, k, **{name: extras.pop(name) for name in names})
        if dtype.itemsize == 2:
            q, k = (a.astype(dtype).astype(np.float64) for a in (q, k))
    options = {"causal": causal, "window": window, **extras}
    o, lse = reference.attention(q, k, v, softmax_scale=softmax_scale, return_lse=True, **options)
    tolerance = TOLERANCE
    if dtype.itemsize < 4:
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        p, total = reference.exponentials(reference.scores(q, k, softmax_scale=scale, **options))
        rounded = round_p_and_o(p, total, v, dtype.name)
        of_o = RESULTS.get(dtype.name, dtype)
        one_step = float(ml_dtypes.finfo(of_o).eps) * np.abs(o).max(initial=0.0)
        tolerance = max(2 * max(float(np.abs(each - o).max(initial=0.0)) for each in rounded), one_step)
    return Expected(o.swapaxes(-3, -2) if q.ndim > 2 else o, lse, tolerance)


def _by_row(descale: Any, a: Any) -> Any:
    """Reshape (batch, heads) or (batch, heads, blocks) so that it broadcasts over a in models' layout; 1 for None."""
    if descale is None:
        return 1.0
    wide = np.asarray(descale, np.float64)
    if wide.ndim == 2:
        return wide[:, None, :, None]
    return wide.repeat(fp8.DESCALE_ROWS, axis=2)[..., : a.shape[1]].swapaxes(1, 2)[..., None]


RESULTS = {"uint8": ml_dtypes.bfloat16}  # the type of O if it is not Q's
# A row's largest weight in e4m3: 2^8, or by this many powers of 2 more, since maxima may lag behind (16_fp8.cu).
_LAGS = (0.0, 0.25, 0.5, 0.74)


def round_p_and_o(p: np.ndarray, total: np.ndarray, v: np.ndarray, dtype: str) -> list[np.ndarray]:
    """Compute P V / total in float64, with P and O rounded as in a kernel of this type; in e4m3 for each of `_LAGS`.

    Args:
        p: weights (..., rows, keys), the largest of a row 1. total: their sums, (..., rows, 1). dtype: of q.
    """

    def rounded(x: np.ndarray, to: Any) -> np.ndarray:
        return x.astype(to).astype(np.float64)

    if dtype != "uint8":
        return [rounded(rounded(p, dtype_of(dtype)) @ v / total, dtype_of(dtype))]
    return [rounded(fp8.rounded_weights(p, lag) @ v / total, RESULTS[dtype]) for lag in _LAGS]


def _compared(name: str, got: np.ndarray, want: np.ndarray, tolerance: float) -> CheckResult:
    """Return the CheckResult of compare() for float64 arrays."""
    if got.shape != want.shape:
        message = f"[FAIL] {name}: shape {got.shape}, expected {want.shape}"
        nans = int(np.isnan(got).sum())
        return CheckResult(name, False, math.inf, tolerance, want.size, nans, want.size, message)
    same = got == want  # also true if both are the same inf, whose difference would be NaN
    error = np.abs(np.subtract(got, want, where=~same, out=np.zeros(want.shape)))
    error = np.where(np.isnan(error), np.inf, error)
    nan = np.isnan(got)
    nans = int(nan.sum())
    bad = error > tolerance
    wrong = int(bad.sum())
    # The first NaN is worse than any number, and what a reader must look at.
    worst = tuple(int(i) for i in np.unravel_index(int((nan if nans else error).argmax()), want.shape))
    row_axis = max(want.ndim - 2, 0)
    max_error = float(error.max())
    rows = want.shape[row_axis] if want.ndim else 1
    wrong_rows = np.flatnonzero(np.moveaxis(np.atleast_1d(bad), row_axis, 0).reshape(rows, -1).any(axis=1))
    if wrong == 0:
        message = f"[PASS] {name}: output matches reference (max error: {max_error:.1e} <= {tolerance:.1e})"
    else:
        if nans:
            what = f"NaN{_place(worst)} (expected {want[worst]:.7g})"
        else:
            # 1.04e-05 against 1.0e-05 needs the digits that show which is larger.
            digits = 1 if f"{max_error:.1e}" != f"{tolerance:.1e}" else 6
            what = f"max error {max_error:.{digits}e} > {tolerance:.{digits}e}{_place(worst)}"
            what += f" (got {got[worst]:.7g}, expected {want[worst]:.7g})"
        where = f", in {len(wrong_rows)} of {rows} rows ({_ranges(wrong_rows)})" if want.ndim else ""
        message = f"[FAIL] {name}: {what}; {wrong} of {want.size} elements wrong{where}; {nans} NaN"
    return CheckResult(
        name,
        wrong == 0,
        max_error,
        tolerance,
        wrong=wrong,
        nan=nans,
        total=want.size,
        message=message,
        worst=worst,
        worst_row=worst[row_axis] if worst else None,
        rows_wrong=len(wrong_rows),
    )


def _place(index: tuple[int, ...]) -> str:
    """Write ' at row 5, column 3', with the leading axes named if there are any."""
    if not index:
        return ""
    if len(index) == 1:
        return f" at row {index[0]}"
    lead = f"[{', '.join(map(str, index[:-2]))}] " if len(index) > 2 else ""
    return f" at {lead}row {index[-2]}, column {index[-1]}"


def _ranges(numbers: np.ndarray, most: int = 4) -> str:
    """Write '0-3, 7, 9-12': which rows are wrong often tells what is wrong with a tile."""
    pieces = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    texts = [f"{p[0]}-{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in pieces[:most]]
    return ", ".join(texts) + (", ..." if len(pieces) > most else "")


def _numbers(label: str, a: Any) -> np.ndarray:
    """Convert to a float64 NumPy array, copied from the device if it is there."""
    if not isinstance(a, np.ndarray) and hasattr(a, "get"):
        # Imported here, because a check of NumPy arrays must not start a GPU.
        from helpers.device import cp

        a = cp.asnumpy(a)
    try:
        a = np.asarray(a)
    except ValueError as error:  # rows of several lengths
        raise TypeError(f"{label} is not an array: {error}") from error
    # "V" includes bfloat16, which ml_dtypes adds to NumPy as a dtype of its own.
    if a.dtype.kind not in "buifV" or a.dtype.names is not None:
        raise TypeError(f"{label} is {type(a).__name__} of dtype {a.dtype}: expected an array of real numbers.")
    try:
        return a.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{label} has dtype {a.dtype}: expected real numbers.") from error


def _real_file() -> np.lib.npyio.NpzFile:
    if not REAL_INPUTS.exists():
        raise FileNotFoundError(
            f"{REAL_INPUTS} is missing: take it from the repository again (git checkout), "
            "or make it with helpers/data/make_minilm_qkv.py."
        )
    return np.load(REAL_INPUTS, allow_pickle=False)
