"""Attention for models: one entry point to all stages of the ladder, with the names of FlashAttention's own interface.

    from helpers.attention import flash_attention, flash_attention_backward
    o, lse = flash_attention(q, k, v, causal=True, return_lse=True)  # (batch, seq, heads, head_dim)
    dq, dk, dv = flash_attention_backward(do, q, k, v, o, lse, causal=True)

The arrays may be NumPy's, the device's (CuPy's on a GPU), or anything with `__dlpack__`, such as PyTorch's and JAX's
tensors; for PyTorch's with gradients there is `helpers.torch_attention`. The output is an array of q's kind, on q's
device. A device array is read in place, whatever its strides, as long as the words of a row are contiguous:
`q.swapaxes(1, 2)` of a (batch, heads, seq, head_dim) array costs nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from helpers import device
from helpers.attention.kernel import COUNTS
from helpers.attention.ladder import LADDER, Stage, able_of, backward_of, forward_of
from helpers.attention.ladder.call import (
    BATCHED,
    CU_SEQLENS,
    MAX_ROWS,
    PACKED,
    ROTATED,
    WITH_HEAD_DIM,
    AttentionOptions,
    BackwardOptions,
    ForwardOptions,
    Spec,
    check_cu_seqlens,
    check_gradient_arrays,
    check_model_arrays,
    check_same_device,
    longest_of,
    softmax_scale_of,
)
from helpers.attention.ladder.call import Call as AttentionCall
from helpers.attention.ladder.extras import check_positions, extra_inputs
from helpers.attention.ladder.extras import needs as needs_of_extras
from helpers.attention.ladder.kinds import as_device_array, kind_of
from helpers.attention.ladder.layout import TITLES, dense, titles
from helpers.attention.ladder.score_mod import BlockMask, distance_table, parse_score_mod
from helpers.attention.ladder.stage import C_NAMES, CallSize
from helpers.attention.ladder.stages import bias_gradient
from helpers.attention.ladder.table import first_by_default
from helpers.attention.run import FAMILIES, Call, Change, Longest, Output, Plan, changed, compile_plan, copies, run
from helpers.attention.scalars import check_flags
from helpers.engine.cuda_source.signatures import dtype_of


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    score_mod: str | None = None,
    mask_mod: str | BlockMask | None = None,
    mod_args: Mapping[str, Any] | None = None,
    score_mod_grad: str | None = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = False,
    rotary_positions: tuple[Any, Any] | None = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    out_dtype: Any = None,
    stage: str | int | None = None,
) -> Any:
    """Compute softmax(softmax_scale * q k^T + bias) v for each head; rotary tables rotate q and k first.

    Args:
        q: (batch, seq, heads, head_dim). In half types, a head_dim that is not a multiple of 8 costs copies padded with
            zeros; in e4m3, one that is not a multiple of 16. e4m3 is float8_e4m3fn of PyTorch or ml_dtypes, or its
            bytes in uint8; only the stage fp8 takes it.
        k, v: (batch, seq_kv, kv_heads, head_dim) of q's dtype. kv_heads divides heads: heads / kv_heads consecutive
            heads of q share one of k and v (grouped-query attention; multi-query if kv_heads is 1). batch, seq and
            seq_kv may be 0.
        causal: query i sees key j up to i + seq_kv - seq: the last query sees every key (bottom-right alignment, as
            FlashAttention defines it since version 2.1).
        window: (left, right): how many keys before and after that diagonal a query sees; -1 for no limit. With
            causal=True right is 0.
        softmax_scale: by default 1 / sqrt(head_dim). Scaled scores may be as large as float32 allows: from 2**13 on,
            they are rounded to float32 before the row's maximum is subtracted. A negative scale costs a copy of q.
        return_lse: also the natural log of the sum of exp(scaled scores), float32 (batch, heads, seq).
        bias: (batch, heads, seq, seq_kv), each axis of that length or 1; leading axes may be left out, as in NumPy's
            broadcasting; read in place, whatever its strides. Of q's dtype or float32: added to the scaled scores;
            below about -1e37 it counts as -inf. Of bool: True where a query may see a key (as PyTorch's attn_mask). It
            combines with causal and window. Fastest if a row's keys are contiguous, and rows start at multiples of 16
            bytes.
        alibi_slopes: float32 (heads,) or (batch, heads): -slope * |i + seq_kv - seq - j| is added to the scaled scores
            (Press et al. 2022, "Train Short, Test Long", whose masks are causal; FlashAttention has both sides, too).
        sinks: float32 (heads,): exp(sinks[head]) is added to a row's sum of weights, as in gpt-oss. lse includes it.
        score_mod: an expression in CUDA C++ that replaces each score, as FlexAttention's score_mod does in Python (Dong
            et al. 2024): "cap * tanhf(score / cap)". It can use score (scaled, float), batch, head, kv_head, q_idx,
            kv_idx, q_len, kv_len, distance (q_idx - kv_idx as a float) and the names of mod_args. The last query is at
            the last key, so q_idx is negative for queries before the first. bias and slopes are added to its result.
        mask_mod: an expression that says whether a query sees a key, with the same names except score and distance; or
            a block mask that `make_block_mask` made from one. Tiles in which no query sees a key are skipped. A kernel
            finds them first: at each call if an expression reads arrays, otherwise (and for a block mask) once for each
            shape. It combines with causal and window.
        mod_args: by name: NumPy numbers (Python's are an int32 or a float32), which are passed by value; arrays of the
            same kind and device as q, C-contiguous, which are pointers in the expression. Some functions with their
            arguments are in `helpers.attention.score_mods`.
        score_mod_grad: the derivative of score_mod, which only flash_attention_backward uses.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2) of q's dtype or float32, for a rotary embedding of the first
            rotary_dim elements of each row of q and k (Su et al. 2021, "RoFormer"). Computed in float32 and rounded to
            q's dtype. In half types rotary_dim is a multiple of 16; in float32 it is one of 8, and head_dim one of 4.
        rotary_interleaved: elements 2 p and 2 p + 1 are a pair (GPT-J); otherwise p and p + rotary_dim / 2 (GPT-NeoX,
            Llama).
        rotary_positions: (q_positions, k_positions), int32 of shape (seq,) or (batch, seq), and of (seq_kv,) or (batch,
            seq_kv); None: query i is at i + seq_kv - seq and key j at j. Positions in NumPy arrays are checked; in
            other arrays, one outside the tables counts as the nearest one inside.
        q_descale, k_descale, v_descale: float32 (batch, heads) and (batch, kv_heads), for e4m3: the factor of a head's
            elements; None for 1. With a third axis, each 128 rows or keys have one: on an H200 a call took 1.08 to 1.31
            times as long. With e4m3, lse sums rounded weights, so its error may be 0.06.
        out_dtype: float32 for an output that is not rounded to q's dtype, such as a partial result to be merged with
            others by their lse; None for q's dtype. From e4m3: bfloat16 (None), float16 or float32.
        stage: a stage of the ladder, by name or number; by default the last whose `by_default` accepts a call of this
            size: on a GPU, hopper and tf32 only for much work; flash_cute and fp16x3 only by name.

    Returns:
        The output, of q's shape, kind of array and dtype (or out_dtype); with return_lse, (o, lse). A query that sees
        no key, or none whose bias is above -inf, gets 0, and lse -inf. A launch with few blocks gets smaller tiles, so
        the output of the same query may differ in its last bits in another batch, or at another length.

    Raises:
        TypeError: something that is not an array, a dtype that no stage takes, arguments of the wrong type.
        ValueError: shapes that do not match; a malformed window; a stage that does not support the call: the message
            says why, and which stages do.
    """
    rotary = rotary_cos, rotary_sin, rotary_interleaved, rotary_positions
    extras = extra_inputs(bias, alibi_slopes, *rotary, sinks, q_descale, k_descale, v_descale)
    mod, of_mod = parse_score_mod(score_mod, mask_mod, mod_args, score_mod_grad)
    out = "" if out_dtype is None else out_name(out_dtype)
    options = ForwardOptions(window, causal, softmax_scale, return_lse, rotary_interleaved, stage, mod, out)
    return run(Attention({"q": q, "k": k, "v": v, **extras, **of_mod}, options))


def flash_attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    score_mod: str | None = None,
    mask_mod: str | BlockMask | None = None,
    mod_args: Mapping[str, Any] | None = None,
    score_mod_grad: str | None = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = False,
    rotary_positions: tuple[Any, Any] | None = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    out_dtype: Any = None,
    stage: str | int | None = None,
) -> Any:
    """Compute flash_attention for sequences of several lengths, packed one after the other without padding.

    Sequence i has tokens cu_seqlens_q[i] to cu_seqlens_q[i + 1] - 1 of q, and those given by cu_seqlens_k of k and v. A
    sequence may have no queries, or no keys; without keys, its queries get 0, and lse -inf.

    Args:
        q: (tokens, heads, head_dim).
        k, v: (tokens_kv, kv_heads, head_dim).
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32: 0, then the number of tokens up to the end of each sequence.
            Unless max_seqlen_q and max_seqlen_k are both given, the host reads and checks them, for which it waits for
            the device.
        max_seqlen_q, max_seqlen_k: at least the rows of the longest sequence of q and of k. With both, on a GPU, the
            host does not read cu_seqlens, so that the call can be captured in a CUDA graph. Mistakes then go unnoticed:
            if max_seqlen_q is too small, rows at the end of a sequence are not written.
        bias: refused: packed sequences have no common (seq, seq_kv).
        alibi_slopes: float32 (heads,) or (sequences, heads).
        q_descale, k_descale, v_descale: (sequences, heads) and (sequences, kv_heads).
        rotary_positions: (q_positions, k_positions), int32 (tokens,) and (tokens_kv,); None: in a sequence of n queries
            and n_kv keys, query i is at i + n_kv - n, and key j at j. A query before the first key is at position 0.
            The others: see flash_attention; the diagonal of causal and window is each sequence's own.

    Returns:
        The output as q, (tokens, heads, head_dim); with return_lse, (o, lse), lse float32 (heads, tokens).

    Raises:
        TypeError, ValueError: as for flash_attention, and for cu_seqlens that are not int32, do not begin at 0,
            decrease, or do not end at the number of tokens.
    """
    rotary = rotary_cos, rotary_sin, rotary_interleaved, rotary_positions
    extras = extra_inputs(bias, alibi_slopes, *rotary, sinks, q_descale, k_descale, v_descale)
    mod, of_mod = parse_score_mod(score_mod, mask_mod, mod_args, score_mod_grad)
    out = "" if out_dtype is None else out_name(out_dtype)
    options = ForwardOptions(window, causal, softmax_scale, return_lse, rotary_interleaved, stage, mod, out)
    longest = find_longest(cu_seqlens_q, cu_seqlens_k, q, k, max_seqlen_q, max_seqlen_k)
    arrays = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, **extras, **of_mod}
    # A forward call does not depend on the longest keys, unless the rotary tables must reach that far.
    return run(Attention(arrays, options, longest, longest if mod or rotary_cos is not None else longest[0]))


def flash_attention_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    score_mod: str | None = None,
    mask_mod: str | BlockMask | None = None,
    mod_args: Mapping[str, Any] | None = None,
    score_mod_grad: str | None = None,
    out_dtype: Any = None,
    stage: str | int | None = None,
    wrt: Sequence[str] = (),
) -> tuple[Any, ...]:
    """Compute the gradients of sum(do * flash_attention(q, k, v)) with respect to q, k, v and the arguments in `wrt`.

    Args:
        do: the gradient of the loss with respect to the output, (batch, seq, heads, head_dim), of q's dtype.
        q, k, v, causal, window, softmax_scale, bias, alibi_slopes, sinks, score_mod, mask_mod, mod_args: as in
            flash_attention. All but q, k, v and those in `wrt` are constants.
        score_mod_grad: required with score_mod: its derivative with respect to score, an expression with the same names
            and y, the result of score_mod.
        o, lse: what flash_attention(..., return_lse=True) returned: (batch, seq, heads, head_dim) of q's dtype, and
            float32 (batch, heads, seq).
        deterministic: the same bits in every run, on the same device. Without it, blocks add to dq in any order.
        out_dtype: float32 for gradients that are not rounded to q's dtype, such as those to be added to others; None
            for q's dtype.
        stage: a stage of the ladder that computes dq, dk and dv, by name or number; by default the last that supports
            the call.
        wrt: other arguments whose gradients to compute: any of "bias" (not of bool), "alibi_slopes", "sinks", and
            "table", that of `score_mods.relative_bias`. The gradient of a broadcast argument is a sum, which has the
            same bits in every run and takes some megabytes of memory, however long the sequences are.

    Returns:
        (dq, dk, dv) with the shapes and the kind of q, k and v and q's dtype (or out_dtype), C-contiguous; and for each
        name in `wrt` a gradient with its argument's shape and dtype. If heads of q share a head of k and v, its
        gradients are summed over them. A query that sees no key has a gradient of 0, and so has a key that no query
        sees. The weights are computed from lse, a float32, whose rounding shows once it reaches about 2**20 (some
        percent at 2**22); beyond 2**25, gradients in half types fade to 0, so that none overflows.

    Raises:
        TypeError, ValueError: as for flash_attention, and for do, o and lse that do not match q.
    """
    mod, of_mod = parse_score_mod(score_mod, mask_mod, mod_args, score_mod_grad, backward=True)
    out = "" if out_dtype is None else out_name(out_dtype)
    options = BackwardOptions(window, causal, softmax_scale, deterministic, stage, mod, out)
    extras = extra_inputs(bias, alibi_slopes, sinks=sinks) | of_mod
    call = Attention({"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse, **extras}, options)
    return _gradients(call, wrt) if wrt else run(call)


def flash_attention_varlen_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    score_mod: str | None = None,
    mask_mod: str | BlockMask | None = None,
    mod_args: Mapping[str, Any] | None = None,
    score_mod_grad: str | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    stage: str | int | None = None,
    wrt: Sequence[str] = (),
) -> tuple[Any, ...]:
    """Compute flash_attention_backward for sequences of several lengths, packed as in flash_attention_varlen.

    Args:
        do, q, o: (tokens, heads, head_dim). lse: float32 (heads, tokens).
        k, v: (tokens_kv, kv_heads, head_dim). The others: see flash_attention_varlen and flash_attention_backward.

    Returns:
        (dq, dk, dv, *those of wrt), as from flash_attention_backward.

    Raises:
        TypeError, ValueError: as for flash_attention_varlen, and for do, o and lse that do not match q.
    """
    longest = find_longest(cu_seqlens_q, cu_seqlens_k, q, k, max_seqlen_q, max_seqlen_k)
    mod, of_mod = parse_score_mod(score_mod, mask_mod, mod_args, score_mod_grad, backward=True)
    options = BackwardOptions(window, causal, softmax_scale, deterministic, stage, mod)
    arrays = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}
    arrays |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    arrays |= extra_inputs(bias, alibi_slopes, sinks=sinks) | of_mod
    call = Attention(arrays, options, longest, longest)
    return _gradients(call, wrt) if wrt else run(call)


OUT_DTYPES = ("float32", "float16", "bfloat16")


def out_name(out_dtype: Any) -> str:
    """Return the name of a results' dtype: NumPy's, PyTorch's, or a string.

    Raises:
        TypeError: anything else.
    """
    name = str(out_dtype).removeprefix("torch.") if type(out_dtype).__name__ == "dtype" else out_dtype
    if not isinstance(name, str) or name not in OUT_DTYPES:
        with contextlib.suppress(TypeError):
            name = np.dtype(name).name
    if isinstance(name, str) and name in OUT_DTYPES:
        return name
    raise TypeError(f"out_dtype must be {', '.join(OUT_DTYPES[:-1])}, {OUT_DTYPES[-1]} or None; got {out_dtype!r:.40}")


# ---- checking and planning a call


class Attention(Call):
    """A call of the forward pass or, with do among its arrays, of the backward pass."""

    __slots__ = ()
    options: AttentionOptions

    def plan(self, specs: Mapping[str, Spec]) -> Plan:
        """See `Call.plan`."""
        check(specs)
        given, options, changes, columns = specs, self.options, [], 0
        head_dim, itemsize = specs["q"].shape[-1], specs["q"].dtype.itemsize
        wide = whole_chunks(head_dim, itemsize)
        if wide != head_dim:
            columns = head_dim
            options = options._replace(softmax_scale=softmax_scale_of(options.softmax_scale, head_dim))
            changes = [Change(name, "padded", columns=wide) for name in specs if name in WITH_HEAD_DIM]
            specs = changed(specs, changes)
        family, stage, outputs, call = of_shapes(specs, options, self.longest, columns)
        if call is None:
            return Plan(None, tuple(specs), _outputs(stage, given, options))
        call, own = readable(stage, specs, outputs, family.options, self.longest, call)
        how: dict[str, Any] = {"changes": [*changes, *own], "columns": columns}
        return Plan(compile_plan(stage, call, family.key), tuple(specs), outputs, **how)

    def check_host_arrays(self) -> None:
        """Check the positions of a rotary embedding."""
        check_positions(self.arrays)


WRT = ("bias", "alibi_slopes", "sinks", "table")


class ExtraGradient(Call):
    """A call of the gradient of a term added to the scores. wrt: the argument, one of `WRT`, which begins `lengths`."""

    __slots__ = ()
    options: BackwardOptions

    def plan(self, specs: Mapping[str, Spec]) -> Plan:
        """See `Call.plan`."""
        check(specs)
        wrt, q = self.lengths[0], specs["q"]
        if q.dtype.name not in C_NAMES:
            raise TypeError(f"q is {q.dtype}; gradients take {', '.join(C_NAMES)}: q.astype('float32')")
        stage = bias_gradient.stage_of(q.dtype.name, wrt)
        if q.shape[-1] > stage.max_head_dim:
            raise ValueError(f"head_dim = {q.shape[-1]}; the gradient of {wrt} takes 1 to {stage.max_head_dim}")
        a = specs[distance_table(self.options.mod) if wrt == "table" else wrt]
        if wrt == "bias" and a.dtype == np.bool_:
            raise TypeError("wrt has 'bias', which is bool: a mask has no gradient")
        if wrt == "table" and a.shape[0] != q.shape[-2]:
            raise ValueError(
                f"table has {a.shape[0]} heads, and q {q.shape[-2]}: its gradient takes one number for both"
            )
        outputs = {"d" + wrt: Output(a.shape, a.dtype)}
        if 0 in q.shape or 0 in specs["k"].shape:
            return Plan(None, tuple(specs), outputs)
        wide = -(-q.shape[-1] // stage.head_dim_step) * stage.head_dim_step
        padded = [Change(name, "padded", columns=wide) for name in specs if name in WITH_HEAD_DIM]
        padded = padded if wide != q.shape[-1] else []
        specs = changed(specs, padded)
        options = self.options.checked(q.shape[-1])
        call, own = readable(stage, specs, outputs, options, self.longest)
        return Plan(compile_plan(stage, call, options.key), tuple(specs), outputs, changes=[*padded, *own])


def _gradients(call: Attention, wrt: Sequence[str]) -> tuple[Any, ...]:
    """Compute dq, dk, dv and the gradients named in `wrt`, whose names are checked before anything is launched."""
    others = gradients_of_extras(call, wrt)
    return (*run(call), *others())


def gradients_of_extras(call: Attention, wrt: Sequence[str]) -> Callable[[], list[Any]]:
    """Check the names of gradients besides those of q, k and v; return a function that computes them.

    Raises:
        TypeError: wrt is a string, or contains a name that is not an argument's. ValueError: an argument that the call
            lacks, or a name twice.
    """
    if isinstance(wrt, str) or not all(isinstance(name, str) for name in wrt):
        raise TypeError(f"wrt must be a sequence of names, such as ['bias']; got {wrt!r:.60}")
    has = {*call.arrays, *(["table"] if distance_table(call.options.mod) else [])}
    for name in wrt:
        if name not in WRT:
            raise ValueError(f"wrt has {name!r}; gradients are those of {', '.join(WRT[:-1])} and {WRT[-1]}")
        if name not in has:
            of = "score_mods.relative_bias" if name == "table" else f"{name}="
            raise ValueError(f"wrt has {name!r}, and the call has no {of}")
    if len({*wrt}) < len(wrt):
        raise ValueError(f"wrt has a name twice: {', '.join(wrt)}")
    return lambda: [run(ExtraGradient(call.arrays, call.options, call.longest, (name, call.lengths))) for name in wrt]


class _Family(NamedTuple):
    """The common part of calls that differ only in shapes, strides and addresses.

    options: from `Options.checked`. stages: those that support the calls, fastest first; or only the one that the calls
    name.
    """

    key: tuple[Hashable, ...]
    options: AttentionOptions
    stages: Sequence[Stage]


def of_shapes(
    specs: Mapping[str, Spec], options: AttentionOptions, longest: Longest, unpadded: int = 0
) -> tuple[_Family, Stage, dict[str, Output], AttentionCall | None]:
    """Choose the stage for a call that `check` accepts; return its family, the stage, the outputs and the call.

    The call is None if q or k is empty, because there is nothing to compute. unpadded: see `Stage.why_not`.
    """
    views = {name: a.heads_first if name in WITH_HEAD_DIM else a for name, a in specs.items()}
    family, stage = choose(views, options, longest[0], unpadded)
    outputs = _outputs(stage, specs, options)
    if 0 in specs["q"].shape or 0 in specs["k"].shape:
        return family, stage, outputs, None
    return family, stage, outputs, make_call(specs, outputs, family.options, longest)


def make_call(
    specs: Mapping[str, Spec], outputs: Mapping[str, Output], options: AttentionOptions, longest: Longest
) -> AttentionCall:
    """Make the call of arrays in the layout of models. options: as `Options.checked` returns them."""
    views = {name: a.heads_first if name in WITH_HEAD_DIM else a for name, a in specs.items()}
    views |= {name: _view(name, output) for name, output in outputs.items()}
    return AttentionCall.of(views, options, longest)


def readable(
    stage: Stage,
    specs: Mapping[str, Spec],
    outputs: Mapping[str, Output],
    options: AttentionOptions,
    longest: Longest = (None, None),
    call: AttentionCall | None = None,
) -> tuple[AttentionCall, list[Change]]:
    """Make the call, as `make_call`, of arrays that the stage can read, and list the copies that this needs.

    call: the call of the arrays as they are, if made already.
    """
    call = call or make_call(specs, outputs, options, longest)
    if not (own := copies(stage, call)):
        return call, own
    if stage.negates(call):
        options = options._replace(softmax_scale=-call.softmax_scale)
    return make_call(changed(specs, own), outputs, options, longest), own


CHUNK_BYTES = 16  # kernels in half types and e4m3 copy this many at a time


def whole_chunks(head_dim: int, itemsize: int) -> int:
    """Return the head_dim that kernels compute with: rounded up to a multiple of 8 in half types, of 16 in e4m3."""
    return head_dim + -head_dim % (CHUNK_BYTES // itemsize) if itemsize <= 2 else head_dim


def _outputs(stage: Stage, specs: Mapping[str, Spec], options: AttentionOptions) -> dict[str, Output]:
    """Describe a call's outputs by name. A stage without the feature strides writes (..., heads, rows, head_dim)."""
    q = specs["q"]
    dtype = dtype_of(options.out or stage.result_dtype(q.dtype.name))
    if stage.direction == "backward":
        return {"d" + name: Output(specs[name].shape, dtype) for name in "qkv"}
    *batch, rows, heads, columns = q.shape
    whole_heads = "strides" not in stage.features
    o = Output((*batch, heads, rows, columns) if whole_heads else q.shape, dtype, whole_heads)
    return {"o": o, "lse": Output((*batch, heads, rows), np.dtype(np.float32))} if options.return_lse else {"o": o}


def _view(name: str, output: Output) -> Spec:
    """Return the spec of an output in stages' layout: (batch, heads, rows, head_dim), or lse."""
    a = dense(output.shape, output.dtype)
    if name not in WITH_HEAD_DIM | ROTATED:
        return a.with_axes(_AXES.get(name, 0))
    return a.with_axes(4) if output.heads_first else a.heads_first


_AXES = {"dbias": 4, "dalibi_slopes": 2}  # as kernels read them


def check(specs: Mapping[str, Spec]) -> None:
    """Raise TypeError or ValueError if arrays do not match. `AttentionCall.of` checks the extra inputs."""
    COUNTS["checked"] += 1
    q, packed = specs["q"], "cu_seqlens_q" in specs
    check_model_arrays(q, specs["k"], specs["v"], PACKED if packed else BATCHED)
    if len(specs) == 3:
        return
    check_same_device(specs)
    if "do" in specs:
        *batch, rows, heads, _ = q.shape
        check_gradient_arrays(specs["do"], q, specs["o"], specs["lse"], (*batch, heads, rows))
    if packed:
        for name in CU_SEQLENS:
            check_cu_seqlens(name, specs[name])
        sequences = [specs[name].size - 1 for name in CU_SEQLENS]
        if sequences[0] != sequences[1]:
            raise ValueError(
                f"cu_seqlens_q describes {sequences[0]} sequences and cu_seqlens_k describes {sequences[1]}"
            )


def choose(
    views: Mapping[str, Spec], options: AttentionOptions, longest: int | None, unpadded: int = 0
) -> tuple[_Family, Stage]:
    """Return the family of a call and its stage: the one that the call names, or the fastest for its size.

    The length of packed sequences is taken as the geometric mean of their mean and maximum: most may be short, while
    most of the work is in the long ones.
    """
    q, k = views["q"], views["k"]
    key: tuple[Hashable, ...] = options.key, q.dtype, q.shape[-1], q.shape[1] != k.shape[1], q.device
    if len(views) > 3:
        tables = views.get("rotary_cos")
        key = *key, *views, *[a.dtype for a in views.values()], tables and tables.shape[-1]
    try:
        family = FAMILIES.get(key)
    except TypeError:  # an option that is not hashable, and will be refused
        family = None
    if family is None:
        COUNTS["chosen"] += 1
        family = FAMILIES[key] = _Family(key, options.checked(q.shape[-1]), _able(views, options, unpadded))
    if options.stage is not None:
        return family, family.stages[0]
    rows = q.shape[-2]
    if "cu_seqlens_q" in views:
        rows = math.isqrt(rows * longest // (views["cu_seqlens_q"].size - 1))
    # Of gradients: keys of all heads of q.
    all_rows = math.prod(k.shape[:-1]) // k.shape[1] * q.shape[1] if "do" in views else math.prod(q.shape[:-1])
    mod = family.options.mod
    size = CallSize(
        rows,
        all_rows,
        q.shape[-1],
        masked=family.options.window != (-1, -1),
        grouped=q.shape[1] != k.shape[1],
        deterministic=options.deterministic,
        packed="cu_seqlens_q" in views,
        functions=bool(mod and mod.scores) or not views.keys().isdisjoint(("bias", "alibi_slopes")),
        derivative=bool(mod and mod.has_derivative),
    )
    stage = first_by_default(family.stages, size)
    assert stage is not None  # the slowest one accepts all
    return family, stage


def _able(views: Mapping[str, Spec], options: AttentionOptions, unpadded: int) -> Sequence[Stage]:
    """List the stages that support a call, or only the one that it names."""
    check_flags(deterministic=options.deterministic)
    q, wanted = views["q"], options.stage
    needs = {**options.needs(q, views["k"], packed="cu_seqlens_q" in views), **needs_of_extras(views)}
    needs |= {"unpadded": unpadded} if unpadded else {}
    stages = (backward_of if "do" in views else forward_of)(LADDER)
    if wanted is None:
        if able := able_of(stages, **needs):
            return able
        dtypes = sorted({dtype for stage in stages.values() for dtype in stage.dtypes})
        if q.dtype.name not in dtypes:
            which = "the stages of gradients" if "do" in views else "the stages"
            change = "helpers.attention.fp8.dequantise(q)" if q.dtype.name in TITLES else "q.astype('float32')"
            raise TypeError(f"q is {titles(q.dtype.name)}; {which} take {', '.join(map(titles, dtypes))}: {change}")
        name, reason = _nearest(stages, needs)
        raise ValueError(f"no stage can do this in {titles(q.dtype.name)}. The nearest is {name}: {reason}")
    named = [s for s in stages.values() if wanted in (s.name, s.number) and wanted is not True]
    stage = next((s for s in reversed(named) if s.why_not(**needs) is None), named[-1] if named else None)
    if stage is None:
        names = ", ".join(f"{stage.number} {stage.name}" for stage in stages.values())
        raise ValueError(f"stage={wanted!r} is not in the ladder, which has: {names}")
    if reason := stage.why_not(**needs):
        able = ", ".join(name for name, other in stages.items() if other.why_not(**needs) is None)
        raise ValueError(f"stage {stage.name} cannot: {reason}. Stages that can: {able or 'none'}")
    return (stage,)


def _nearest(stages: Mapping[str, Stage], needs: Mapping[str, Any]) -> tuple[str, str]:
    """Find, among stages that do not support a call, one that takes the dtype and lacks the least; also return why."""
    plain = {name: needs[name] for name in ("head_dim", "dtype")}

    def lacks(stage: Stage) -> tuple[int, int, int, int]:
        alone = [stage.why_not(**{**plain, name: value}) for name, value in needs.items()]
        return sum(reason is not None for reason in alone), -stage.max_head_dim, stage.head_dim_step, -stage.number

    name, stage = min(
        ((name, stage) for name, stage in stages.items() if plain["dtype"] in stage.dtypes),
        key=lambda item: lacks(item[1]),
    )
    return name, stage.why_not(**needs)


def find_longest(
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    q: Any,
    k: Any,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Longest:
    """Return the rows of the longest sequence of q, and of k: the caller's, or those of cu_seqlens, checked here."""
    for name, most in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        whole = isinstance(most, (int, np.integer)) and not isinstance(most, bool)
        if most is not None and not (whole and 0 <= most < MAX_ROWS):
            raise TypeError(f"{name} must be a whole number of rows, or None; got {type(most).__name__} {most!r:.40}")
    both_given = max_seqlen_q is not None and max_seqlen_k is not None
    if both_given and device.ON_GPU:
        return int(max_seqlen_q), int(max_seqlen_k)
    longest: list[int] = []
    host = None
    for of, given_cu, a, most in (("q", cu_seqlens_q, q, max_seqlen_q), ("k", cu_seqlens_k, k, max_seqlen_k)):
        if getattr(a, "ndim", 0) != len(PACKED):
            return None, None  # refused later
        if of == "q" or cu_seqlens_k is not cu_seqlens_q:  # one array for both is read only once
            kind = kind_of(given_cu)
            in_place = kind is not None and kind.reads_in_place(given_cu)
            given = given_cu if in_place else as_device_array(f"cu_seqlens_{of}", given_cu)
            host = kind_of(given).to_numpy(given)
        longest.append(longest_of(f"cu_seqlens_{of}", host, of, a.shape[0]))
        if most is not None and longest[-1] > most:
            raise ValueError(f"max_seqlen_{of} = {most}, and the longest sequence of {of} has {longest[-1]} rows")
    return (int(max_seqlen_q), int(max_seqlen_k)) if both_given else (longest[0], longest[1])
