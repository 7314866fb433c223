"""Attention to a prefix that all sequences of a batch share, merged with attention to each sequence's own keys.

The tokens of all sequences are rows of one launch of 14 or, if they are many, of `flash_attention`, so that a tile of
them reads the prefix once; with a cache of its own, each sequence would read it (Juravsky et al. 2024, "Hydragen";
FlashInfer's cascade). The heads that share a head of K and V are rows as well. `flash_attention` gets the prefix in
equal parts, as if each were a sequence, and kernels/14_join.cu merges all.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from helpers import device
from helpers.attention.calls import flash_attention
from helpers.attention.ladder import limits
from helpers.attention.ladder.kinds import as_device_array, as_kind_of, kind_of, on_device
from helpers.attention.ladder.layout import bits
from helpers.attention.passes import Join

# Up to this many rows per KV head, 14 reads the prefix; beyond, flash_attention does, in parts of at least this many
# keys, by tiles of about this many rows. On an H200, 64 and 256 rows were 1.05 to 1.5 times as fast with it; fewer were
# not measured.
ROWS_OF_PARTS, KEYS_OF_A_PART, TILE_ROWS = 32, 256, 128
JOIN = "14_join.cu"
Attend = Callable[[Any, Any, Any], tuple[Any, Any]]
NAMES = ("prefix_k", "prefix_v")
_PLACES = re.compile(r"\b(?:batch|head|q_idx|kv_idx|q_len|kv_len|distance)\b")


def check_prefix(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    prefix_k: Any,
    prefix_v: Any,
    *,
    unbounded: bool,
    score_mod: str | None,
    mask_mod: str | None,
) -> None:
    """Check a prefix against the other arrays of a call, before anything is launched.

    Args:
        unbounded: no window hides keys before a token's own, and no slope depends on how far a key is.

    Raises:
        TypeError, ValueError: as for `flash_attention_with_kvcache`.
    """
    if prefix_k is None or prefix_v is None:
        raise ValueError("prefix_k and prefix_v come together: each key needs its value")
    for name, a in zip(NAMES, (prefix_k, prefix_v), strict=True):
        if not hasattr(a, "shape") or not hasattr(a, "dtype"):
            raise TypeError(f"{name} must be an array; got {type(a).__name__} {a!r:.40}")
        columns = q.shape[3]
        if name == "prefix_v" and k_cache.shape != v_cache.shape:  # V has its own head_dim
            columns = v_cache.shape[3]
        wanted = k_cache.shape[2], columns
        if len(a.shape) != 3 or tuple(a.shape)[1:] != wanted:
            raise ValueError(
                f"{name} has shape {tuple(a.shape)}; (keys, kv_heads, head_dim) is needed, whose last two are "
                f"the heads of the cache and the head_dim of {'q' if columns == q.shape[3] else 'v_cache'}: {wanted}"
            )
        if str(a.dtype) != str(q.dtype):
            raise TypeError(f"{name} is {a.dtype} and q is {q.dtype}: one dtype is needed")
    if len(prefix_k) != len(prefix_v):
        raise ValueError(f"prefix_k has {len(prefix_k)} keys and prefix_v {len(prefix_v)}: each key needs its value")
    if not unbounded:
        raise ValueError(
            "a prefix with a window or alibi_slopes: keys of the prefix would be at other distances in each sequence"
        )
    texts = {"score_mod": score_mod, "mask_mod": mask_mod}
    for name, text in texts.items():
        if text is None or not (place := _PLACES.search(text)):
            continue
        raise ValueError(
            f"{name} uses {place[0]}, which a prefix that all sequences and heads share does not have: with a "
            "prefix it may use score, kv_head and mod_args"
        )


def packed(q: Any, kv_heads: int) -> Any:
    """Copy q, a device array (batch, seq_q, heads, head_dim), to (1, batch seq_q heads / kv_heads, kv_heads, head_dim).

    Each row is a token and one of the heads that share a KV head.
    """
    batch, tokens, heads, head_dim = q.shape
    rows = bits(q).reshape(batch * tokens, kv_heads, heads // kv_heads, head_dim).swapaxes(1, 2)
    return device.cp.ascontiguousarray(rows).reshape(1, -1, kv_heads, head_dim).view(q.dtype)


def join_prefix(
    q: Any,
    prefix_k: Any,
    prefix_v: Any,
    o: Any,
    lse: Any,
    *,
    softmax_scale: float | None = None,
    by_parts: Attend | None = None,
    **functions: Any,
) -> tuple[Any, Any]:
    """Merge attention to a prefix into (o, lse), that to each sequence's own keys. Return both, of q's kind of array.

    Args:
        q: (batch, seq_q, heads, head_dim). prefix_k, prefix_v: (keys, kv_heads, head_dim). o: as q. lse: float32
            (batch, heads, seq_q). by_parts: attention (o, lse) of each row of q to all keys, of device arrays q, k, v,
            by a decoder; None where it cannot do the call. functions: score_mod, mask_mod and mod_args, if there are
            any. The others: as `flash_attention_with_kvcache` takes them.
    """
    kind = kind_of(q)
    given = {"q": q, "prefix_k": prefix_k, "prefix_v": prefix_v, "o": o, "lse": lse}
    with contextlib.ExitStack() as stack:
        if kind is not None:
            stack.enter_context(on_device(kind.device_id(q)) or contextlib.nullcontext())
            stack.enter_context(kind.on_stream_of(q))
            stack.enter_context(kind.graph_memory(q)).append(lse)
        there = {name: as_device_array(name, a) for name, a in given.items()}
        options = {"softmax_scale": softmax_scale, **functions}
        keys, values = (there[name][None] for name in NAMES)
        batch, tokens, heads, head_dim = there["q"].shape
        kv_heads, own_dims = keys.shape[2], keys.shape[-1] != values.shape[-1]
        if by_parts is not None and own_dims:  # only 14 supports a V with another head_dim
            keys, values = map(device.cp.ascontiguousarray, (keys, values))
        in_place = keys.flags.c_contiguous and values.flags.c_contiguous
        in_place &= keys.shape[-1] * keys.dtype.itemsize % 16 == 0
        few = batch * tokens * heads // kv_heads <= ROWS_OF_PARTS
        if by_parts is not None and in_place and (own_dims or few):
            rows = there["q"].reshape(1, batch * tokens, heads, head_dim)
            of_prefix, of_lse = by_parts(rows, keys, values)
        else:
            rows = packed(there["q"], kv_heads)
            parts = parts_of(keys.shape[1], rows.shape[1], kv_heads) if in_place else 1
            keys, values = (a.reshape(parts, a.shape[1] // parts, *a.shape[2:]) for a in (keys, values))
            rows = device.cp.broadcast_to(rows, (parts, *rows.shape[1:]))
            stage = stage_of(rows.dtype, head_dim, functions=bool(functions))
            how = {**options, "return_lse": True, "out_dtype": np.float32, "stage": stage}
            of_prefix, of_lse = flash_attention(rows, keys, values, **how)
        if there["o"].size:
            arrays = {"o": there["o"], "lse": there["lse"], "of_prefix": of_prefix, "of_lse": of_lse}
            Join.launch(arrays, JOIN, None, kv_heads)
        return (o, lse) if kind is not None else tuple(as_kind_of(q, there[name]) for name in ("o", "lse"))


def stage_of(dtype: np.dtype, head_dim: int, *, functions: bool) -> str | None:
    """Return the stage that reads a prefix: hopper if it was faster, else None, so that flash_attention chooses.

    On an H200, a call was 1.02 to 1.27 times as fast by hopper as by flash_mma, with 64 and 256 rows of head_dim 128.
    """
    on_hopper = device.ON_GPU and limits.compute_capability() == 90
    return "hopper" if on_hopper and dtype.itemsize == 2 and 64 < head_dim <= 128 and not functions else None


def parts_of(keys: int, rows: int, kv_heads: int) -> int:
    """Return how many equal parts a prefix is cut into for `flash_attention`, so that they fill the multiprocessors."""
    blocks = max(kv_heads * -(-rows // TILE_ROWS), 1)
    wanted = min(limits.multiprocessors() // blocks, keys // KEYS_OF_A_PART)
    return next((parts for parts in range(wanted, 1, -1) if keys % parts == 0), 1)
