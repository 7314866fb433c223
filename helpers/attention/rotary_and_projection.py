"""Attention's neighbours in a model, in separate kernels or fused: rotary embedding and output projection.

    from helpers.attention.rotary_and_projection import attention_projection, rotary
    q, k = rotary(q, k, *cos_sin(n, head_dim))                   # one pass over q and k before attention
    y = attention_projection(q, k, v, w_o, form="atomics")       # concat(heads of attention) @ w_o, in one kernel

These are not stages of the ladder, because their result is not attention's output. Arrays are (batch, seq, heads,
head_dim), of NumPy or of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from helpers import device
from helpers.attention.calls import check, find_longest, readable
from helpers.attention.ladder import Stage, launches
from helpers.attention.ladder.call import (
    BATCHED,
    CU_SEQLENS,
    ForwardOptions,
    check_model_arrays,
    check_same_device,
)
from helpers.attention.ladder.extras import extra_inputs
from helpers.attention.ladder.layout import Addresses, Spec, check_writable, share_memory
from helpers.attention.ladder.plan import CompiledPlan
from helpers.attention.ladder.stage import C_NAMES, Tuning
from helpers.attention.ladder.stages import tensor_cores
from helpers.attention.run import Call, Output, Plan, compile_plan, lay_out, run
from helpers.attention.scalars import check_flags, check_pair, finite_number, whole_number

PROJECTION = tensor_cores.PROJECTION.file
FORMS = ("atomics", "all_heads")


class Planned(NamedTuple):
    """The launches of a call that is run by hand, its arrays as they read them, and what it returns.

    before: None, or a function to call before each launch, which fills Y with zeros.
    """

    compiled: CompiledPlan
    arrays: Mapping[str, Any]
    result: Any
    before: Callable[[], None] | None = None

    @property
    def launch(self) -> tuple[Any, ...]:
        """The arguments of `helpers.xray.xray`: the first launch, if a grid cannot hold all batches."""
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

    Source: Su et al., RoFormer, 2021, section 3.2.2. TypeError or ValueError for a rotary_dim that is not an even
    number above 0, positions below 0, and a base that is not above 0.
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
    """Rotate pairs of columns of q and k by the angles of their positions, in a separate pass.

    Args, the options among them:
        q: (batch, seq, heads, head_dim), float32, float16 or bfloat16, of NumPy or of the device.
        k: (batch, seq_kv, kv_heads, head_dim) of q's dtype.
        cos, sin: (positions, rotary_dim / 2), float32 or of q's dtype. The first rotary_dim columns are rotated, in
            float32; the others stay. rotary_dim is a multiple of 16 (float32: 8) and at most head_dim, a multiple of 8
            (float32: 4).
        interleaved: a pair is two neighbouring columns (GPT-J); without it column i and i + rotary_dim / 2 (Llama).
        positions: of the rows of q and of k, int32 (batch, seq) and (batch, seq_kv), or (seq,) and (seq_kv,) for all
            batches. Without them the rows of k count from 0, and the last row of q is at the last row of k. A position
            outside of cos counts as the nearest one inside.
        in_place: change q and k, which must be two device arrays that need no copy.

    Returns:
        (q, k) rotated, device arrays: new ones, C-contiguous; in place the same ones.

    Raises:
        TypeError: another dtype, or no array.
        ValueError: shapes that do not fit each other; fewer angles than rows; arrays that in_place cannot change.
        Messages name cos, sin and positions as `helpers.attention.flash_attention` does: rotary_cos and so on.
    """
    call = _rotation(q, k, cos, sin, **options)
    return run(call) or (q, k)


def plan_rotary(q: Any, k: Any, cos: Any, sin: Any, *, source: str | None = None, **options: Any) -> Planned:
    """Do all of `rotary` but the launch.

    Args:
        source: kernel code to use instead of the kernel's file.
        The others: see `rotary`.
    """
    compiled, arrays, outputs = lay_out(_rotation(q, k, cos, sin, **options), source=source)
    return Planned(compiled, arrays, tuple(outputs) or (q, k))


def _rotation(
    q: Any,
    k: Any,
    cos: Any,
    sin: Any,
    *,
    interleaved: bool = False,
    positions: tuple[Any, Any] | None = None,
    in_place: bool = False,
) -> Rotation:
    check_flags(in_place=in_place)
    tables = extra_inputs(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved, rotary_positions=positions)
    arrays = _on_device({"q": q, "k": k, **tables})
    if in_place:
        _check_in_place({"q": q, "k": k})
    return Rotation(arrays, ForwardOptions(rotary_interleaved=interleaved), lengths=in_place)


class Rotation(Call):
    """A call of the rotary embedding alone. lengths: True if q and k themselves are rotated."""

    __slots__ = ()
    options: ForwardOptions

    def plan(self, specs: Mapping[str, Spec]) -> Plan:
        """See `Call.plan`."""
        in_place, written = self.lengths, {f"rotated_{name}": specs[name] for name in "qk"}
        q, k = written.values()
        check_model_arrays(q, k, k, BATCHED)
        check_same_device(specs)
        if 0 in (*q.shape, *k.shape):
            raise ValueError(f"q has shape {q.shape} and k {k.shape}: no axis may be empty")
        if q.dtype.name not in C_NAMES:
            raise TypeError(f"q is {q.dtype}; expected one of {', '.join(C_NAMES)}")
        outputs = {name: Output(a.shape, a.dtype) for name, a in written.items()}
        call, changes = readable(_ROTARY_PASS, specs, outputs, self.options.checked(q.shape[-1]))
        if not in_place:
            return Plan(compile_plan(_ROTARY_PASS, call), tuple(specs), outputs, changes=changes)
        for change in changes:
            if change.name in "qk":
                raise ValueError(
                    f"in_place: {change.name} is a device array with rows that start at multiples of 16 bytes"
                )
        call = call._replace(arrays={**call.arrays, **{name: a.heads_first for name, a in written.items()}})
        return Plan(compile_plan(_ROTARY_IN_PLACE, call), tuple(specs), {}, changes=changes)


_ROTARY_PASS = Stage(
    *(11, "rotary", launches.ROTARY_FILE, "the rotary embedding, in a pass of its own"),
    Tuning(lambda head_dim, shared_limit: {}, variant=launches.rotary_sizes),
    launches=lambda stage, call, sizes: launches.launch_rotary(call, sizes),
    direction="rotate",
    features=frozenset({"strides", "rotates"}),
)
_ROTARY_IN_PLACE = _ROTARY_PASS.changed(
    launches=lambda stage, call, sizes: [
        launches.renamed(each, {"rotated_q": "q", "rotated_k": "k"}) for each in launches.launch_rotary(call, sizes)
    ]
)


def _check_in_place(arrays: Mapping[str, Any]) -> None:
    """Raise ValueError for q and k that cannot be changed."""
    for name, a in arrays.items():
        if not isinstance(a, device.cp.ndarray):
            raise ValueError(f"in_place: {name} is a device array with rows that start at multiples of 16 bytes")
        check_writable(name, a, "in_place rotates it")
    if share_memory(*map(Addresses, arrays.values())):
        raise ValueError("q and k share memory, which would be rotated twice")


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
        product, as if O were stored; the product is not rounded.

    Raises:
        TypeError: another dtype, or not an array; options of the wrong type.
        ValueError: shapes that do not match; an unknown form; a GPU below compute capability 8.0.
    """
    return run(_projection(q, k, v, w_o, **options))[..., 0, :]


def plan_projection(
    q: Any,
    k: Any,
    v: Any,
    w_o: Any,
    *,
    source: str | None = None,
    sizes: Mapping[str, int] | None = None,
    **options: Any,
) -> Planned:
    """Do all of `attention_projection` but the launch.

    Args:
        source: kernel code to use instead of the kernel's file. sizes: -D options, such as {"BLOCK_M": 64}.
        The others: see `attention_projection`.
    """
    call = _projection(q, k, v, w_o, **options)
    compiled, arrays, (y,) = lay_out(call, source=source, sizes=sizes)
    return Planned(compiled, arrays, y[..., 0, :], None if call.form == "all_heads" else lambda: y.fill(0))


def _projection(
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
) -> Projection:
    if form not in FORMS:
        raise ValueError(f"form is {form!r}; there are {' and '.join(map(repr, FORMS))}")
    arrays, longest = {"q": q, "k": k, "v": v, "w_o": w_o}, (None, None)
    if cu_seqlens is not None:
        check_pair("cu_seqlens", cu_seqlens, f"({', '.join(CU_SEQLENS)})")
        arrays |= zip(CU_SEQLENS, cu_seqlens, strict=True)
    arrays = _on_device(arrays)
    if cu_seqlens is not None:
        longest = find_longest(*(arrays[name] for name in (*CU_SEQLENS, "q", "k")))
    return Projection(arrays, ForwardOptions(window, causal, softmax_scale), longest, (form, longest))


class Projection(Call):
    """A call of attention and its output projection. lengths: the form, and the longest packed sequences."""

    __slots__ = ()
    options: ForwardOptions

    @property
    def form(self) -> str:
        """One of FORMS."""
        return self.lengths[0]

    def plan(self, specs: Mapping[str, Spec]) -> Plan:
        """See `Call.plan`."""
        check(specs)
        stage, q, w_o = _BY_FORM[self.form], specs["q"], specs["w_o"]
        _check_weights(stage, self.form, q, w_o)
        options = self.options.checked(q.shape[-1])
        shape = *q.shape[:-2], 1, w_o.shape[1]
        outputs = {"o": Output(shape, np.dtype(np.float32), zeroed=self.form == "atomics")}
        if 0 in q.shape or 0 in specs["k"].shape:
            return Plan(None, tuple(specs), outputs)
        call, changes = readable(stage, specs, outputs, options, self.longest)
        return Plan(compile_plan(stage, call, options.key), tuple(specs), outputs, changes=changes)


def _in_form(all_heads: int) -> Stage:
    stage = tensor_cores.PROJECTION
    return stage.changed(variant=lambda call: {"ALL_HEADS": all_heads, **stage.variant(call)})


_BY_FORM = {form: _in_form(i) for i, form in enumerate(FORMS)}


def _check_weights(stage: Stage, form: str, q: Spec, w_o: Spec) -> None:
    """Raise TypeError or ValueError for what 11_projection.cu cannot take."""
    heads, head_dim = q.shape[-2:]
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


# ---- arrays


def _on_device(arrays: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return device arrays. Raises TypeError for what is neither one nor NumPy's."""
    cp = device.cp
    if {*map(type, arrays.values())} == {cp.ndarray}:
        return arrays
    for name, a in arrays.items():
        if not isinstance(a, (np.ndarray, cp.ndarray)):
            raise TypeError(f"{name} must be a NumPy or a device array; got {type(a).__name__}")
    return {name: a if isinstance(a, cp.ndarray) else cp.asarray(a) for name, a in arrays.items()}
