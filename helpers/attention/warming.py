"""Compile what later calls need before the first of them.

from helpers.attention import warm_up
warm_up(32, 128, kv_heads=8, dtype="bfloat16", causal=True)
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable
from typing import Any

import numpy as np

from helpers.attention import calls, kernel
from helpers.attention.ladder.call import CU_SEQLENS, BackwardOptions, ForwardOptions, mask_window
from helpers.attention.ladder.kinds import E4M3
from helpers.attention.ladder.launches import C_NAMES
from helpers.attention.ladder.layout import dense
from helpers.attention.ladder.plan import CompiledPlan
from helpers.attention.scalars import check_flags, whole_number
from helpers.engine.cuda_source.signatures import dtype_of

_LENGTHS = (1, 64, 256, 1024, 4096, 16384)
_SEQUENCES = (1, 4, 32)


def warm_up(
    heads: int,
    head_dim: int,
    *,
    kv_heads: int | None = None,
    dtype: str = "float16",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    gradients: bool = False,
    packed: bool = False,
    deterministic: bool = False,
    stage: str | int | None = None,
) -> int:
    """Compile what calls of this kind need, of any lengths, side by side: for a server, before its first request.

    What a first call takes is the compiler's time, seconds in all. CuPy keeps the kernels on disk, so that the next
    process loads them. Calls with a bias, slopes or a rotary embedding are not among these, nor are those of
    flash_attention_with_kvcache.

    Args:
        heads, kv_heads, head_dim: of q, of k and v (as many as q where it is not given), words of a row.
        dtype: q's, by name, float8_e4m3fn too, whose results are bfloat16. gradients: also what
            flash_attention_backward needs. packed: as flash_attention_varlen has them.
        The others: as flash_attention and flash_attention_backward have them; stage is the forward's.

    Returns:
        How many kernel files, each with one set of sizes, were compiled, or were there already.

    Raises:
        TypeError, ValueError: as flash_attention.
    """
    heads, head_dim = whole_number("heads", heads, least=1), whole_number("head_dim", head_dim, least=1)
    kv_heads = heads if kv_heads is None else whole_number("kv_heads", kv_heads, least=1)
    check_flags(gradients=gradients, packed=packed, deterministic=deterministic)
    mask_window(window, causal)
    if dtype not in (*C_NAMES, E4M3):
        raise TypeError(f"dtype = {dtype!r:.40}; there are {', '.join((*C_NAMES, E4M3))}, by name")
    of_q = dtype_of("uint8" if dtype == E4M3 else dtype)
    jobs: dict[tuple[Hashable, ...], Any] = {}
    columns = calls.whole_chunks(head_dim, of_q.itemsize)
    shares = (1, max(_SEQUENCES)) if packed else (1,)  # the longest sequence is so many times as long as the mean
    for sequences, rows, keys, share in itertools.product(_SEQUENCES, _LENGTHS, _LENGTHS, shares):
        lead = (sequences * rows,) if packed else (sequences, rows)
        kv_lead = (sequences * keys,) if packed else (sequences, keys)
        q = dense((*lead, heads, columns), of_q)
        k = dense((*kv_lead, kv_heads, columns), q.dtype)
        lse = dense((*lead[:-1], heads, lead[-1]), np.dtype(np.float32))
        cu_seqlens = dict.fromkeys(CU_SEQLENS, dense((sequences + 1,), np.dtype(np.int32))) if packed else {}
        wanted = [(ForwardOptions(window, causal, stage=stage), {"q": q, "k": k, "v": k})]
        if gradients:
            backward = {"do": q, "q": q, "k": k, "v": k, "o": q, "lse": lse}
            wanted.append((BackwardOptions(window, causal, deterministic=deterministic), backward))
        for options, specs in wanted:
            specs |= cu_seqlens
            calls.check(specs)
            longest = (share * rows, share * keys) if packed else (None, None)
            _, chosen, _, call = calls.of_shapes(specs, options, longest)
            assert call is not None  # there are rows and keys
            sizes = chosen.sizes_for(call)
            jobs.setdefault((chosen.name, *sizes.items()), functools.partial(CompiledPlan, chosen, call, sizes))
    kernel.side_by_side([*jobs.values()])
    return len(jobs)
