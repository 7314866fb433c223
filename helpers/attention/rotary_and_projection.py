"""Attention's neighbours in a model, in kernels of their own or fused: rotary embedding and output projection.

    from helpers.attention.rotary_and_projection import attention_projection, rotary
    q, k = rotary(q, k, *cos_sin(n, head_dim))                   # one pass over q and k before attention
    y = attention_projection(q, k, v, w_o, form="atomics")       # concat(heads of attention) @ w_o, in one kernel

These are no stages of the ladder: their result is not attention's output. Arrays are (batch, seq, heads, head_dim), of
NumPy or of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from helpers import device
from helpers.attention import kernel
from helpers.attention.ladder import LADDER, launches, limits
from helpers.attention.ladder.call import (
    BATCHED,
    CU_SEQLENS,
    PACKED,
    check_cu_seqlens,
    check_model_arrays,
    longest_of,
    mask_window,
    softmax_scale_of,
)
from helpers.attention.ladder.layout import address, flat_view, is_aligned, with_scale_above_zero
from helpers.attention.ladder.params import attention_params, rotary_params
from helpers.attention.ladder.stages.tensor_cores import mma_shared_bytes, pick_projection
from helpers.attention.scalars import check_flags, finite_number, whole_number
from helpers.renamed import old_names

C_NAMES = launches.C_NAMES
ROTARY, PROJECTION = launches.ROTARY_FILE, "11_projection.cu"
FORMS = ("atomics", "all_heads")


@dataclass(frozen=True)
class Planned:
    """One launch, compiled, with its arguments; and what it writes.

    before: what has to be done first, each time: Y filled with zeros. others: grids and arguments of the launches for
        the batches that one grid has no room for.
    """

    kernel: kernel.Kernel
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: tuple[Any, ...]
    shared_bytes: int
    result: Any
    before: Callable[[], None] | None = None
    others: Sequence[tuple[tuple[int, ...], tuple[Any, ...]]] = ()

    @property
    def launch(self) -> tuple[Any, ...]:
        """The arguments of `helpers.xray.xray`."""
        return self.kernel, self.grid, self.block, self.args, self.shared_bytes

    def prepare(self) -> Callable[[], None]:
        """Check the arguments now; return a function that only runs `before`, if there is one, and launches."""
        of_parts = ((self.grid, self.args), *self.others)
        launch = [self.kernel.bind(grid, self.block, args, shared_mem=self.shared_bytes) for grid, args in of_parts]
        steps = launch if self.before is None else [self.before, *launch]

        def run() -> None:
            for step in steps:
                step()

        return run if len(steps) > 1 else steps[0]

    def __call__(self) -> Any:
        """Launch once; the result."""
        self.prepare()()
        return self.result


# ---- rotary embedding


def cos_sin(positions: int, rotary_dim: int, *, base: float = 10000.0) -> tuple[np.ndarray, np.ndarray]:
    """(cosines, sines), each (positions, rotary_dim / 2) float32, of position * base^(-2 i / rotary_dim) for pair i.

    Source: Su et al., RoFormer, 2021, section 3.2.2. TypeError or ValueError for a rotary_dim that is no even number
    above 0, positions below 0, and a base that is not above 0.
    """
    positions = whole_number("positions", positions, least=0)
    rotary_dim = whole_number("rotary_dim", rotary_dim)
    if finite_number("base", base) <= 0:
        raise ValueError(f"base = {base}; a number above 0 is needed")
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim = {rotary_dim}; pairs of columns are rotated: an even number of them is needed")
    angle = np.outer(np.arange(positions), base ** (-np.arange(0, rotary_dim, 2) / rotary_dim))
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rotary(
    q: Any,
    k: Any,
    cos: Any,
    sin: Any,
    *,
    interleaved: bool = False,
    positions: tuple[Any, Any] | None = None,
    in_place: bool = False,
) -> tuple[Any, Any]:
    """Rotate pairs of columns of q and k by the angles of their positions, in a pass of its own.

    Args:
        q: (batch, seq, heads, head_dim), float32, float16 or bfloat16, of NumPy or of the device.
        k: (batch, seq_kv, kv_heads, head_dim) of q's dtype.
        cos, sin: (positions, rotary_dim / 2) float32. The first rotary_dim columns are rotated, in float32; the others
            stay. rotary_dim is a multiple of 16 (float32: 8) and at most head_dim, a multiple of 8 (float32: 4).
        interleaved: a pair is two neighbouring columns (GPT-J); without it column i and i + rotary_dim / 2 (Llama).
        positions: of the rows of q and of k, int32 (batch, seq) and (batch, seq_kv), or (seq,) and (seq_kv,) for all
            batches. Without them the rows of k count from 0, and the last row of q is at the last row of k. One that
            cos does not have is taken for the nearest that it has.
        in_place: q and k are changed, which must be two device arrays that need no copy.

    Returns:
        (q, k) rotated, device arrays: new ones, C-contiguous; in place the same ones.

    Raises:
        TypeError: another dtype, or no array.
        ValueError: shapes that do not fit each other; fewer angles than rows; arrays that in_place cannot change.
    """
    return plan_rotary(q, k, cos, sin, interleaved=interleaved, positions=positions, in_place=in_place)()


def plan_rotary(
    q: Any,
    k: Any,
    cos: Any,
    sin: Any,
    *,
    interleaved: bool = False,
    positions: tuple[Any, Any] | None = None,
    in_place: bool = False,
    source: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Planned:
    """Do all of `rotary` but the launch.

    Args:
        source: kernel code to use instead of the kernel's file. sizes: -D options, such as {"THREADS": 128}.
        The others: see `rotary`.
    """
    cp = device.cp
    check_flags(interleaved=interleaved, in_place=in_place)
    if positions is not None:
        _check_pair("positions", positions, "(of q's rows, of k's rows)")
    given, (q, k) = (q, k), (_array(name, a) for name, a in (("q", q), ("k", k)))
    cos, sin = (_array(name, a) for name, a in (("cos", cos), ("sin", sin)))
    _check_rotary(q, k, cos, sin, positions is not None)
    (batch, n, heads, head_dim), (n_kv, kv_heads) = q.shape, k.shape[1:3]
    (q_positions, q_step), (k_positions, k_step) = (
        (None, 0) if positions is None else _positions(name, positions[i], rows, batch)
        for i, (name, rows) in enumerate((("q", n), ("k", n_kv)))
    )
    vectors = (head_dim * q.dtype.itemsize // 16 + 1) // 2  # a thread has one of 16 bytes, and its partner
    rows_of_grid = max(n * heads, n_kv * kv_heads) * vectors
    if rows_of_grid >= 2**31:
        raise ValueError(f"q has shape {q.shape} and k {k.shape}; a launch has 2^31 threads a batch at most")
    if in_place:
        for name, a, was in (("q", q, given[0]), ("k", k, given[1])):
            if a is not was or not _in_rows(a):
                raise ValueError(f"in_place: {name} is a device array with rows that start at multiples of 16 bytes")
            if any(n > 1 and step == 0 for n, step in zip(a.shape, a.strides, strict=True)):
                raise ValueError(
                    f"in_place: {name} has strides {a.strides}, so that elements are one in memory: {name}.copy()"
                )
            if isinstance(a, np.ndarray) and not a.flags.writeable:
                raise ValueError(f"in_place: {name} is read-only: {name}.copy()")
        if address(q) == address(k):
            raise ValueError("in_place: q and k are one array, which would be rotated twice")
        outputs = q, k
    else:
        q, k = map(_readable, (q, k))
        outputs = tuple(cp.empty(a.shape, dtype=a.dtype) for a in (q, k))
    numbers = n, n_kv, heads, kv_heads, q_step, k_step, len(cos), 0  # none are packed
    params = rotary_params([*map(_strides, (q, k, *outputs))], *numbers)
    sizes = {"HEAD_DIM": head_dim, "ROTARY_DIM": 2 * cos.shape[1], "INTERLEAVED": int(interleaved), **(sizes or {})}
    threads = sizes.setdefault("THREADS", launches.ROTARY_THREADS)
    compiled = kernel.load(source or ROTARY, f"rotary<{C_NAMES[q.dtype.name]}>", defines=sizes)
    tables = (*map(cp.ascontiguousarray, (cos, sin)),)
    parts = []
    for some in launches.slices(batch, launches.MAX_GRID_YZ):
        places = (a[some] if step else a for a, step in ((q_positions, q_step), (k_positions, k_step)))
        args = (*(flat_view(a[some]) for a in (q, k, *outputs)), *tables, *places, None, None, params)
        parts.append(((-(-rows_of_grid // threads), 2, some.stop - some.start), args))
    (grid, args), *others = parts
    return Planned(compiled, grid, (threads,), args, 0, outputs, others=others)


def _check_rotary(q: Any, k: Any, cos: Any, sin: Any, positions_given: bool) -> None:
    """TypeError or ValueError for device arrays that `rotary` cannot take."""
    check_model_arrays(q, k, k, BATCHED)
    _check_no_empty_axis(q, k)
    if q.dtype.name not in C_NAMES:
        raise TypeError(f"q is {q.dtype}; {', '.join(C_NAMES)} are rotated")
    for name, a in (("cos", cos), ("sin", sin)):
        if a.dtype != np.float32:
            raise TypeError(f"{name} is {a.dtype}; float32 is needed: {name}.astype('float32')")
        if a.ndim != 2 or a.shape != cos.shape:
            raise ValueError(f"{name} has shape {a.shape}; cos and sin have one shape (positions, rotary_dim / 2)")
    head_dim, rotary_dim, vector = q.shape[3], 2 * cos.shape[1], 16 // q.dtype.itemsize
    if head_dim % vector or rotary_dim % (2 * vector) or not 0 < rotary_dim <= head_dim:
        raise ValueError(
            f"head_dim = {head_dim}, and cos is for rotary_dim = {rotary_dim}; in {q.dtype} head_dim is a multiple of "
            f"{vector}, and rotary_dim one of {2 * vector} and at most head_dim"
        )
    n, n_kv = q.shape[1], k.shape[1]
    if not len(cos):
        raise ValueError("cos has no positions: angles for one or more are needed")
    if not positions_given and n > n_kv:
        raise ValueError(f"q has {n} rows and k {n_kv}: row 0 of q would be before position 0; give positions")
    if not positions_given and len(cos) < n_kv:
        raise ValueError(f"cos has {len(cos)} positions, and k has {n_kv} rows")


def _check_pair(name: str, pair: Any, form: str) -> None:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        got = f"{len(pair)} of them" if isinstance(pair, (tuple, list)) else type(pair).__name__
        raise TypeError(f"{name} is a pair {form}, or None; got {got}")


def _positions(name: str, positions: Any, rows: int, batch: int) -> tuple[Any, int]:
    """Return the positions of q's or k's rows as the kernel reads them, and the step from one batch to the next."""
    a = _array(f"positions of {name}", positions)
    if a.dtype != np.int32 or a.shape not in ((rows,), (batch, rows)):
        wanted = f"int32 of shape {(rows,)} or {(batch, rows)}"
        raise ValueError(f"the positions of {name} are {a.dtype} of shape {a.shape}; needed is {wanted}")
    return device.cp.ascontiguousarray(a), rows if a.ndim == 2 else 0


# ---- output projection


def attention_projection(
    q: Any,
    k: Any,
    v: Any,
    w_o: Any,
    *,
    form: str = "atomics",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    cu_seqlens: tuple[Any, Any] | None = None,
) -> Any:
    """Attention and its output projection: the heads' outputs side by side, times w_o.

    Args:
        q: (batch, seq, heads, head_dim), float16 or bfloat16; with cu_seqlens (tokens, heads, head_dim). head_dim is a
            multiple of 8, at most 128.
        k, v: (batch, seq_kv, kv_heads, head_dim), or (tokens_kv, kv_heads, head_dim), of q's dtype; kv_heads divides
            heads.
        w_o: (heads * head_dim, columns) of q's dtype; columns is a multiple of 8.
        form: "atomics": a block has one head, and adds its share to the result; the sums differ in their last bits
            from run to run. "all_heads": a block has all heads of its rows, one after the other.
        causal, window, softmax_scale: see `helpers.attention.flash_attention`.
        cu_seqlens: (cu_seqlens_q, cu_seqlens_k), int32: see `flash_attention_varlen`.

    Returns:
        (batch, seq, columns), or (tokens, columns), float32, a device array. O is rounded to q's dtype before the
        product, as it is where O is written; the product is not rounded.

    Raises:
        TypeError: another dtype, or no array; options of the wrong type.
        ValueError: shapes that do not fit; a form that there is not; a GPU below compute capability 8.0.
    """
    return plan_projection(
        q,
        k,
        v,
        w_o,
        form=form,
        causal=causal,
        window=window,
        softmax_scale=softmax_scale,
        cu_seqlens=cu_seqlens,
    )()


def plan_projection(
    q: Any,
    k: Any,
    v: Any,
    w_o: Any,
    *,
    form: str = "atomics",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    cu_seqlens: tuple[Any, Any] | None = None,
    source: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Planned:
    """`attention_projection` but for the launch. source: another text of the kernel; sizes: such as {"BLOCK_M": 64}."""
    cp = device.cp
    q, k, v, w_o = (_array(name, a) for name, a in (("q", q), ("k", k), ("v", v), ("w_o", w_o)))
    _check_projection(q, k, v, w_o, form, packed=cu_seqlens is not None)
    heads, head_dim = q.shape[-2:]
    optional, rows, sequences = (None, None), q.shape[-3], q.shape[0]
    if cu_seqlens is not None:
        optional, rows = _lengths(cu_seqlens, q, k)
        sequences = len(optional[0]) - 1
    if form == "atomics" and heads > launches.MAX_GRID_YZ:
        raise ValueError(f"{heads:,} heads; a launch takes {launches.MAX_GRID_YZ:,} at most")
    limits_of_mask = mask_window(window, causal)
    scale = softmax_scale_of(softmax_scale, head_dim)
    q, k, v = map(_readable, (q, k, v))
    q, scale = with_scale_above_zero(q, scale)
    w_o = cp.ascontiguousarray(w_o)
    w_o = w_o if is_aligned(w_o) else cp.array(w_o)
    all_heads, columns = form == "all_heads", w_o.shape[1]
    y = (cp.empty if all_heads else cp.zeros)((*q.shape[:-2], columns), dtype=cp.float32)
    params = attention_params(
        {**{name: _strides(a) for name, a in zip("qkv", (q, k, v), strict=True)}, "o": _strides(y[..., None, :])},
        n=q.shape[-3],
        n_kv=k.shape[-3],
        heads=heads,
        kv_heads=k.shape[-2],
        window=limits_of_mask,
        softmax_scale=scale,
    )
    defines = {"HEAD_DIM": head_dim, **pick_projection(head_dim, limits.most_shared())}
    defines.update(ALL_HEADS=int(all_heads))
    defines.update(sizes or {})
    compiled = kernel.load(source or PROJECTION, f"projection<{C_NAMES[q.dtype.name]}>", defines=defines)
    parts = []
    for some in launches.slices(sequences, launches.MAX_GRID_YZ):
        arrays, lengths = [a[some] for a in (q, k, v, y)], optional
        if cu_seqlens is not None:  # each knows where it is in the whole arrays
            arrays, lengths = [q, k, v, y], tuple(cu[some.start : some.stop + 1] for cu in optional)
        args = (*map(flat_view, arrays[:3]), w_o, arrays[3], *lengths, np.int32(columns), params)
        grid = max(1, -(-rows // defines["BLOCK_M"])), 1 if all_heads else heads, some.stop - some.start
        parts.append((grid, args))
    (grid, args), *others = parts
    shared, before = mma_shared_bytes(defines), None if all_heads else lambda: y.fill(0)
    return Planned(compiled, grid, (32 * defines["WARPS"],), args, shared, y, before, others)


def _check_projection(q: Any, k: Any, v: Any, w_o: Any, form: str, *, packed: bool) -> None:
    """TypeError or ValueError for device arrays that `attention_projection` cannot take, or a form there is not."""
    check_model_arrays(q, k, v, PACKED if packed else BATCHED)
    if not packed:
        _check_no_empty_axis(q, k)
    if form not in FORMS:
        raise ValueError(f"form is {form!r}; there are {' and '.join(map(repr, FORMS))}")
    base = LADDER["flash_mma"]
    heads, head_dim = q.shape[-2:]
    if reason := base.why_not(head_dim=head_dim, dtype=q.dtype.name):
        error = TypeError if q.dtype.name not in base.dtypes else ValueError
        raise error(f"attention_projection cannot: {reason}")
    if head_dim > 128:
        raise ValueError(f"head_dim = {head_dim}; attention_projection takes 8 to 128, multiples of 8")
    if w_o.dtype != q.dtype:
        raise TypeError(f"w_o is {w_o.dtype} and q is {q.dtype}: one dtype for all is needed")
    if w_o.ndim != 2 or w_o.shape[0] != heads * head_dim or w_o.shape[1] % 8 or not w_o.shape[1]:
        wanted = f"(heads * head_dim, columns) = ({heads * head_dim}, a multiple of 8)"
        raise ValueError(f"w_o has shape {w_o.shape}; needed is {wanted}")


def _lengths(cu_seqlens: tuple[Any, Any], q: Any, k: Any) -> tuple[tuple[Any, ...], int]:
    """cu_seqlens as device arrays, and the rows of q's longest sequence."""
    _check_pair("cu_seqlens", cu_seqlens, f"({', '.join(CU_SEQLENS)})")
    arrays = tuple(_array(name, a) for name, a in zip(CU_SEQLENS, cu_seqlens, strict=True))
    for name, cu in zip(CU_SEQLENS, arrays, strict=True):
        check_cu_seqlens(name, cu)
    if len(arrays[0]) != len(arrays[1]):
        raise ValueError(f"cu_seqlens has {len(arrays[0])} and {len(arrays[1])} entries: one number is needed")
    rows, _ = (
        longest_of(name, device.cp.asnumpy(cu), of, len(a))
        for name, cu, of, a in zip(CU_SEQLENS, arrays, "qk", (q, k), strict=True)
    )
    return arrays, rows


# ---- arrays


def _array(name: str, a: Any) -> Any:
    """Return a device array. Raises TypeError unless it is one, or NumPy's."""
    if not isinstance(a, (np.ndarray, device.cp.ndarray)):
        raise TypeError(f"{name} is a NumPy or a device array; got {type(a).__name__}")
    return a if isinstance(a, device.cp.ndarray) else device.cp.asarray(a)


def _check_no_empty_axis(q: Any, k: Any) -> None:
    if 0 in (*q.shape, *k.shape):
        raise ValueError(f"q has shape {q.shape} and k {k.shape}: no axis may be empty")


def _in_rows(a: Any) -> bool:
    """Return True if the kernels can read it in place: rows contiguous, each at a multiple of 16 bytes."""
    return (a.strides[-1] == a.itemsize or a.shape[-1] == 1) and min(a.strides) >= 0 and is_aligned(a)


def _readable(a: Any) -> Any:
    """Return the array as the kernels can read it: itself, or a copy."""
    return a if _in_rows(a) else device.cp.array(device.cp.ascontiguousarray(a))


def _strides(a: Any) -> tuple[int, int, int]:
    """Return the strides of batch, row and head in elements; batch is 0 without such an axis."""
    steps = [stride // a.itemsize for stride in a.strides]
    return (steps[0] if a.ndim == 4 else 0, *steps[-3:-1])


old_names(__name__, angles="cos_sin")
