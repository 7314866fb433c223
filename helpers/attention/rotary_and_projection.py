"""Attention's neighbours in a model, in kernels of their own or fused: rotary embedding and output projection.

    from helpers.attention.rotary_and_projection import attention_projection, rotary
    q, k = rotary(q, k, *cos_sin(n, head_dim))                   # one pass over q and k before attention
    y = attention_projection(q, k, v, w_o, form="atomics")       # concat(heads of attention) @ w_o, in one kernel

These are no stages of the ladder: their result is not attention's output. Arrays are (batch, seq, heads, head_dim), of
NumPy or of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from helpers import device
from helpers.attention.ladder import Stage, launches
from helpers.attention.ladder.call import (
    BATCHED,
    CU_SEQLENS,
    PACKED,
    ForwardOptions,
    check_cu_seqlens,
    check_model_arrays,
    longest_of,
)
from helpers.attention.ladder.layout import Addresses, Spec, is_aligned
from helpers.attention.ladder.plan import CompiledPlan, plan
from helpers.attention.ladder.stage import C_NAMES, Tuning
from helpers.attention.ladder.stages import tensor_cores
from helpers.attention.scalars import check_flags, finite_number, whole_number

ROTARY, PROJECTION = launches.ROTARY_FILE, tensor_cores.PROJECTION.file
FORMS = ("atomics", "all_heads")


class Planned(NamedTuple):
    """The compiled launches of a call, its arrays, and what it writes.

    before: has to be called before each launch, unless it is None: it fills Y with zeros.
    """

    compiled: CompiledPlan
    arrays: Mapping[str, Any]
    result: Any
    before: Callable[[], None] | None = None

    @property
    def launch(self) -> tuple[Any, ...]:
        """The arguments of `helpers.xray.xray`: the first launch, should a grid have no room for all batches."""
        (launch, kernel, args), *_ = self.compiled.resolve_arguments(self.arrays)
        return kernel, launch.grid, launch.block, args, launch.shared_bytes

    def prepare(self) -> Callable[[], None]:
        """Check the arguments now; return a function that only calls `before`, if there is one, and launches."""
        launch, before = self.compiled.bind(self.arrays), self.before
        if before is None:
            return launch

        def run() -> None:
            before()
            launch()

        return run

    def __call__(self) -> Any:
        """Launch once; return the result."""
        self.prepare()()
        return self.result


# ---- rotary embedding


def cos_sin(positions: int, rotary_dim: int, *, base: float = 10000.0) -> tuple[np.ndarray, np.ndarray]:
    """Return (cos, sin), float32 (positions, rotary_dim / 2), of position * base^(-2 i / rotary_dim) for pair i.

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


def rotary(q: Any, k: Any, cos: Any, sin: Any, **options: Any) -> tuple[Any, Any]:
    """Rotate pairs of columns of q and k by the angles of their positions, in a pass of its own.

    Args, the options among them:
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
    return plan_rotary(q, k, cos, sin, **options)()


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
) -> Planned:
    """Do all of `rotary` but the launch.

    Args:
        source: kernel code to use instead of the kernel's file.
        The others: see `rotary`.
    """
    check_flags(interleaved=interleaved, in_place=in_place)
    if positions is not None:
        _check_pair("positions", positions, "(of q's rows, of k's rows)")
    given = {"q": q, "k": k}
    arrays = {name: _array(name, a) for name, a in given.items()}
    q, k, cos, sin = *arrays.values(), _array("cos", cos), _array("sin", sin)
    _check_rotary(q, k, cos, sin, positions is not None)
    if in_place:
        for name, a in arrays.items():
            spec = Spec.of(a)
            if a is not given[name] or not (spec.in_rows and spec.aligned):
                raise ValueError(f"in_place: {name} is a device array with rows that start at multiples of 16 bytes")
            if any(n > 1 and step == 0 for n, step in zip(a.shape, a.strides, strict=True)):
                raise ValueError(
                    f"in_place: {name} has strides {a.strides}, so that elements are one in memory: {name}.copy()"
                )
            if isinstance(a, np.ndarray) and not a.flags.writeable:
                raise ValueError(f"in_place: {name} is read-only: {name}.copy()")
        if np.shares_memory(np.asarray(Addresses(q)), np.asarray(Addresses(k))):
            raise ValueError("in_place: q and k share memory, which would be rotated twice")
    outputs = (q, k) if in_place else tuple(device.cp.empty(a.shape, dtype=a.dtype) for a in (q, k))
    arrays |= {"rotated_q": outputs[0], "rotated_k": outputs[1]}
    arrays = {name: a.swapaxes(1, 2) for name, a in arrays.items()} | {"rotary_cos": cos, "rotary_sin": sin}
    for i, a in enumerate((q, k) if positions else ()):
        arrays[f"{'qk'[i]}_positions"] = _positions("qk"[i], positions[i], a)
    options = ForwardOptions((-1, -1), softmax_scale=1.0, rotary_interleaved=interleaved)
    return Planned(*plan(_ROTARY_PASS, arrays, options, source=source), outputs)


_ROTARY_PASS = Stage(
    *(11, "rotary", ROTARY, "the rotary embedding, in a pass of its own"),
    Tuning(lambda head_dim, shared_limit: {}, variant=launches.rotary_sizes),
    launches=lambda stage, call, sizes: launches.launch_rotary(call, sizes),
    direction="rotate",
    features=frozenset({"strides", "rotates"}),
)


def _check_rotary(q: Any, k: Any, cos: Any, sin: Any, positions_given: bool) -> None:
    """Raise TypeError or ValueError for device arrays that `rotary` cannot take."""
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


def _positions(name: str, positions: Any, a: Any) -> Any:
    """Check the positions of the rows of `a` (q or k, as `name` says), and return them as a device array."""
    positions, (batch, rows, *_) = _array(f"positions of {name}", positions), a.shape
    if positions.dtype != np.int32 or positions.shape not in ((rows,), (batch, rows)):
        wanted = f"int32 of shape {(rows,)} or {(batch, rows)}"
        raise ValueError(
            f"the positions of {name} are {positions.dtype} of shape {positions.shape}; needed is {wanted}"
        )
    return positions


# ---- output projection


def attention_projection(q: Any, k: Any, v: Any, w_o: Any, **options: Any) -> Any:
    """Compute attention and its output projection: the concatenated outputs of the heads, times w_o.

    Args, the options among them:
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
    return plan_projection(q, k, v, w_o, **options)()


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
    """Do all of `attention_projection` but the launch.

    Args:
        source: kernel code to use instead of the kernel's file. sizes: -D options, such as {"BLOCK_M": 64}.
        The others: see `attention_projection`.
    """
    cp = device.cp
    q, k, v, w_o = (_array(name, a) for name, a in (("q", q), ("k", k), ("v", v), ("w_o", w_o)))
    _check_projection(q, k, v, w_o, form, packed=cu_seqlens is not None)
    options = ForwardOptions(window, causal, softmax_scale).checked(q.shape[-1])
    w_o = cp.ascontiguousarray(w_o)
    w_o = w_o if is_aligned(w_o) else cp.array(w_o)
    all_heads = form == "all_heads"
    y = (cp.empty if all_heads else cp.zeros)((*q.shape[:-2], w_o.shape[1]), dtype=cp.float32)
    arrays = {"q": q, "k": k, "v": v, "o": y[..., None, :]}
    arrays = {name: a.swapaxes(-3, -2) for name, a in arrays.items()} | {"w_o": w_o}
    longest: tuple[int | None, int | None] = (None, None)
    if cu_seqlens is not None:
        lengths, longest = _lengths(cu_seqlens, q, k)
        arrays |= lengths
    sizes = {"ALL_HEADS": int(all_heads), **(sizes or {})}
    planned = plan(tensor_cores.PROJECTION, arrays, options, longest=longest, source=source, sizes=sizes)
    return Planned(*planned, y, None if all_heads else lambda: y.fill(0))


def _check_projection(q: Any, k: Any, v: Any, w_o: Any, form: str, *, packed: bool) -> None:
    """Raise TypeError or ValueError for arrays that `attention_projection` cannot take, and for an unknown form."""
    check_model_arrays(q, k, v, PACKED if packed else BATCHED)
    if not packed:
        _check_no_empty_axis(q, k)
    if form not in FORMS:
        raise ValueError(f"form is {form!r}; there are {' and '.join(map(repr, FORMS))}")
    stage, (heads, head_dim) = tensor_cores.PROJECTION, q.shape[-2:]
    if reason := stage.why_not(head_dim=head_dim, dtype=q.dtype.name):
        error = TypeError if q.dtype.name not in stage.dtypes else ValueError
        raise error(f"attention_projection cannot: {reason}")
    if form == "atomics" and heads > launches.MAX_GRID_YZ:
        raise ValueError(f"{heads:,} heads; a launch takes {launches.MAX_GRID_YZ:,} at most")
    if w_o.dtype != q.dtype:
        raise TypeError(f"w_o is {w_o.dtype} and q is {q.dtype}: one dtype for all is needed")
    if w_o.ndim != 2 or w_o.shape[0] != heads * head_dim or w_o.shape[1] % 8 or not w_o.shape[1]:
        wanted = f"(heads * head_dim, columns) = ({heads * head_dim}, a multiple of 8)"
        raise ValueError(f"w_o has shape {w_o.shape}; needed is {wanted}")


def _lengths(cu_seqlens: tuple[Any, Any], q: Any, k: Any) -> tuple[dict[str, Any], tuple[int, int]]:
    """Return cu_seqlens as device arrays by name, and the rows of the longest sequences of q and of k."""
    _check_pair("cu_seqlens", cu_seqlens, f"({', '.join(CU_SEQLENS)})")
    arrays = {name: _array(name, a) for name, a in zip(CU_SEQLENS, cu_seqlens, strict=True)}
    for name, cu in arrays.items():
        check_cu_seqlens(name, cu)
    of_q, of_k = arrays.values()
    if len(of_q) != len(of_k):
        raise ValueError(f"cu_seqlens has {len(of_q)} and {len(of_k)} entries: one number is needed")
    rows, keys = (
        longest_of(name, device.cp.asnumpy(cu), of, len(a))
        for (name, cu), of, a in zip(arrays.items(), "qk", (q, k), strict=True)
    )
    return arrays, (rows, keys)


# ---- arrays


def _array(name: str, a: Any) -> Any:
    """Return a device array. Raises TypeError unless it is one, or NumPy's."""
    if not isinstance(a, (np.ndarray, device.cp.ndarray)):
        raise TypeError(f"{name} is a NumPy or a device array; got {type(a).__name__}")
    return a if isinstance(a, device.cp.ndarray) else device.cp.asarray(a)


def _check_no_empty_axis(q: Any, k: Any) -> None:
    if 0 in (*q.shape, *k.shape):
        raise ValueError(f"q has shape {q.shape} and k {k.shape}: no axis may be empty")
