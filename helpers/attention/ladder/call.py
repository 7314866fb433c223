"""A call of attention: its checks, each made once and here, and everything that a launch depends on.

There are two layouts. A stage takes (rows, head_dim), with up to two axes of heads before it, as the papers write it;
models have (batch, seq, heads, head_dim), or (tokens, heads, head_dim) with packed sequences. Each has its check.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from helpers import device
from helpers.attention.ladder import extras
from helpers.attention.ladder.layout import TITLES, Spec, titles
from helpers.attention.ladder.score_mod import ScoreMod, bind_to_call, check_distances
from helpers.attention.scalars import check_flags
from helpers.engine.cuda_source.signatures import dtype_of

__all__ = ["BackwardOptions", "Call", "DecodeOptions", "ForwardOptions", "Options", "Spec"]

Asked = TypeVar("Asked", bound="Options")

WITH_HEAD_DIM = frozenset({"q", "k", "v", "o", "do", "dq", "dk", "dv"})  # the others are lse, cu_seqlens and extras
ROTATED = frozenset({"rotated_q", "rotated_k"})  # results of the rotary embedding alone
MAX_ROWS = 2**29  # in a sequence; a window so wide is unlimited. The kernels add such numbers in 32 bits


class Options:
    """A caller's arguments except the arrays, as given. The variants are tuples.

    window comes first in each. stage: by name or number; None for the last that supports the call. mod: the caller's
    functions of scores.
    """

    __slots__ = ()
    window: tuple[int, int] | None
    causal: bool
    softmax_scale: float | None
    stage: str | int | None
    mod: ScoreMod | None
    _replace: Any
    __iter__: Any

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for options with the same meaning. It includes types, because True == 1 and causal=1 is an error."""
        window, *others = self
        return *others, *map(type, self), window if window is None else repr(window)

    def checked(self: Asked, head_dim: int) -> Asked:
        """Return the same options with the mask as (left, right), -1 for unlimited, and the scale as a float.

        Raises:
            TypeError, ValueError: as for `mask_window` and `softmax_scale_of`.
        """
        window = mask_window(self.window, self.causal)
        scale = softmax_scale_of(self.softmax_scale, head_dim)
        return self._replace(causal=False, window=window, softmax_scale=scale)

    def needs(self, q: Any, k: Any, *, packed: bool) -> dict[str, Any]:
        """List what a stage must support, for `Stage.why_not`, for arrays (..., heads, rows, head_dim).

        Raises:
            TypeError, ValueError: as for `mask_window`.
        """
        mask_window(self.window, self.causal)
        return {
            "head_dim": q.shape[-1],
            "dtype": q.dtype.name,
            "gqa": q.shape[:-2] != k.shape[:-2],
            "varlen": packed,
            "causal": self.causal,
            "window": self.window,
            **({"mod": "score_mod" if self.mod.scores else "mask_mod"} if self.mod else {}),
        }


class _Forward(NamedTuple):
    window: tuple[int, int] | None = None
    causal: bool = False
    softmax_scale: float | None = None
    return_lse: bool = False
    rotary_interleaved: bool = False
    stage: str | int | None = None
    mod: ScoreMod | None = None
    out: str = ""


class ForwardOptions(Options, _Forward):
    """Options of a forward call. out: the output's dtype; empty for q's, or for the stage's first."""

    __slots__ = ()
    deterministic: ClassVar[bool] = False

    def needs(self, q: Any, k: Any, *, packed: bool) -> dict[str, Any]:
        """See `Options.needs`."""
        own = {"return_lse": self.return_lse, "out": self.out if self.out != q.dtype.name else ""}
        return {**super().needs(q, k, packed=packed), **own}


class _Backward(NamedTuple):
    window: tuple[int, int] | None = None
    causal: bool = False
    softmax_scale: float | None = None
    deterministic: bool = False
    stage: str | int | None = None
    mod: ScoreMod | None = None
    out: str = ""


class BackwardOptions(Options, _Backward):
    """Options of a backward. deterministic: the same bits in every run. out: the gradients' dtype; empty for q's."""

    __slots__ = ()
    return_lse: ClassVar[bool] = False
    rotary_interleaved: ClassVar[bool] = False

    def needs(self, q: Any, k: Any, *, packed: bool) -> dict[str, Any]:
        """See `Options.needs`."""
        own = {"deterministic": self.deterministic, "out": self.out if self.out != q.dtype.name else ""}
        return {**super().needs(q, k, packed=packed), **own}


AttentionOptions = ForwardOptions | BackwardOptions


class _Decode(NamedTuple):
    window: tuple[int, int] | None = None
    causal: bool = True
    softmax_scale: float | None = None
    num_splits: int = 0
    return_lse: bool = False
    stage: str | None = None
    mod: ScoreMod | None = None
    is_checked: bool = False
    rotary_interleaved: bool = False


class DecodeOptions(Options, _Decode):
    """Options of decoding. num_splits: parts of a sequence. is_checked: the host reads lengths and pages first."""

    __slots__ = ()


class Call(NamedTuple):
    """One call, after every check: everything that a launch depends on, except addresses.

    arrays: by name. q and o: (batch, heads, N, d); k and v: (batch, kv_heads, N_kv, d); of a backward also do, dq, dk
        and dv, shaped as o, q, k and v. If present, lse: (batch, heads, N), and cu_seqlens_q and cu_seqlens_k:
        (sequences + 1,). If sequences are packed, the tokens of all of them are along N, and batch is 1.
    window: (left, right), -1 for unlimited. rows, keys: of q and of k, in the longest sequence; a forward's launches do
        not depend on keys. aligned: every row of every array that has a head_dim starts at a multiple of 16 bytes.
    deterministic: the gradients have the same bits in every run.
    rotary_interleaved: pairs of the rotary embedding are neighbours (2 p, 2 p + 1), not (p, p + rotary_dim / 2). The
        arrays of helpers.attention.ladder.extras are among the others. mod: the functions of scores, or None.
    """

    arrays: Mapping[str, Spec]
    softmax_scale: float
    window: tuple[int, int]
    rows: int
    sequences: int
    aligned: bool
    keys: int = 0
    deterministic: bool = False
    rotary_interleaved: bool = False
    mod: ScoreMod | None = None

    @classmethod
    def of(
        cls,
        arrays: Mapping[str, Spec],
        options: AttentionOptions,
        longest: tuple[int | None, int | None] = (None, None),
    ) -> Call:
        """Make the call of these arrays; the extra inputs are checked here.

        Args:
            arrays: those with a head_dim have four axes. options: from `Options.checked`.
            longest: rows and keys of the longest sequence, if they are packed; a forward call may leave out the keys.

        Raises:
            TypeError, ValueError: an extra input does not match q and k.
        """
        q, k = arrays["q"].shape, arrays["k"].shape
        packed = "cu_seqlens_q" in arrays
        sequences = arrays["cu_seqlens_q"].shape[0] - 1 if packed else q[0]
        rows, keys = longest if packed else (q[2], k[2])
        if len(arrays) > 4:
            read = extras.as_kernels_read(arrays, sequences=sequences, packed=packed, longest_k=keys)
            arrays = {**arrays, **read} if read else arrays
        aligned = all([a.aligned for name, a in arrays.items() if name in WITH_HEAD_DIM])
        mod = bind_to_call(options.mod, arrays) if len(arrays) > 4 or options.mod else None
        if options.mod:
            check_distances(mod, arrays, max(rows or 0, keys or 0))
        how = options.deterministic, bool(options.rotary_interleaved), mod
        return cls(arrays, options.softmax_scale, options.window, rows, sequences, aligned, keys or 0, *how)

    @property
    def packed(self) -> bool:
        """True if sequences are packed one after the other."""
        return "cu_seqlens_q" in self.arrays

    @property
    def heads(self) -> int:
        """Heads of q."""
        return self.arrays["q"].shape[1]

    @property
    def head_dim(self) -> int:
        """Words of a row."""
        return self.arrays["q"].shape[-1]

    @property
    def uneven(self) -> bool:
        """True if the mask, such as a causal one, leaves half of the blocks with less than half of the work."""
        return (self.window[0] < 0) != (self.window[1] < 0)


# ---- the options


def softmax_scale_of(softmax_scale: float | None, head_dim: int) -> float:
    """Return the scale as a float, 1 / sqrt(head_dim) for None. Raises TypeError or ValueError if float32 cannot hold
    it."""
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    number = isinstance(softmax_scale, (int, float, np.integer, np.floating)) and not isinstance(softmax_scale, bool)
    if not number:
        got = f"{type(softmax_scale).__name__} {softmax_scale!r:.40}"
        raise TypeError(f"softmax_scale must be a number, or None for 1 / sqrt(head_dim); got {got}")
    if not abs(softmax_scale) <= float(np.finfo(np.float32).max):  # also true for NaN
        raise ValueError(f"softmax_scale = {softmax_scale}; a finite float32 is needed")
    return float(softmax_scale)


def mask_window(window: tuple[int, int] | None, causal: bool) -> tuple[int, int]:
    """Return (left, right), -1 for unlimited. Raises TypeError or ValueError for anything but a window."""
    left, right = (-1, -1) if window is None else _pair(window)
    check_flags(causal=causal)
    left, right = (-1 if size >= MAX_ROWS else size for size in (left, right))
    return left, 0 if causal else right


def _pair(window: Any) -> tuple[int, int]:
    form = "window must be a pair (left, right) of ints, -1 for unlimited, or None"
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"{form}; got {type(window).__name__} {window!r:.40}")
    for size in window:
        if not isinstance(size, (int, np.integer)) or isinstance(size, bool):
            raise TypeError(f"{form}; got {window!r:.40}")
        if size < -1:
            raise ValueError(f"{form}; got {window!r:.40}, where {size} is below -1")
    return int(window[0]), int(window[1])


# ---- arrays in stages' layout


def check_stage_arrays(stage: str, dtypes: Sequence[str], q: Any, k: Any, v: Any, *, empty: bool = False) -> None:
    """Raise TypeError or ValueError unless q, k and v are (..., rows, head_dim) of one of the dtypes.

    empty: allow arrays without rows.
    """
    arrays = (("q", q), ("k", k), ("v", v))
    for name, array in arrays:
        if not isinstance(array, (np.ndarray, device.cp.ndarray)):
            raise TypeError(f"{name} must be a NumPy or a device array; got {type(array).__name__}")
        if array.dtype not in [dtype_of(dtype) for dtype in dtypes]:
            hint = f": {name}.astype('{dtypes[0]}')" if len(dtypes) == 1 and dtypes[0] not in TITLES else ""
            raise TypeError(f"{name} is {array.dtype}; stage {stage} takes {titles(*dtypes)}{hint}")
        check_same_dtype(name, array, q)
    for name, array in arrays:
        if not 2 <= array.ndim <= 4:
            forms = "(rows, head_dim), (heads, rows, head_dim) or (batch, heads, rows, head_dim)"
            raise ValueError(f"{name} has shape {array.shape}; a stage takes {forms}")
        if array.shape[-2] < 1 and not empty:
            raise ValueError(f"{name} has shape {array.shape}; at least one row is needed")
        _check_rows(name, array.shape, array.shape[-2])
        if 0 in array.shape[:-2]:
            raise ValueError(f"{name} has shape {array.shape}; at least one head is needed")
    if not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        raise ValueError(f"head_dim differs: q {q.shape}, k {k.shape}, v {v.shape}")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"each key needs its value: k has {k.shape[-2]} rows, v has {v.shape[-2]}")
    if k.shape[:-2] != v.shape[:-2] or q.ndim != k.ndim or q.shape[:-3] != k.shape[:-3]:
        raise ValueError(f"the axes before the rows differ: q {q.shape}, k {k.shape}, v {v.shape}")
    if q.ndim > 2 and q.shape[-3] % k.shape[-3]:
        raise ValueError(f"{q.shape[-3]} heads of q cannot share {k.shape[-3]} heads of k and v: it must divide them")


def check_same_dtype(name: str, array: Any, q: Any) -> None:
    if array.dtype != q.dtype:
        raise TypeError(f"{name} is {array.dtype} and q is {q.dtype}: one dtype for all is needed")
    if not array.dtype.isnative:
        raise TypeError(
            f"{name} is {array.dtype}, whose bytes are in the other order than this machine's: "
            f"{name}.astype('{array.dtype.name}')"
        )


def _check_rows(name: str, shape: Sequence[int], rows: int) -> None:
    if rows >= MAX_ROWS:
        raise ValueError(f"{name} has shape {shape}; fewer than {MAX_ROWS:,} rows are needed")


def check_same_device(specs: Mapping[str, Spec]) -> None:
    """Raise ValueError if an array is on another GPU than q."""
    for name, a in specs.items():
        if a.device != specs["q"].device:
            raise ValueError(
                f"{name} is on GPU {a.device} and q on GPU {specs['q'].device}: one device for all is needed"
            )


def check_gradient_arrays(do: Any, q: Any, o: Any, lse: Any, lse_shape: tuple[int, ...]) -> None:
    """Raise TypeError or ValueError unless do and o have q's shape and dtype, and lse is float32 of `lse_shape`."""
    for name, a in (("do", do), ("o", o), ("lse", lse)):
        if not hasattr(a, "shape") or not hasattr(a, "dtype"):
            raise TypeError(f"{name} must be an array; got {type(a).__name__}")
    for name, a in (("do", do), ("o", o)):
        check_same_dtype(name, a, q)
        if a.shape != q.shape:
            raise ValueError(f"{name} has shape {a.shape} and q {q.shape}: one shape for both is needed")
    if lse.dtype != np.float32:
        raise TypeError(f"lse is {lse.dtype}; float32 is needed, as the forward returns it")
    if tuple(lse.shape) != tuple(lse_shape):
        raise ValueError(f"lse has shape {lse.shape}; {tuple(lse_shape)} is needed, as the forward returns it")


# ---- arrays in models' layout

BATCHED = ("batch", "seq", "heads", "head_dim")
PACKED = ("tokens", "heads", "head_dim")
CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_k")  # by name, with packed sequences


def check_model_arrays(q: Any, k: Any, v: Any, axes: tuple[str, ...]) -> None:
    """Raise TypeError or ValueError unless q, k and v, arrays or specs, have these axes and match.

    The batch, the rows and the keys may be empty.
    """
    if q.ndim == k.ndim == len(axes) and k.shape == v.shape and q.dtype == k.dtype == v.dtype and q.device == k.device:
        (*batch, rows, heads, columns), (*kv_batch, keys, kv_heads, kv_columns) = q.shape, k.shape
        same = batch == kv_batch and columns == kv_columns and k.device == v.device and q.dtype.isnative
        if same and max(rows, keys) < MAX_ROWS and columns and heads and kv_heads and not heads % kv_heads:
            return
    form = f"({', '.join(axes)})"
    for name, a in (("q", q), ("k", k), ("v", v)):
        if a.ndim != len(axes):
            raise ValueError(f"{name} has shape {a.shape}; {len(axes)} axes are needed: {form}")
        check_same_dtype(name, a, q)
        if device.ON_GPU and a.device != q.device:
            raise ValueError(f"{name} is on {a.device} and q on {q.device}: one device for all is needed")
        _check_rows(name, a.shape, a.shape[-3])
    if k.shape != v.shape:
        raise ValueError(f"k has shape {k.shape} and v {v.shape}: each key needs its value, of the same head_dim")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"head_dim differs: q has shape {q.shape} and k {k.shape}")
    if k.shape[-2] and q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"{q.shape[-2]} heads of q cannot share {k.shape[-2]} heads of k and v: kv_heads must divide heads "
            f"({form}){_if_exchanged(q.shape, k.shape)}"
        )
    if axes == BATCHED and q.shape[0] != k.shape[0]:
        raise ValueError(f"q has {q.shape[0]} batches and k has {k.shape[0]}: one number is needed")
    if 0 in (*q.shape[-2:], *k.shape[-2:]):
        raise ValueError(f"q has shape {q.shape} and k {k.shape}: there are no heads, or no head_dim")


def _if_exchanged(q: tuple[int, ...], k: tuple[int, ...]) -> str:
    """Ask, in a message, whether rows and heads were exchanged, if the heads would match then; prefer few heads."""
    kinds = (q[-3], k[-3], "q, k and v"), (q[-2], k[-3], "k and v"), (q[-3], k[-2], "q")
    fit = [(heads, name) for heads, kv_heads, name in kinds if heads and kv_heads and not heads % kv_heads]
    return f". Swap axes {len(q) - 3} and {len(q) - 2} of {min(fit, key=lambda one: one[0])[1]}?" if fit else ""


def check_cu_seqlens(name: str, cu: Any) -> None:
    """Raise TypeError or ValueError unless cu is int32 (sequences + 1,). Its values are not read."""
    if cu.dtype != np.int32:
        raise TypeError(f"{name} is {cu.dtype}; int32 is needed: {name}.astype('int32')")
    if cu.ndim != 1 or cu.size < 2:
        raise ValueError(f"{name} has shape {cu.shape}; (sequences + 1,) is needed, for one sequence or more")


def longest_of(name: str, cu: np.ndarray, of: str, tokens: int) -> int:
    """Return the rows of the longest sequence. Raises TypeError or ValueError unless cu rises from 0 to `tokens`."""
    check_cu_seqlens(name, cu)
    if cu[0] != 0:
        raise ValueError(f"{name} begins with {cu[0]}; the first sequence begins at 0")
    rows = cu[1:] - cu[:-1]
    if rows.min() < 0:
        i = int(np.flatnonzero(rows < 0)[0])
        raise ValueError(f"{name} falls from {cu[i]} to {cu[i + 1]} at {i + 1}; a sequence cannot end before it begins")
    if cu[-1] != tokens:
        raise ValueError(f"{name} ends at {cu[-1]}, and {of} has {tokens} tokens")
    return int(rows.max())
