"""The ladder: one callable per stage, all with the same signature.

    from helpers.ladder.stages import LADDER
    o = LADDER["online_softmax"](q, k, v)

This is the only launch geometry outside the notebooks. A new stage is one `.cu` file and one entry here. For models,
which hold (batch, seq, heads, head_dim), see `helpers.attention`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from helpers import kernel
from helpers.cuda_source.signatures import dtype_of
from helpers.device import cp
from helpers.ladder import tiles
from helpers.ladder.params import attention_params

MAX_HEAD_DIM = 128
MAX_ROWS = 2**29  # in a sequence; a window so wide is unlimited. The kernels add such numbers in 32 bits
MAX_GRID_YZ = 65535

_C_NAMES = {"float16": "__half", "bfloat16": "__nv_bfloat16"}


@dataclass(frozen=True)
class Problem:
    """One call, after every check. q, o: (batch, heads, N, d), k, v: (batch, kv_heads, N_kv, d), device arrays.

    lse: (batch, heads, N) float32 or None. window: (left, right), -1 for unlimited. cu_seqlens_*: int32 device arrays
    of batch + 1 numbers, or None; the tokens of all sequences then lie along N, and batch is 1 in the shapes above.
    rows: of the longest sequence. sequences: how many.
    """

    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    scale: float
    window: tuple[int, int]
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    rows: int
    sequences: int


@dataclass(frozen=True)
class Launch:
    """Grid, block and arguments of one launch."""

    grid: tuple[int, ...]
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Stage:
    """One rung of the ladder: attention by one kernel file. See `__call__` and `prepare`.

    features: what it can beyond plain attention, out of
        heads    leading axes, (heads,) or (batch, heads); without "strides" in the set, views with gaps are copied
        gqa      fewer heads in k and v than in q
        causal, window, varlen (packed sequences), lse (the log-sum-exp)
        strides  any array whose rows are contiguous, with no copy
    """

    number: int
    name: str  # of the kernel and of the stage
    file: str
    idea: str
    tiles: Callable[[int], dict[str, int]]  # HEAD_DIM -> the sizes it is compiled with
    launches: Callable[[Problem, Mapping[str, int]], list[Launch]]
    features: frozenset[str] = frozenset({"heads"})
    dtypes: tuple[str, ...] = ("float32",)
    min_cc: int = 0  # compute capability, 80 for 8.0; 0 is any
    max_head_dim: int = MAX_HEAD_DIM
    head_dim_step: int = 1  # head_dim is a multiple of it
    threads: Callable[[Mapping[str, int]], int] = lambda sizes: sizes["BLOCK_M"]
    shared_bytes: Callable[[Mapping[str, int]], int] = lambda sizes: 0  # dynamic shared memory
    few_blocks: Callable[[int], Mapping[str, int]] = lambda head_dim: {}  # sizes, where its own leave half a GPU idle
    lone_blocks: Callable[[int], Mapping[str, int]] = lambda head_dim: {}  # where no multiprocessor has two blocks
    scalar_loads: bool = False  # -DVECTOR=0 compiles it for rows that do not start at multiples of 16 bytes
    needs_aligned: bool = False  # such rows are copied, as it has no other way
    exact_shift_above: float = math.inf  # -DEXACT_SHIFT=1 compiles it for a larger |softmax_scale|

    def defines(self, head_dim: int) -> dict[str, int]:
        """The -D options for a head dimension: HEAD_DIM and the tile sizes."""
        return {"HEAD_DIM": head_dim, **self.tiles(head_dim)}

    def defines_for(self, head_dim: int, rows: int, heads: int, *, uneven: bool = False) -> dict[str, int]:
        """The -D options for one launch: other sizes where its own give few blocks, or each multiprocessor one.

        Args:
            rows: of q, in the longest sequence. heads: of all sequences together.
            uneven: a mask such as causal=True, which leaves half of the blocks less than half of the work.
        """
        defines = self.defines(head_dim)
        blocks = -(-rows // defines["BLOCK_M"]) * heads
        if (1 if uneven else 2) * blocks <= _multiprocessors():
            defines.update(self.few_blocks(head_dim))
        elif blocks <= _multiprocessors():
            defines.update(self.lone_blocks(head_dim))
        return defines

    def kernel_name(self, dtype: str = "float32") -> str:
        """The kernel's name; for a template, the instance of a dtype."""
        return f"{self.name}<{_C_NAMES[dtype]}>" if dtype in _C_NAMES else self.name

    def why_not(
        self,
        *,
        head_dim: int,
        dtype: str = "float32",
        gqa: bool = False,
        causal: bool = False,
        window: tuple[int, int] | None = None,
        varlen: bool = False,
        return_lse: bool = False,
    ) -> str | None:
        """The reason it cannot do this, on this device; None where it can."""
        if dtype not in self.dtypes:
            return f"it takes {' or '.join(self.dtypes)}, not {dtype}"
        if not 1 <= head_dim <= self.max_head_dim or head_dim % self.head_dim_step:
            multiples = f", multiples of {self.head_dim_step}" if self.head_dim_step > 1 else ""
            return f"head_dim = {head_dim}; this stage takes {self.head_dim_step} to {self.max_head_dim}{multiples}"
        wishes = {
            "gqa": gqa and "k and v with fewer heads than q",
            "causal": causal and "causal=True",
            "window": window is not None and tuple(window) != (-1, -1) and f"window={window}",
            "varlen": varlen and "packed sequences of several lengths",
            "lse": return_lse and "return_lse=True",
        }
        for feature, wish in wishes.items():
            if wish and feature not in self.features:
                return f"it has no {wish}"
        here = int(cp.cuda.Device().compute_capability)
        needed = max(self.min_cc, 80 if dtype == "bfloat16" else 0)
        if here < needed:
            return f"it needs compute capability {needed / 10} for {dtype}; this GPU has {here / 10}"
        return None

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        softmax_scale: float | None = None,
        causal: bool = False,
        window: tuple[int, int] | None = None,
        return_lse: bool = False,
    ) -> Any:
        """softmax(softmax_scale * q k^T) v, for each head.

        Args:
            q: (N, d), (heads, N, d) or (batch, heads, N, d), NumPy or device array, of a dtype of the stage; N >= 1
                and 1 <= d <= its max_head_dim.
            k, v: the same with N_kv >= 1 rows. With the feature gqa, heads may be any divisor of q's.
            softmax_scale: 1 / sqrt(d) where it is not given.
            causal: row i sees keys up to i + N_kv - N: the last row sees all (bottom-right, as in FlashAttention).
            window: (left, right): how many keys before and after that diagonal a row sees; -1 for all of them.
            return_lse: also the log of the sum of exp(scaled scores) of each row, float32 without the axis d.

        Returns:
            The output, of q's shape and dtype, a device array; with return_lse, (o, lse). A row that sees no key is 0,
            and its lse -inf.

        Raises:
            TypeError: an array of another dtype; a softmax_scale that is no number; a window that is no pair of ints.
            ValueError: shapes that do not fit each other or the stage; something the stage cannot do; a
                softmax_scale that float32 cannot hold.
        """
        run, result = self.prepare(
            q, k, v, softmax_scale=softmax_scale, causal=causal, window=window, return_lse=return_lse
        )
        run()
        return result

    def prepare(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        softmax_scale: float | None = None,
        causal: bool = False,
        window: tuple[int, int] | None = None,
        return_lse: bool = False,
        cu_seqlens: tuple[Any, Any] | None = None,
        out: Any = None,
        source: str | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> tuple[Callable[[], None], Any]:
        """Everything but the launch: a function that launches, and what it writes. For timing and experiments.

        Args, where `__call__` does not have them:
            cu_seqlens: (cu_seqlens_q, cu_seqlens_k), where each sequence of the packed tokens begins and the last one
                ends; NumPy int32, as `helpers.attention.flash_attention_varlen` has checked them. q is then
                (heads, tokens, d).
            out: a device array to write, in a layout that the stage reads without a copy. Without it a new one, filled
                with NaN, so that a row nobody writes shows.
            source: another text of the kernel in place of the file's.
            sizes: tile sizes in place of the stage's own, such as {"BLOCK_M": 32}.
        """
        for name, array in (("q", q), ("k", k), ("v", v)):
            self._check_array(name, array, q)
        check_shapes(q, k, v, empty=cu_seqlens is not None)
        head_dim, dtype = q.shape[-1], q.dtype.name
        limits = mask_window(window, causal)
        reason = self.why_not(
            head_dim=head_dim,
            dtype=dtype,
            gqa=q.shape[:-2] != k.shape[:-2],
            causal=causal,
            window=window,
            varlen=cu_seqlens is not None,
            return_lse=return_lse,
        )
        if reason:
            raise ValueError(reason if reason.startswith("head_dim") else f"stage {self.name} cannot: {reason}")
        scale = softmax_scale_of(softmax_scale, head_dim)

        if q.size == 0:  # packed sequences without a token
            o = cp.empty(q.shape, dtype=q.dtype) if out is None else out
            return (lambda: None), (o, cp.empty(q.shape[:-1], dtype=cp.float32)) if return_lse else o
        o = cp.full(q.shape, cp.nan, dtype=q.dtype) if out is None else out
        if o.shape != q.shape or o.dtype != q.dtype or self._ready(o) is not o:
            got = f"shape {o.shape}, strides {o.strides}, dtype {o.dtype}"
            raise ValueError(f"out is written in place, so it must be as stage {self.name} takes q; got {got}")
        lse = cp.full(q.shape[:-1], cp.nan, dtype=cp.float32) if return_lse else None
        q4, k4, v4 = (_four_axes(self._ready(cp.asarray(a))) for a in (q, k, v))
        o4 = _four_axes(o)
        cu_q, cu_k = cu_seqlens or (None, None)
        problem = Problem(
            *(q4, k4, v4, o4, lse, scale, limits),
            *(None if cu is None else cp.asarray(cu) for cu in (cu_q, cu_k)),
            rows=q.shape[-2] if cu_q is None else int(np.diff(cu_q).max(initial=0)),
            sequences=q4.shape[0] if cu_q is None else len(cu_q) - 1,
        )
        uneven = (limits[0] < 0) != (limits[1] < 0)
        defines = self.defines_for(head_dim, problem.rows, problem.q.shape[1] * problem.sequences, uneven=uneven)
        defines.update(sizes or {})
        if self.scalar_loads and not all(_aligned(a) for a in (q4, k4, v4, o4)):
            defines["VECTOR"] = 0
        if abs(scale) > self.exact_shift_above:
            defines["EXACT_SHIFT"] = 1
        compiled = kernel.load(source or self.file, self.kernel_name(dtype), defines=defines)
        block, shared = self.threads(defines), self.shared_bytes(defines)
        launches = self.launches(problem, defines)
        bound = [compiled.bind(launch.grid, (block,), launch.args, shared_mem=shared) for launch in launches]

        def run() -> None:
            for launch in bound:
                launch()

        return run, (o, lse) if return_lse else o

    def _check_array(self, name: str, array: Any, q: Any) -> None:
        if not isinstance(array, (np.ndarray, cp.ndarray)):
            raise TypeError(f"{name} is a NumPy or a device array; got {type(array).__name__}")
        takes = " or ".join(self.dtypes)
        if array.dtype not in [dtype_of(dtype) for dtype in self.dtypes]:
            hint = f": {name}.astype('{takes}')" if len(self.dtypes) == 1 else ""
            raise TypeError(f"{name} is {array.dtype}; stage {self.name} takes {takes}{hint}")
        if array.dtype != q.dtype:
            raise TypeError(f"{name} is {array.dtype} and q is {q.dtype}: one dtype for all is needed")

    def _ready(self, a: Any) -> Any:
        """a as the kernel can read it: itself wherever that is possible."""
        if a.size == 0:
            return a
        if "strides" in self.features:
            rows = a.strides[-1] == a.itemsize or a.shape[-1] == 1
            as_it_is = rows and min(a.strides) >= 0
        else:
            as_it_is = a.flags.c_contiguous
        if self.needs_aligned and not _aligned(a):
            as_it_is = False
        if as_it_is:
            return a
        dense = cp.ascontiguousarray(a)
        return cp.array(a) if dense is a else dense


def softmax_scale_of(softmax_scale: float | None, head_dim: int) -> float:
    """The scale as a float, 1 / sqrt(head_dim) for None. TypeError or ValueError for what float32 cannot hold."""
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    number = isinstance(softmax_scale, (int, float, np.integer, np.floating)) and not isinstance(softmax_scale, bool)
    if not number:
        got = f"{type(softmax_scale).__name__} {softmax_scale!r:.40}"
        raise TypeError(f"softmax_scale is a number, or None for 1 / sqrt(head_dim); got {got}")
    if not abs(softmax_scale) <= float(np.finfo(np.float32).max):  # NaN compares as False
        raise ValueError(f"softmax_scale = {softmax_scale}; a finite float32 is needed")
    return float(softmax_scale)


def mask_window(window: tuple[int, int] | None, causal: bool) -> tuple[int, int]:
    """(left, right) with -1 for unlimited, causal or not. Raises TypeError or ValueError for what is no window."""
    left, right = (-1, -1) if window is None else _pair(window)
    if not isinstance(causal, (bool, np.bool_)):
        raise TypeError(f"causal is True or False; got {type(causal).__name__} {causal!r:.40}")
    left, right = (-1 if size >= MAX_ROWS else size for size in (left, right))
    return left, 0 if causal else right


def _pair(window: Any) -> tuple[int, int]:
    form = "window is a pair (left, right) of ints, -1 for unlimited, or None"
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"{form}; got {type(window).__name__} {window!r:.40}")
    for size in window:
        if not isinstance(size, (int, np.integer)) or isinstance(size, bool):
            raise TypeError(f"{form}; got {window!r:.40}")
        if size < -1:
            raise ValueError(f"{form}; got {window!r:.40}, where {size} is below -1")
    return int(window[0]), int(window[1])


def check_shapes(q: Any, k: Any, v: Any, *, empty: bool = False) -> None:
    """ValueError where q, k and v do not fit each other. empty: whether there may be no rows."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if not 2 <= array.ndim <= 4:
            forms = "(rows, head_dim), (heads, rows, head_dim) or (batch, heads, rows, head_dim)"
            raise ValueError(f"{name} has shape {array.shape}; a stage takes {forms}")
        if array.shape[-2] < 1 and not empty:
            raise ValueError(f"{name} has shape {array.shape}; at least one row is needed")
        if array.shape[-2] >= MAX_ROWS:
            raise ValueError(f"{name} has shape {array.shape}; fewer than {MAX_ROWS:,} rows are needed")
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


# ---- how the kernels are launched


def _four_axes(a: Any) -> Any:
    """(batch, heads, rows, head_dim), with 1 for the axes that are not there."""
    return a.reshape((1,) * (4 - a.ndim) + a.shape) if a.ndim < 4 else a


def _address(a: Any) -> int:
    return a.ctypes.data if isinstance(a, np.ndarray) else a.data.ptr


def _aligned(a: Any) -> bool:
    """Whether every row starts at a multiple of 16 bytes."""
    steps = [stride for size, stride in zip(a.shape[:-1], a.strides[:-1], strict=True) if size > 1]
    return not any(number % 16 for number in (_address(a), *steps))


def _span(a: Any) -> Any:
    """The memory from a's first element to its last, without gaps, for a kernel that is told the strides."""
    order = sorted(range(a.ndim), key=lambda axis: -a.strides[axis])
    dense = a.transpose(order)
    if dense.flags.c_contiguous or a.size == 0:
        return dense
    size = 1 + sum((n - 1) * stride for n, stride in zip(a.shape, a.strides, strict=True)) // a.itemsize
    if isinstance(a, np.ndarray):
        return np.lib.stride_tricks.as_strided(a, (size,), (a.itemsize,), subok=True)
    return cp.ndarray((size,), a.dtype, memptr=a.data)


def _each_head(problem: Problem, sizes: Mapping[str, int]) -> list[Launch]:
    """01 to 03 know one head: a launch for each."""
    n, n_kv = problem.q.shape[2], problem.k.shape[2]
    grid = (-(-n // sizes["BLOCK_M"]),)
    scalars = cp.int32(n), cp.int32(n_kv), cp.float32(problem.scale)
    return [
        Launch(grid, (problem.q[head], problem.k[head], problem.v[head], problem.o[head], *scalars))
        for head in np.ndindex(problem.q.shape[:2])
    ]


def _each_head_with_scratch(problem: Problem, sizes: Mapping[str, int]) -> list[Launch]:
    """01 also takes an N x N_kv array for the scores: one, which the heads use in turn."""
    scratch = cp.empty((problem.q.shape[2], problem.k.shape[2]), dtype=cp.float32)
    return [Launch(each.grid, (*each.args[:3], scratch, *each.args[3:])) for each in _each_head(problem, sizes)]


def _heads_in_grid(problem: Problem, sizes: Mapping[str, int]) -> list[Launch]:
    """04: all heads of all batches along blockIdx.y."""
    batch, heads, n, _ = problem.q.shape
    _check_grid(batch * heads, "heads of all batches")
    scalars = cp.int32(n), cp.int32(problem.k.shape[2]), cp.float32(problem.scale)
    grid = -(-n // sizes["BLOCK_M"]), batch * heads
    return [Launch(grid, (problem.q, problem.k, problem.v, problem.o, *scalars))]


def _strided(problem: Problem, sizes: Mapping[str, int]) -> list[Launch]:
    """From 05 on: grid (query tile, head, sequence), and AttentionParams by value."""
    arrays = problem.q, problem.k, problem.v, problem.o
    heads, kv_heads = problem.q.shape[1], problem.k.shape[1]
    _check_grid(heads, "heads")
    _check_grid(problem.sequences, "sequences")
    packed = problem.cu_seqlens_q is not None  # then there is one batch, and all sequences are in it
    strides = {
        name: tuple((0 if packed and axis == 0 else a.strides[axis]) // a.itemsize for axis in (0, 2, 1))
        for name, a in zip("qkvo", arrays, strict=True)
    }
    params = attention_params(
        strides,
        n=problem.q.shape[2],
        n_kv=problem.k.shape[2],
        heads=heads,
        kv_heads=kv_heads,
        window=problem.window,
        softmax_scale=problem.scale,
    )
    args = *(_span(a) for a in arrays), problem.lse, problem.cu_seqlens_q, problem.cu_seqlens_k, params
    return [Launch((-(-problem.rows // sizes["BLOCK_M"]), heads, problem.sequences), args)]


def _check_grid(size: int, what: str) -> None:
    if size > MAX_GRID_YZ:
        raise ValueError(f"{size:,} {what}; one launch takes {MAX_GRID_YZ:,} at most")


# ---- the sizes they are compiled with


def _shared_tiles(head_dim: int) -> dict[str, int]:
    """The most query rows whose Q_smem, K_smem and V_smem fit 48 KB: each tile then serves that many rows."""
    block_n = 16
    row_stride = head_dim | 1
    for block_m in (128, 64, 32):
        if 4 * (block_m * row_stride + 2 * block_n * head_dim) <= 48 * 1024:
            break
    return {"BLOCK_M": block_m, "BLOCK_N": block_n}


def _register_tiles(head_dim: int) -> dict[str, int]:
    """What `helpers.ladder.tiles` picks for this device's shared memory."""
    return tiles.pick(head_dim, _most_shared()).defines


@functools.cache
def _properties(device: Any, number: int) -> Mapping[str, Any]:
    """What a device says of itself. Asking a GPU takes a millisecond: not at every call."""
    return device.cuda.runtime.getDeviceProperties(number)


def _most_shared() -> int:
    """Bytes of shared memory that a block may opt in to."""
    return _properties(cp, cp.cuda.Device().id)["sharedMemPerBlockOptin"]


def _multiprocessors() -> int:
    return _properties(cp, cp.cuda.Device().id)["multiProcessorCount"]


def _register_tiles_shared(sizes: Mapping[str, int]) -> int:
    chosen = tiles.Tiles(sizes["BLOCK_M"], sizes["BLOCK_N"], sizes["THREADS"], sizes["THREADS_X"])
    return chosen.shared_bytes(sizes["HEAD_DIM"])


def _wmma_tiles(head_dim: int) -> dict[str, int]:
    return tiles.pick_wmma(head_dim, _most_shared())


def _mma_tiles(head_dim: int) -> dict[str, int]:
    return tiles.pick_mma(head_dim, _most_shared())


def _few_register_tiles(head_dim: int) -> dict[str, int]:
    few = tiles.pick_few(head_dim, _most_shared())
    return few.defines if few else {}


def _lone_register_tiles(head_dim: int) -> dict[str, int]:
    lone = tiles.pick_lone(head_dim, _most_shared())
    return lone.defines if lone else {}


def _few_mma_tiles(head_dim: int) -> dict[str, int]:
    return tiles.pick_few_mma(head_dim, _most_shared())


EVERYTHING = frozenset({"heads", "gqa", "causal", "window", "varlen", "lse", "strides"})
_REGISTER_TILED: Mapping[str, Any] = {  # 05 has the tiles of 04
    "tiles": _register_tiles,
    "few_blocks": _few_register_tiles,
    "lone_blocks": _lone_register_tiles,
    "threads": lambda sizes: sizes["THREADS"],
    "shared_bytes": _register_tiles_shared,
    "max_head_dim": tiles.MAX_HEAD_DIM,
    "scalar_loads": True,
}

_STAGES = (
    Stage(
        *(1, "naive", "01_naive.cu", "one thread per query row"),
        tiles=lambda head_dim: {"BLOCK_M": 64},
        launches=_each_head_with_scratch,
    ),
    Stage(
        *(2, "tiled", "02_tiled.cu", "K and V tiles in shared memory, two passes"),
        tiles=_shared_tiles,
        launches=_each_head,
    ),
    Stage(
        *(3, "online_softmax", "03_online_softmax.cu", "running max and sum, one pass"),
        tiles=_shared_tiles,
        launches=_each_head,
    ),
    Stage(
        *(4, "register_tiles", "04_register_tiles.cu", "a register tile per thread, float4"),
        launches=_heads_in_grid,
        **_REGISTER_TILED,
    ),
    Stage(
        *(5, "heads_and_masks", "05_heads_and_masks.cu", "strides, masks, lengths: only the tiles that are seen"),
        launches=_strided,
        features=EVERYTHING,
        **_REGISTER_TILED,
    ),
    Stage(
        *(6, "flash_wmma", "06_wmma.cu", "tensor cores by the WMMA interface"),
        tiles=_wmma_tiles,
        launches=_strided,
        features=EVERYTHING,
        dtypes=("float16", "bfloat16"),
        min_cc=75,
        head_dim_step=8,
        shared_bytes=lambda sizes: tiles.wmma_shared_bytes(sizes["HEAD_DIM"], sizes),
        needs_aligned=True,
    ),
    Stage(
        *(7, "flash_mma", "07_mma.cu", "FlashAttention-2: mma.sync, swizzled tiles, cp.async"),
        tiles=_mma_tiles,
        few_blocks=_few_mma_tiles,
        launches=_strided,
        features=EVERYTHING,
        dtypes=("float16", "bfloat16"),
        min_cc=80,
        max_head_dim=256,
        head_dim_step=8,
        threads=lambda sizes: 32 * sizes["WARPS"],
        shared_bytes=lambda sizes: tiles.mma_shared_bytes(sizes["HEAD_DIM"], sizes),
        needs_aligned=True,
        exact_shift_above=2**10,  # below it |m_i| < 2^27 while |q k| < 90,000: see weight() in the kernel
    ),
)

LADDER: Mapping[str, Stage] = {stage.name: stage for stage in _STAGES}
