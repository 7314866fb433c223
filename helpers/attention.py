"""Attention for models: the drop-in face of the ladder, with the names of FlashAttention's own interface.

    from helpers.attention import flash_attention, flash_attention_varlen
    o = flash_attention(q, k, v, causal=True)             # (batch, seq, heads, head_dim)

The arrays may be NumPy's, the device's (CuPy's on a GPU), or anything with `__dlpack__`, such as PyTorch's and JAX's
tensors. The output is of q's kind and lies where q lies. A device array is read where it is, whatever its strides, as
long as the words of a row are neighbours: `q.swapaxes(1, 2)` of a (batch, heads, seq, head_dim) array costs nothing.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np

from helpers.device import ON_GPU, cp
from helpers.ladder.stages import LADDER, Stage, mask_window

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
    stage: str | int | None = None,
) -> Any:
    """softmax(softmax_scale * q k^T) v for each head of each batch.

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
        stage: a stage of the ladder, by name or number; without it the last, and fastest, that can do this here.

    Returns:
        The output, of q's shape, dtype and kind of array; with return_lse, (o, lse). A query that sees no key gets 0,
        and lse -inf. A launch with few blocks gets smaller tiles: in another batch, or of another length, the same
        query may differ in the last bits.

    Raises:
        TypeError: no array, a dtype that no stage takes, arguments of the wrong type.
        ValueError: shapes that do not fit each other; a malformed window; a stage that cannot do this: the message
            says why, and which stages can.
    """
    arrays = _arrays(q, k, v, ("batch", "seq", "heads", "head_dim"))
    shape_q, shape_k = arrays[0].shape, arrays[1].shape
    if shape_q[0] != shape_k[0]:
        raise ValueError(f"q has {shape_q[0]} batches and k has {shape_k[0]}: one number is needed")
    if 0 in (*shape_q, *shape_k):
        raise ValueError(f"q has shape {shape_q} and k {shape_k}: no axis may be empty")
    mask_window(window, causal)
    wishes = {"causal": causal, "window": window, "return_lse": return_lse}
    chosen = _choose(stage, *arrays, **wishes)
    return _run(chosen, q, arrays, (0, 2, 1, 3), softmax_scale=softmax_scale, **wishes)


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
    stage: str | int | None = None,
) -> Any:
    """flash_attention of sequences of several lengths, packed one after the other with no padding.

    Sequence i has the tokens cu_seqlens_q[i] to cu_seqlens_q[i + 1] - 1 of q, and so of k and v. A sequence may be
    empty on either side: without keys, its queries get 0 and lse -inf.

    Args:
        q: (tokens, heads, head_dim).
        k, v: (tokens_kv, kv_heads, head_dim).
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32: 0, then the tokens up to the end of each sequence. They are
            read by the host, so that a mistake is an error; a device array is waited for.
        The others: as flash_attention has them; the diagonal of causal and window is each sequence's own.

    Returns:
        The output as q, (tokens, heads, head_dim); with return_lse, (o, lse), lse float32 (heads, tokens).

    Raises:
        TypeError, ValueError: as flash_attention, and for cu_seqlens that are not int32, do not begin at 0, fall, or do
        not end at the number of tokens.
    """
    arrays = _arrays(q, k, v, ("tokens", "heads", "head_dim"))
    cu_q = _cu_seqlens("cu_seqlens_q", cu_seqlens_q, "q", len(arrays[0]))
    cu_k = _cu_seqlens("cu_seqlens_k", cu_seqlens_k, "k", len(arrays[1]))
    if len(cu_q) != len(cu_k):
        raise ValueError(f"cu_seqlens_q tells of {len(cu_q) - 1} sequences and cu_seqlens_k of {len(cu_k) - 1}")
    if 0 in (*arrays[0].shape[1:], *arrays[1].shape[1:]):
        raise ValueError(f"q has shape {arrays[0].shape} and k {arrays[1].shape}: there are no heads, or no head_dim")
    mask_window(window, causal)
    wishes = {"causal": causal, "window": window, "return_lse": return_lse}
    chosen = _choose(stage, *arrays, varlen=True, **wishes)
    return _run(chosen, q, arrays, (1, 0, 2), softmax_scale=softmax_scale, cu_seqlens=(cu_q, cu_k), **wishes)


def _run(chosen: Stage, like: Any, arrays: tuple[Any, ...], heads_first: tuple[int, ...], **options: Any) -> Any:
    """The stage on views whose heads come before the rows; the output in the order and the kind of array that came."""
    q = arrays[0]
    with q.device if ON_GPU else contextlib.nullcontext():
        out = cp.empty(q.shape, dtype=q.dtype).transpose(heads_first) if "strides" in chosen.features else None
        run, result = chosen.prepare(*(a.transpose(heads_first) for a in arrays), out=out, **options)
        run()
        o, lse = result if options["return_lse"] else (result, None)
        o = _as_kind_of(like, o.transpose(heads_first))  # an exchange of two axes undoes itself
        return o if lse is None else (o, _as_kind_of(like, lse))


def _choose(wanted: str | int | None, q: Any, k: Any, v: Any, **wishes: Any) -> Stage:
    """The stage to use. Later stages are faster."""
    asked = {"head_dim": q.shape[-1], "dtype": q.dtype.name, "gqa": q.shape[-2] != k.shape[-2], **wishes}
    reasons = {name: stage.why_not(**asked) for name, stage in LADDER.items()}
    able = [name for name, reason in reasons.items() if reason is None]
    if wanted is None:
        if able:
            return LADDER[able[-1]]
        known = sorted({dtype for stage in LADDER.values() for dtype in stage.dtypes})
        if q.dtype.name not in known:
            raise TypeError(f"q is {q.dtype}; the stages take {', '.join(known)}: q.astype('float32')")
        raise ValueError("no stage can: " + "; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
    name = next((s.name for s in LADDER.values() if wanted in (s.name, s.number) and wanted is not True), None)
    if name is None:
        there = ", ".join(f"{stage.number} {stage.name}" for stage in LADDER.values())
        raise ValueError(f"stage={wanted!r} is none of the ladder; there are: {there}")
    if reasons[name]:
        raise ValueError(f"stage {name} cannot: {reasons[name]}. Stages that can: {', '.join(able) or 'none'}")
    return LADDER[name]


def _arrays(q: Any, k: Any, v: Any, axes: tuple[str, ...]) -> tuple[Any, Any, Any]:
    """q, k and v on the device, and of shapes that fit each other."""
    arrays = tuple(_on_device(name, a) for name, a in (("q", q), ("k", k), ("v", v)))
    form = f"({', '.join(axes)})"
    for name, a in zip("qkv", arrays, strict=True):
        if a.ndim != len(axes):
            raise ValueError(f"{name} has shape {a.shape}; {len(axes)} axes are needed: {form}")
        if a.dtype != arrays[0].dtype:
            raise TypeError(f"{name} is {a.dtype} and q is {arrays[0].dtype}: one dtype for all is needed")
        if ON_GPU and a.device != arrays[0].device:
            raise ValueError(f"{name} lies on {a.device} and q on {arrays[0].device}: one device for all is needed")
    q, k, v = arrays
    if k.shape != v.shape:
        raise ValueError(f"k has shape {k.shape} and v {v.shape}: each key needs its value, of the same head_dim")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"head_dim differs: q has shape {q.shape} and k {k.shape}")
    if k.shape[-2] and q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"{q.shape[-2]} heads of q cannot share {k.shape[-2]} heads of k and v: kv_heads must divide heads ({form})"
        )
    return arrays


def _on_device(name: str, a: Any) -> Any:
    if isinstance(a, cp.ndarray):
        return a
    if isinstance(a, np.ndarray):
        return cp.asarray(a)
    if not hasattr(a, "__dlpack__"):
        raise TypeError(f"{name} is an array of NumPy or the device, or one with __dlpack__; got {type(a).__name__}")
    where = int(a.__dlpack_device__()[0])
    if where not in (_CPU, _CUDA, _CUDA_HOST, _MANAGED):
        raise TypeError(f"{name} lies on a device of DLPack's type {where}; the CPU (1) or a CUDA GPU (2) is needed")
    if where != _CPU and not ON_GPU:
        raise TypeError(f"{name} lies on a GPU, and the kernels run on the CPU engine here: move it to the CPU")
    try:
        return cp.asarray(np.from_dlpack(a)) if where == _CPU else cp.from_dlpack(a)
    except (BufferError, RuntimeError) as error:
        raise TypeError(f"{name}, a {type(a).__name__}, does not come through DLPack: {error}") from error


def _as_kind_of(like: Any, a: Any) -> Any:
    """A device array as the kind of array that `like` is, where it lies."""
    if isinstance(like, cp.ndarray):
        return a
    if isinstance(like, np.ndarray) or int(like.__dlpack_device__()[0]) == _CPU:
        a = cp.asnumpy(a)
    if isinstance(like, np.ndarray):
        return a
    library = sys.modules[type(like).__module__.partition(".")[0]]
    from_dlpack = getattr(library, "from_dlpack", None) or getattr(
        getattr(library, "dlpack", None), "from_dlpack", None
    )
    return from_dlpack(a) if from_dlpack else a


def _cu_seqlens(name: str, given: Any, of: str, tokens: int) -> np.ndarray:
    cu = cp.asnumpy(_on_device(name, given))
    if cu.dtype != np.int32:
        raise TypeError(f"{name} is {cu.dtype}; int32 is needed: {name}.astype('int32')")
    if cu.ndim != 1 or cu.size < 2:
        raise ValueError(f"{name} has shape {cu.shape}; (sequences + 1,) is needed, for one sequence or more")
    if cu[0] != 0:
        raise ValueError(f"{name} begins with {cu[0]}; the first sequence begins at 0")
    falls = np.flatnonzero(np.diff(cu) < 0)
    if falls.size:
        i = int(falls[0])
        raise ValueError(f"{name} falls from {cu[i]} to {cu[i + 1]} at {i + 1}; a sequence cannot end before it begins")
    if cu[-1] != tokens:
        raise ValueError(f"{name} ends at {cu[-1]}, and {of} has {tokens} tokens")
    return cu
