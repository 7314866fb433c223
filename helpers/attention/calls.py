"""Attention for models: one entry point to all stages of the ladder, with the names of FlashAttention's own interface.

    from helpers.attention import flash_attention, flash_attention_backward
    o, lse = flash_attention(q, k, v, causal=True, return_lse=True)  # (batch, seq, heads, head_dim)
    dq, dk, dv = flash_attention_backward(do, q, k, v, o, lse, causal=True)

The arrays may be NumPy's, the device's (CuPy's on a GPU), or anything with `__dlpack__`, such as PyTorch's and JAX's
tensors; for PyTorch's with gradients there is `helpers.torch_attention`. The output is an array of q's kind, on q's
device. A device array is read where it is, whatever its strides, as long as the words of a row are neighbours:
`q.swapaxes(1, 2)` of a (batch, heads, seq, head_dim) array costs nothing.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from helpers import device
from helpers.attention.ladder import LADDER, Stage, backward, backward_of, default_of, forward_of
from helpers.attention.ladder.call import (
    BATCHED,
    MAX_ROWS,
    PACKED,
    check_cu_seqlens,
    check_gradient_arrays,
    check_model_arrays,
    longest_of,
    mask_window,
    softmax_scale_of,
)
from helpers.attention.ladder.contract import Ready
from helpers.attention.ladder.fused import NOTHING, Fused, options_of
from helpers.attention.ladder.kinds import DeviceArrays, TorchTensors, kind_of, kind_of_all, on_device
from helpers.attention.ladder.layout import address, four_axes

_CPU, _CUDA, _CUDA_HOST, _MANAGED = 1, 2, 3, 13  # device types of DLPack


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
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = False,
    rotary_positions: tuple[Any, Any] | None = None,
    stage: str | int | None = None,
) -> Any:
    """softmax(softmax_scale * q k^T + bias) v for each head of each batch, with q and k rotated where that is asked.

    Args:
        q: (batch, seq, heads, head_dim).
        k, v: (batch, seq_kv, kv_heads, head_dim) of q's dtype. kv_heads divides heads: that many heads of q in a row
            share one of k and v (grouped-query attention; with one, multi-query).
        causal: query i sees key j up to i + seq_kv - seq: the last query sees every key (bottom-right alignment, as
            FlashAttention defines it since version 2.1).
        window: (left, right): how many keys before and after that diagonal a query sees; -1 for no limit. With
            causal=True right is 0.
        softmax_scale: 1 / sqrt(head_dim) where it is not given.
        return_lse: also the natural log of the sum of exp(scaled scores), float32 (batch, heads, seq).
        bias: (batch, heads, seq, seq_kv), each axis of that length or 1; leading axes may be left out, as in NumPy's
            broadcasting; read where it is, whatever its strides. Of q's dtype or float32: added to the scaled scores;
            below about -1e37 it counts as -inf. Of bool: True where a query may see a key. (So is PyTorch's attn_mask.)
            Combines with causal and window. Fastest with keys that are neighbours and rows at multiples of 16 bytes.
        alibi_slopes: float32 (heads,) or (batch, heads): -slope * |i + seq_kv - seq - j| is added to the scaled scores
            (Press et al. 2022, "Train Short, Test Long", whose masks are causal; both sides as FlashAttention has it).
        rotary_cos, rotary_sin: (positions, rotary_dim / 2) of q's dtype or float32, for a rotary embedding of the first
            rotary_dim words of each row of q and k (Su et al. 2021, "RoFormer"). Computed in float32 and rounded to
            q's dtype. In half types rotary_dim is a multiple of 16.
        rotary_interleaved: words 2 p and 2 p + 1 are a pair (GPT-J); else p and p + rotary_dim / 2 (GPT-NeoX, Llama).
        rotary_positions: (q_positions, k_positions), int32 of shape (seq,) or (batch, seq), and of (seq_kv,) or
            (batch, seq_kv); None: query i is at i + seq_kv - seq and key j at j. Only those in NumPy arrays are looked
            at: elsewhere a position that is not in the tables counts as the nearest that is.
        stage: a stage of the ladder, by name or number; without it the last, and fastest, that can do this here
            (10 only on a GPU, and not for little work; 11 only with a bias, slopes or a rotary embedding).

    Returns:
        The output, of q's shape, dtype and kind of array; with return_lse, (o, lse). A query that sees no key, or none
        whose bias is above -inf, gets 0, and lse -inf. A launch with few blocks gets smaller tiles: in another batch,
        or of another length, the same query may differ in the last bits.

    Raises:
        TypeError: no array, a dtype that no stage takes, arguments of the wrong type.
        ValueError: shapes that do not fit each other; a malformed window; a stage that cannot do this: the message
            says why, and which stages can.
    """
    beside = options_of(bias, alibi_slopes, rotary_cos, rotary_sin, rotary_interleaved, rotary_positions)
    arrays = q, k, v, *beside.arrays.values()
    kind, key = kind_of_all(*arrays), None
    if kind is not None:
        key = _key(kind, (causal, softmax_scale, return_lse, stage, *beside.key), window, arrays)
        if (known := _known(key)) is not None:
            return known(kind, *arrays)
    wishes = _Wishes(causal, window, softmax_scale, return_lse, stage, beside=beside)
    return _first(kind, key, (q, k, v), BATCHED, wishes)


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
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = False,
    rotary_positions: tuple[Any, Any] | None = None,
    stage: str | int | None = None,
) -> Any:
    """flash_attention of sequences of several lengths, packed one after the other with no padding.

    Sequence i has the tokens cu_seqlens_q[i] to cu_seqlens_q[i + 1] - 1 of q, and so of k and v. A sequence may be
    empty on either side: without keys, its queries get 0 and lse -inf.

    Args:
        q: (tokens, heads, head_dim).
        k, v: (tokens_kv, kv_heads, head_dim).
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32: 0, then the tokens up to the end of each sequence. Without
            max_seqlen_q and max_seqlen_k the host reads them, so that a mistake is an error; a device array is waited
            for.
        max_seqlen_q, max_seqlen_k: at least the rows of the longest sequence of q and of k. With both, the host does
            not read cu_seqlens, so that the call can be captured in a CUDA graph. On a GPU nothing is then known to be
            wrong: with a max_seqlen_q that is too small, rows at the end of a sequence are not written.
        bias: refused: packed sequences have no common (seq, seq_kv).
        alibi_slopes: float32 (heads,) or (sequences, heads).
        rotary_positions: (q_positions, k_positions), int32 (tokens,) and (tokens_kv,); None: in each sequence, query i
            is at i + its keys - its queries, and key j at j. A query before the first key counts as position 0.
        The others: as flash_attention has them; the diagonal of causal and window is each sequence's own.

    Returns:
        The output as q, (tokens, heads, head_dim); with return_lse, (o, lse), lse float32 (heads, tokens).

    Raises:
        TypeError, ValueError: as flash_attention, and for cu_seqlens that are not int32, do not begin at 0, fall, or do
        not end at the number of tokens.
    """
    beside = options_of(bias, alibi_slopes, rotary_cos, rotary_sin, rotary_interleaved, rotary_positions)
    longest = _longest(cu_seqlens_q, cu_seqlens_k, q, k, max_seqlen_q, max_seqlen_k)
    arrays = q, k, v, cu_seqlens_q, cu_seqlens_k, *beside.arrays.values()
    kind, key = kind_of_all(*arrays), None
    if kind is not None:
        lengths = longest if beside.rotary_dim else longest[0]  # the tables must reach as far as the keys
        key = _key(kind, (causal, softmax_scale, return_lse, stage, lengths, *beside.key), window, arrays)
        if (known := _known(key)) is not None:
            return known(kind, *arrays)
    wishes = _Wishes(causal, window, softmax_scale, return_lse, stage, beside=beside)
    return _first(kind, key, (q, k, v), PACKED, wishes, (cu_seqlens_q, cu_seqlens_k), longest)


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
    stage: str | int | None = None,
) -> tuple[Any, Any, Any]:
    """The gradients of sum(do * flash_attention(q, k, v)) with respect to q, k and v.

    Args:
        do: the gradient of the loss with respect to the output, (batch, seq, heads, head_dim), of q's dtype.
        q, k, v, causal, window, softmax_scale: as flash_attention had them.
        o, lse: what flash_attention(..., return_lse=True) returned: (batch, seq, heads, head_dim) of q's dtype, and
            float32 (batch, heads, seq).
        deterministic: the same bits in every run, on the same device. Without it, blocks add to dq in any order.
        stage: a stage of the ladder that computes gradients, by name or number; without it the last that can do this.

    Returns:
        (dq, dk, dv) with the shapes, the dtype and the kind of q, k and v, C-contiguous. Where heads of q share a head
        of k and v, its gradients are summed over them. A query that sees no key has a gradient of 0, and so has a key
        that no query sees.

    Raises:
        TypeError, ValueError: as flash_attention, and for do, o and lse that do not fit q.
    """
    kind, key = kind_of_all(do, q, k, v, o, lse), None
    if kind is not None:
        arrays = do, q, k, v, o, lse
        key = _key(kind, ("backward", causal, softmax_scale, deterministic, stage), window, arrays)
        if (known := _known(key)) is not None:
            return known(kind, *arrays)
    wishes = _Wishes(causal, window, softmax_scale, stage=stage, deterministic=deterministic)
    return _first_backward(kind, key, (do, q, k, v, o, lse), BATCHED, wishes)


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
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    stage: str | int | None = None,
) -> tuple[Any, Any, Any]:
    """flash_attention_backward of sequences of several lengths, packed as flash_attention_varlen has them.

    Args:
        do, q, o: (tokens, heads, head_dim). lse: float32 (heads, tokens).
        k, v: (tokens_kv, kv_heads, head_dim).
        The others: as flash_attention_varlen and flash_attention_backward have them.

    Returns:
        (dq, dk, dv), as flash_attention_backward.

    Raises:
        TypeError, ValueError: as flash_attention_varlen, and for do, o and lse that do not fit q.
    """
    longest = _longest(cu_seqlens_q, cu_seqlens_k, q, k, max_seqlen_q, max_seqlen_k)
    kind, key = kind_of_all(do, q, k, v, o, lse, cu_seqlens_q, cu_seqlens_k), None
    if kind is not None:
        arrays = do, q, k, v, o, lse, cu_seqlens_q, cu_seqlens_k
        key = _key(kind, ("backward", causal, softmax_scale, deterministic, stage, longest), window, arrays)
        if (known := _known(key)) is not None:
            return known(kind, *arrays)
    wishes = _Wishes(causal, window, softmax_scale, stage=stage, deterministic=deterministic)
    return _first_backward(kind, key, (do, q, k, v, o, lse), PACKED, wishes, (cu_seqlens_q, cu_seqlens_k), longest)


# ---- what has been called before


@dataclass(frozen=True)
class _Wishes:
    """The options of a call."""

    causal: bool
    window: tuple[int, int] | None
    softmax_scale: float | None
    return_lse: bool = False
    stage: str | int | None = None
    deterministic: bool = False
    beside: Fused = NOTHING


def _key(
    kind: DeviceArrays | TorchTensors, options: tuple[Any, ...], window: Any, arrays: tuple[Any, ...]
) -> tuple[Hashable, ...]:
    """Everything that a call depends on, except addresses.

    True and 1 are equal as keys, so types belong to it: causal=1 is an error, and stays one after causal=True.
    """
    types = tuple(map(type, options))
    return kind, options, types, window if window is None else repr(window), *map(kind.describe, arrays)


def _known(key: tuple[Hashable, ...]) -> _Known | None:
    """The earlier call with this key; None for a new one, or where an option cannot be a key, and is to be refused."""
    try:
        return _KNOWN.get(key)
    except TypeError:
        return None


class _Known:
    """A call that was checked, planned and compiled before: only its arrays are new."""

    def __init__(
        self, ready: Ready, given: tuple[str, ...], made: Mapping[str, int | tuple[int, ...]], device_id: int
    ) -> None:
        """
        Args:
            given: the names of the arrays of the call, in order.
            made: of what it returns, by name: which of the given it is like, or the shape of float32.
        """
        self._ready, self._made, self._device_id = ready, tuple(made.values()), device_id
        self._names = (*given, *made)
        self._scratch = [(spec.shape, spec.dtype.name) for spec in ready.scratch.values()]
        self._launches = ready.direct((*self._names, *ready.scratch)) if device.ON_GPU else []

    def __call__(self, kind: DeviceArrays | TorchTensors, *given: Any) -> Any:
        """Launch. The arrays are like the first call's: same shapes, strides, dtypes, alignment and device."""
        with on_device(self._device_id):
            like = given[0]
            made = [
                kind.empty_like(given[how]) if isinstance(how, int) else kind.empty(how, "float32", like)
                for how in self._made
            ]
            arrays = [*given, *made]
            if device.ON_GPU:
                arrays += [kind.empty(shape, dtype, like) for shape, dtype in self._scratch]
                addresses, stream = list(map(kind.pointer, arrays)), kind.stream(like)
                for launch in self._launches:
                    launch(addresses, stream)
            else:
                heads_first = _HEADS_FIRST[BATCHED if like.ndim == 4 else PACKED]
                named = zip(self._names, arrays, strict=True)
                views = {
                    name: four_axes(a.transpose(heads_first)) if name in backward.WITH_HEAD_DIM else a
                    for name, a in named
                }
                self._ready.bind(views)()
        return made[0] if len(made) == 1 else tuple(made)


_KNOWN: dict[tuple[Hashable, ...], _Known] = {}
_MOST_KNOWN = 1024  # lengths that change at every call would else fill the memory


def _remember(key: tuple[Hashable, ...], known: _Known) -> None:
    if len(_KNOWN) >= _MOST_KNOWN:
        _KNOWN.clear()
    _KNOWN[key] = known


def forget() -> None:
    """Forget all earlier calls: the next one of each kind is checked and planned again."""
    _KNOWN.clear()


# ---- the first call of its kind

_HEADS_FIRST = {BATCHED: (0, 2, 1, 3), PACKED: (1, 0, 2)}
_CU_SEQLENS = {BATCHED: (), PACKED: ("cu_seqlens_q", "cu_seqlens_k")}


def _first(
    kind: DeviceArrays | TorchTensors | None,
    key: tuple[Hashable, ...] | None,
    given: tuple[Any, Any, Any],
    axes: tuple[str, ...],
    wishes: _Wishes,
    cu_seqlens: tuple[Any, Any] | None = None,
    longest: tuple[int | None, int | None] = (None, None),
) -> Any:
    """Check the call, choose a stage, launch it; and keep what was worked out, if nothing had to be copied."""
    like = given[0]
    with contextlib.ExitStack() as contexts:
        if kind is not None:
            contexts.enter_context(on_device(kind.device_id(like)))
            contexts.enter_context(kind.on_stream_of(like))
        arrays = tuple(_on_device(name, a, kind) for name, a in zip("qkv", given, strict=True))
        q, k, _ = arrays
        if kind is None and device.ON_GPU:
            contexts.enter_context(q.device)
        check_model_arrays(*arrays, axes=axes)
        cu, dense = _cu_seqlens(cu_seqlens, kind)
        key = key if dense else None
        beside = _beside_on_device(wishes.beside, kind, q)
        limits = mask_window(wishes.window, wishes.causal)
        chosen = _choose(wishes, q, k, varlen=cu is not None)
        scale = softmax_scale_of(wishes.softmax_scale, q.shape[-1])
        ours = kind or kind_of(q)
        out, lse_shape = None, _lse_shape(q, axes)
        lse = ours.empty(lse_shape, "float32", like if kind else q) if wishes.return_lse else None
        if q.size == 0:  # packed sequences without a token
            out = ours.empty_like(like if kind else q)
        else:
            views = [a.transpose(_HEADS_FIRST[axes]) for a in arrays]
            in_place = "strides" in chosen.features
            out = ours.empty_like(like if kind else q) if in_place else None
            o = ours.array(out).transpose(_HEADS_FIRST[axes]) if in_place else device.cp.empty(views[0].shape, q.dtype)
            ready, held = chosen.ready(
                *(*views, o, None if lse is None else ours.array(lse), cu, longest[0]),
                softmax_scale=scale,
                window=limits,
                beside=beside,
                keys=longest[1],
            )
            ready.bind(held)()
            there = all(address(held[name]) == address(a) for name, a in beside.arrays.items())  # none was copied
            if key is not None and in_place and there and all(chosen.reads(a) for a in views):
                made = {"o": 0, **({"lse": lse_shape} if wishes.return_lse else {})}
                names = ("q", "k", "v", *_CU_SEQLENS[axes], *beside.arrays)
                _remember(key, _Known(ready, names, made, kind.device_id(like)))
            if out is None:
                out = o.transpose(_HEADS_FIRST[axes])  # an exchange of two axes undoes itself
                if kind is not None and not isinstance(like, device.cp.ndarray):
                    out = _as_kind_of(like, out)
        if kind is not None:
            return out if lse is None else (out, lse)
        out = _as_kind_of(like, out)
        return out if lse is None else (out, _as_kind_of(like, lse))


def _first_backward(
    kind: DeviceArrays | TorchTensors | None,
    key: tuple[Hashable, ...] | None,
    given: tuple[Any, ...],
    axes: tuple[str, ...],
    wishes: _Wishes,
    cu_seqlens: tuple[Any, Any] | None = None,
    longest: tuple[int, int] | None = None,
) -> tuple[Any, Any, Any]:
    """As `_first`, for the gradients."""
    with contextlib.ExitStack() as contexts:
        if kind is not None:
            contexts.enter_context(on_device(kind.device_id(given[1])))
            contexts.enter_context(kind.on_stream_of(given[1]))
        names = ("do", "q", "k", "v", "o", "lse")
        arrays = tuple(_on_device(name, a, kind) for name, a in zip(names, given, strict=True))
        do, q, k, v, o, lse = arrays
        if kind is None and device.ON_GPU:
            contexts.enter_context(q.device)
        check_model_arrays(q, k, v, axes)
        check_gradient_arrays(do, q, o, lse, _lse_shape(q, axes))
        for name, a in (("do", do), ("o", o), ("lse", lse)):
            if device.ON_GPU and a.device != q.device:
                raise ValueError(f"{name} is on {a.device} and q on {q.device}: one device for all is needed")
        cu, dense = _cu_seqlens(cu_seqlens, kind)
        limits = mask_window(wishes.window, wishes.causal)
        chosen = _choose(wishes, q, k, varlen=cu is not None, direction="backward")
        scale = softmax_scale_of(wishes.softmax_scale, q.shape[-1])
        ours = kind or kind_of(q)
        gradients = tuple(ours.empty_like(a) for a in (given[1:4] if kind else (q, k, v)))
        if q.size == 0 or k.size == 0:  # packed sequences without a token of q, or of k: nothing depends on them
            for a in gradients:
                ours.array(a)[...] = 0
        else:
            views = [a.transpose(_HEADS_FIRST[axes]) for a in (do, q, k, v, o)]
            outputs = [ours.array(a).transpose(_HEADS_FIRST[axes]) for a in gradients]
            ready, held = backward.ready(
                chosen,
                *(*views, lse, *outputs, cu, longest),
                softmax_scale=scale,
                window=limits,
                deterministic=wishes.deterministic,
            )
            ready.bind(held)()
            if key is not None and dense and lse.flags.c_contiguous and all(chosen.reads(a) for a in views):
                made = {"dq": 1, "dk": 2, "dv": 3}
                _remember(key, _Known(ready, (*names, *_CU_SEQLENS[axes]), made, kind.device_id(given[1])))
        if kind is not None:
            return gradients
        return tuple(_as_kind_of(like, a) for like, a in zip(given[1:4], gradients, strict=True))


def _beside_on_device(beside: Fused, kind: DeviceArrays | TorchTensors | None, q: Any) -> Fused:
    """The same with device arrays, on q's device. NumPy's stay until their values have been looked at."""
    if not beside.arrays:
        return beside
    arrays = {name: a if type(a) is np.ndarray else _on_device(name, a, kind) for name, a in beside.arrays.items()}
    for name, a in arrays.items():
        if device.ON_GPU and not isinstance(a, np.ndarray) and a.device != q.device:
            raise ValueError(f"{name} is on {a.device} and q on {q.device}: one device for all is needed")
    return Fused(arrays, beside.interleaved).on_device()


def _lse_shape(q: Any, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Of the log-sum-exp: (batch, heads, seq), or (heads, tokens)."""
    return tuple(q.shape[axis] for axis in _HEADS_FIRST[axes][:-1])


def _cu_seqlens(
    given: tuple[Any, Any] | None, kind: DeviceArrays | TorchTensors | None
) -> tuple[tuple[Any, Any] | None, bool]:
    """cu_seqlens_q and cu_seqlens_k as device arrays; and whether they were contiguous."""
    if given is None:
        return None, True
    cu = tuple(_on_device(f"cu_seqlens_{of}", a, kind) for of, a in zip("qk", given, strict=True))
    for of, given_cu in zip("qk", cu, strict=True):
        check_cu_seqlens(f"cu_seqlens_{of}", given_cu)
    dense = all(given_cu.flags.c_contiguous for given_cu in cu)
    if not dense:  # a kernel gets a pointer and no stride
        cu = tuple(map(device.cp.ascontiguousarray, cu))
    if len(cu[0]) != len(cu[1]):
        raise ValueError(
            f"cu_seqlens_q describes {len(cu[0]) - 1} sequences and cu_seqlens_k describes {len(cu[1]) - 1}"
        )
    return cu, dense


def _choose(wishes: _Wishes, q: Any, k: Any, *, varlen: bool, direction: str = "forward") -> Stage:
    """The stage that was asked for, or the one for calls that name none."""
    if not isinstance(wishes.deterministic, (bool, np.bool_)):
        got = f"{type(wishes.deterministic).__name__} {wishes.deterministic!r:.40}"
        raise TypeError(f"deterministic is True or False; got {got}")
    asked = {
        "head_dim": q.shape[-1],
        "dtype": q.dtype.name,
        "gqa": q.shape[-2] != k.shape[-2],
        "varlen": varlen,
        "causal": wishes.causal,
        "window": wishes.window,
        "return_lse": wishes.return_lse,
        "deterministic": wishes.deterministic,
        **wishes.beside.asked,
    }
    stages = (backward_of if direction == "backward" else forward_of)(LADDER)
    wanted = wishes.stage
    if wanted is None:
        if (stage := default_of(stages, q.shape[-3], math.prod(q.shape[:-1]), **asked)) is not None:
            return stage
        known = sorted({dtype for stage in stages.values() for dtype in stage.dtypes})
        if q.dtype.name not in known:
            raise TypeError(f"q is {q.dtype}; the stages take {', '.join(known)}: q.astype('float32')")
        reasons = (f"{name}: {stage.why_not(**asked)}" for name, stage in stages.items())
        raise ValueError("no stage can: " + "; ".join(reasons))
    named = [s for s in stages.values() if wanted in (s.name, s.number) and wanted is not True]
    stage = next((s for s in reversed(named) if s.why_not(**asked) is None), named[-1] if named else None)
    if stage is None:
        there = ", ".join(f"{stage.number} {stage.name}" for stage in stages.values())
        raise ValueError(f"stage={wanted!r} is not in the ladder, which has: {there}")
    if reason := stage.why_not(**asked):
        able = ", ".join(name for name, other in stages.items() if other.why_not(**asked) is None)
        raise ValueError(f"stage {stage.name} cannot: {reason}. Stages that can: {able or 'none'}")
    return stage


def _longest(
    cu_seqlens_q: Any, cu_seqlens_k: Any, q: Any, k: Any, max_seqlen_q: int | None, max_seqlen_k: int | None
) -> tuple[int | None, int | None]:
    """Rows of the longest sequence of q, and of k: as the caller says, or from the numbers, which are then checked."""
    for name, most in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        whole = isinstance(most, (int, np.integer)) and not isinstance(most, bool)
        if most is not None and not (whole and 0 <= most < MAX_ROWS):
            raise TypeError(f"{name} is a whole number of rows, or None; got {type(most).__name__} {most!r:.40}")
    told = max_seqlen_q is not None and max_seqlen_k is not None
    if told and device.ON_GPU:
        return int(max_seqlen_q), int(max_seqlen_k)
    longest: list[int] = []
    host = None
    for of, given_cu, a, most in (("q", cu_seqlens_q, q, max_seqlen_q), ("k", cu_seqlens_k, k, max_seqlen_k)):
        if getattr(a, "ndim", 0) != len(PACKED):
            return None, None  # which is refused further on
        if of == "q" or cu_seqlens_k is not cu_seqlens_q:  # one array for both is read once
            kind = kind_of(given_cu)
            given = _on_device(f"cu_seqlens_{of}", given_cu, None) if kind is None else given_cu
            host = (kind or kind_of(given)).host(given)
        longest.append(longest_of(f"cu_seqlens_{of}", host, of, a.shape[0]))
        if most is not None and longest[-1] > most:
            raise ValueError(f"max_seqlen_{of} = {most}, and the longest sequence of {of} has {longest[-1]} rows")
    return (int(max_seqlen_q), int(max_seqlen_k)) if told else (longest[0], longest[1])


def _on_device(name: str, a: Any, kind: DeviceArrays | TorchTensors | None) -> Any:
    """A device array that shares a's memory, where a is of a known kind or on a GPU; otherwise a copy on the device."""
    if kind is not None:
        return kind.array(a)
    if isinstance(a, device.cp.ndarray):
        return a
    if isinstance(a, np.ndarray):
        return device.cp.asarray(a)
    if getattr(a, "requires_grad", False) is True:
        raise TypeError(
            f"{name} requires grad, and this function keeps nothing for gradients: use "
            f"helpers.torch_attention.flash_attention, or give {name}.detach()"
        )
    if not hasattr(a, "__dlpack__"):
        raise TypeError(f"{name} is an array of NumPy or the device, or one with __dlpack__; got {type(a).__name__}")
    where = int(a.__dlpack_device__()[0])
    if where not in (_CPU, _CUDA, _CUDA_HOST, _MANAGED):
        raise TypeError(f"{name} is on a device of DLPack's type {where}; the CPU (1) or a CUDA GPU (2) is needed")
    if where != _CPU and not device.ON_GPU:
        raise TypeError(f"{name} is on a GPU, and the kernels run on the CPU engine here: move it to the CPU")
    try:
        return device.cp.asarray(np.from_dlpack(a)) if where == _CPU else device.cp.from_dlpack(a)
    except (BufferError, RuntimeError) as error:
        raise TypeError(f"{name}, a {type(a).__name__}, does not come through DLPack: {error}") from error


def _as_kind_of(like: Any, a: Any) -> Any:
    """A device array as the kind of array that `like` is, on the device where it is."""
    if isinstance(like, device.cp.ndarray):
        return a
    if isinstance(like, np.ndarray) or int(like.__dlpack_device__()[0]) == _CPU:
        a = device.cp.asnumpy(a)
    if isinstance(like, np.ndarray):
        return a
    library = sys.modules[type(like).__module__.partition(".")[0]]
    from_dlpack = getattr(library, "from_dlpack", None) or getattr(
        getattr(library, "dlpack", None), "from_dlpack", None
    )
    return from_dlpack(a) if from_dlpack else a
