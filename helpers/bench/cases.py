"""Cases: a shape, a type and a mask; their inputs; and the rows of an output that are compared with float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from helpers.attention.check import RESULTS, TOLERANCE, in_float64, in_type, make_inputs, round_p_and_o
from helpers.attention.ladder.call import Call, Spec, mask_window, softmax_scale_of
from helpers.attention.ladder.layout import titles
from helpers.device import cp
from helpers.engine.cuda_source.signatures import dtype_of

TYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SAMPLED_ROWS = 256  # rows of the output compared with float64: enough to see any wrong tile, cheap at any N
SAMPLED_HEADS = 4
LONG_ROWS = 8192  # with more rows, float64 takes seconds per head
BACKWARD_FLOPS = 2.5  # times the forward pass's, by convention: five matrix products, however many a kernel computes

Shape = tuple[int, int, int, int]  # (batch, heads, rows, head_dim)


def flops(n: int, n_kv: int, head_dim: int, *, causal: bool = False) -> float:
    """Count attention's floating-point operations by convention: two matrix products, without the softmax.

    A causal mask halves them.
    """
    return 4 * n * n_kv * head_dim / (2 if causal else 1)


@dataclass(frozen=True)
class Case:
    """A computation: as many queries as keys, causal or not; the output, or the gradients after a forward pass."""

    shape: Shape
    dtype: str = "float32"
    causal: bool = False
    backward: bool = False

    @property
    def flops(self) -> float:
        """FLOP of all heads."""
        batch, heads, n, head_dim = self.shape
        of_a_head = flops(n, n, head_dim, causal=self.causal)
        return batch * heads * of_a_head * (BACKWARD_FLOPS if self.backward else 1)

    @property
    def bytes(self) -> int:
        """Bytes of Q, K, V and O: the minimum that a kernel can move."""
        return math.prod(self.shape) * sum(spec.dtype.itemsize for spec in call_of(self).arrays.values())

    def __str__(self) -> str:
        more = " causal" * self.causal + " backward" * self.backward
        return f"{'x'.join(map(str, self.shape))} {titles(self.dtype)}{more}"


def call_of(case: Case) -> Call:
    """Make the Call of a case: contiguous arrays (batch, heads, N, d), the usual scale."""
    batch, _, rows, head_dim = case.shape
    dtype = dtype_of(case.dtype)
    arrays = dict.fromkeys("qkv", Spec.dense(case.shape, dtype))
    arrays["o"] = Spec.dense(case.shape, RESULTS.get(case.dtype, dtype))
    scale, window = softmax_scale_of(None, head_dim), mask_window(None, case.causal)
    return Call(arrays, scale, window, rows, batch, aligned=True, keys=rows)


def shape_of_tokens(n: int, head_dim: int, *, tokens: int = 16384, columns: int = 2048) -> Shape:
    """Return the shape for a number of tokens in sequences of n, and a number of columns of all heads together."""
    return tokens // n, columns // head_dim, n, head_dim


@functools.lru_cache(maxsize=1)
def _normal(size: int, head_dim: int) -> tuple[np.ndarray, ...]:
    """Make the elements of q, k and v in float32, in parallel; each head has its own values."""
    with ThreadPoolExecutor(3) as pool:
        return tuple(pool.map(lambda seed: make_inputs(size // head_dim, 1, head_dim, seed=seed)[0], (1, 2, 3)))


class Inputs:
    """q, k and v of a shape (batch, heads, N, d) and a type: on the host and, on demand, on the device or as tensors.

    Args:
        heads_last: store them in models' layout, (batch, N, heads, d).
    """

    def __init__(self, shape: Shape, dtype: str = "float32", *, heads_last: bool = False) -> None:
        self.shape, self.dtype, self.heads_last = tuple(shape), dtype, heads_last
        self.host = tuple(in_type(a, dtype) for a in self._of_shape())
        self._samples: dict[tuple[Any, ...], Any] = {}

    def _of_shape(self) -> list[np.ndarray]:
        batch, heads, n, head_dim = self.shape
        arrays = _normal(math.prod(self.shape), head_dim)
        if self.heads_last:
            return [a.reshape(batch, n, heads, head_dim).swapaxes(1, 2) for a in arrays]
        return [a.reshape(self.shape) for a in arrays]

    @functools.cached_property
    def device(self) -> tuple[Any, ...]:
        """q, k and v as arrays of the device."""
        if self.heads_last:
            return tuple(cp.asarray(a.swapaxes(1, 2)).swapaxes(1, 2) for a in self.host)
        return tuple(cp.asarray(a) for a in self.host)

    @functools.cached_property
    def torch(self) -> tuple[Any, ...]:
        """q, k and v as PyTorch's tensors on the GPU, rounded to nearest there: bit for bit the same values."""
        try:
            import torch
        except ImportError as error:
            raise ImportError("tensors of PyTorch need PyTorch: pip install torch") from error

        dtype = torch.float8_e4m3fn if self.dtype == "uint8" else getattr(torch, self.dtype)
        return tuple(torch.from_numpy(a).cuda().to(dtype) for a in self._of_shape())

    @functools.cached_property
    def do(self) -> np.ndarray:
        """The gradient of the loss with respect to the output, on the host."""
        *lead, head_dim = self.shape
        return make_inputs(math.prod(lead), 1, head_dim, seed=4)[0].reshape(self.shape).astype(TYPES[self.dtype])

    def gradient_sample(self, causal: bool = False, *, alibi: bool = False) -> GradientSample:
        """Compute once some rows of the gradients of some heads exactly. alibi: with `alibi_slopes`."""
        return self._made_once(GradientSample, causal, alibi)

    def sample(self, causal: bool = False) -> Sample:
        """Compute once some rows of some heads of the output exactly."""
        return self._made_once(Sample, causal)

    def _made_once(self, kind: type, *how: bool) -> Any:
        if (kind, *how) not in self._samples:
            self._samples[(kind, *how)] = kind(self, *how)
        return self._samples[(kind, *how)]


class Sample:
    """Rows and heads of an output that are compared with float64: the first, the last, and others at random.

    expected: (heads, rows, d) float64. rounded: the same from NumPy attention that rounds P and O to a half type or
    e4m3, on the same (rounded) inputs. tolerance: 1e-5 in float32; else twice the error of `rounded`.

    Args:
        heads: indices into batch * heads; None for a sample. most_rows: over all heads.
        rotate: applied to q and k of each head, float64 (N, d).
    """

    def __init__(
        self,
        inputs: Inputs,
        causal: bool = False,
        *,
        heads: Sequence[int] | None = None,
        most_rows: int = SAMPLED_ROWS,
        rotate: Callable[[np.ndarray], np.ndarray] = lambda a: a,
    ) -> None:
        batch, all_heads, n, head_dim = inputs.shape
        rng = np.random.default_rng(1)
        self.heads = _some(rng, batch * all_heads, SAMPLED_HEADS) if heads is None else np.asarray(heads)
        self.rows = _some(rng, n, max(most_rows // len(self.heads), 2))
        exact = inputs.dtype == "float32"
        hidden = np.arange(n) > self.rows[:, None]
        expected, rounded = [], []
        for head in self.heads:
            q, k, v = (in_float64(a[divmod(head, all_heads)]) for a in inputs.host)
            s = rotate(q)[self.rows] @ rotate(k).T / math.sqrt(head_dim)
            if causal:
                s[hidden] = -np.inf
            p = np.exp(s - s.max(axis=-1, keepdims=True))
            total = p.sum(axis=-1, keepdims=True)
            expected.append(p @ v / total)
            rounded.append(expected[-1:] if exact else round_p_and_o(p, total, v, inputs.dtype))
        self.expected = np.stack(expected)
        self.rounded = np.stack([first for first, *_ in rounded])
        error = max(float(np.abs(o - want).max()) for each, want in zip(rounded, expected, strict=True) for o in each)
        self.tolerance = TOLERANCE if exact else 2 * error

    def error(self, o: Any) -> float:
        """Return the largest absolute error of an output (batch, heads, N, d); NaN if a value is NaN."""
        errors = []
        for head, expected in zip(self.heads.tolist(), self.expected, strict=True):
            got = as_numpy(o[divmod(head, o.shape[1])])[self.rows]
            errors.append(np.max(np.abs(got.astype(np.float64) - expected)))
        return float(np.max(errors))  # NumPy's max propagates NaN


class GradientSample:
    """Rows of dQ, dK and dV of some heads that are compared with float64, as `Sample` does for an output.

    expected: by name, (heads, rows, d) float64. tolerance: by name. float32: 1e-5 of the largest gradient. A half type:
    twice the error of NumPy's gradients with O, P, dS and the results rounded to that type or, if that error happens to
    be small, one unit in the last place of the largest gradient. alibi: the scores have `alibi_slopes`.
    """

    def __init__(self, inputs: Inputs, causal: bool = False, alibi: bool = False) -> None:
        batch, heads, n, head_dim = inputs.shape
        rng = np.random.default_rng(1)
        self.heads = _some(rng, batch * heads, 1 if n > LONG_ROWS else 2)
        slopes = alibi_slopes(heads)[self.heads % heads] if alibi else np.zeros(len(self.heads))
        self.rows = _some(rng, n, SAMPLED_ROWS // 4)
        of_heads = [a.reshape(batch * heads, n, head_dim)[self.heads] for a in (inputs.do, *inputs.host)]

        def computed(rounded: Callable[[np.ndarray], np.ndarray]) -> dict[str, np.ndarray]:
            how = {"rows": self.rows, "causal": causal, "rounded": rounded}
            heads = zip(slopes, *of_heads, strict=True)
            each = [_gradients(*(a.astype(np.float64) for a in one), slope=slope, **how) for slope, *one in heads]
            return {name: np.stack(a) for name, a in zip(("dq", "dk", "dv"), zip(*each, strict=True), strict=True)}

        def to_type(a: np.ndarray) -> np.ndarray:
            return a.astype(TYPES[inputs.dtype]).astype(np.float64)

        self.expected = computed(lambda a: a)
        self.tolerance = {name: TOLERANCE * max(1.0, float(np.abs(a).max())) for name, a in self.expected.items()}
        if inputs.dtype != "float32":
            for name, a in computed(to_type).items():
                step = float(ml_dtypes.finfo(TYPES[inputs.dtype]).eps) * float(np.abs(self.expected[name]).max())
                self.tolerance[name] = max(2 * float(np.abs(to_type(a) - self.expected[name]).max()), step)

    def error(self, gradients: tuple[Any, Any, Any]) -> tuple[float, float]:
        """Return the largest absolute error and the tolerance of the gradient that is closest to its tolerance."""
        found = []
        for (name, expected), a in zip(self.expected.items(), gradients, strict=True):
            got = [as_numpy(a[divmod(head, a.shape[1])])[self.rows] for head in self.heads.tolist()]
            found.append((float(np.max(np.abs(np.stack(got).astype(np.float64) - expected))), self.tolerance[name]))
        return max(found, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0] / pair[1])


def alibi_slopes(heads: int) -> np.ndarray:
    """Return ALiBi's slopes as defined in its paper: 2^(-8/heads), and its powers."""
    return 2.0 ** (-8 * np.arange(1, heads + 1) / heads)


def _gradients(
    do: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    rows: np.ndarray,
    causal: bool,
    rounded: Any,
    slope: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute these rows of dq, dk and dv of one head. rounded: applied to O, P and dS before they are used.

    slope: ALiBi's, for this head.

    O's rounding matters: D = rowsum(dO * O) has an error that is the same for all keys of a row and does not cancel.
    """
    n, head_dim = q.shape
    scale = 1 / math.sqrt(head_dim)
    dq, dk, dv = np.zeros((3, len(rows), head_dim))
    step = max(1, 2**22 // n)
    for first in range(0, n, step):
        s = q[first : first + step] @ k.T * scale
        if slope:
            s -= slope * abs(np.arange(n) - np.arange(first, first + len(s))[:, None])
        if causal:
            s[np.arange(n) > np.arange(first, first + len(s))[:, None]] = -np.inf
        p = np.exp(s - s.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        own = do[first : first + step]
        ds = p * (own @ v.T - (own * rounded(p @ v)).sum(axis=-1, keepdims=True))
        in_step = (rows >= first) & (rows < first + len(s))
        dq[in_step] = scale * rounded(ds[rows[in_step] - first]) @ k
        dk += scale * rounded(ds[:, rows]).T @ q[first : first + step]
        dv += rounded(p[:, rows]).T @ own
    return dq, dk, dv


def _some(rng: np.random.Generator, count: int, most: int) -> np.ndarray:
    """Choose at most `most` of range(count), sorted, including the first and the last."""
    chosen = rng.choice(count, size=min(count, most), replace=False)
    if len(chosen) > 1:
        chosen = np.concatenate(([0, count - 1], np.setdiff1d(chosen, [0, count - 1])[: len(chosen) - 2]))
    return np.unique(chosen)


def as_numpy(a: Any) -> np.ndarray:
    """Convert an array of the device, PyTorch or NumPy to NumPy; PyTorch's half types become float32."""
    if hasattr(a, "cpu"):
        return a.float().cpu().numpy()
    return cp.asnumpy(a)
