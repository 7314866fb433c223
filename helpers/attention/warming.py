"""Compile what later calls need before the first of them.

from helpers.attention import warm_up
warm_up(32, 128, kv_heads=8, dtype="bfloat16", causal=True)
warm_up(32, 128, kv_heads=8, dtype="bfloat16", decoding=True, paged=True, cache_dtype="float8_e4m3fn")
warm_up(32, 128, kv_heads=8, dtype="bfloat16", causal=True, decoding=True, tree=True)
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from helpers.attention import calls, kernel, shared_prefix
from helpers.attention.decoders import TILE_ROWS
from helpers.attention.decoding import check as check_decoding
from helpers.attention.ladder import Stage, limits
from helpers.attention.ladder.call import (
    CU_SEQLENS,
    AttentionOptions,
    BackwardOptions,
    DecodeOptions,
    ForwardOptions,
    mask_window,
)
from helpers.attention.ladder.extras import ROTARY_TABLES
from helpers.attention.ladder.kinds import E4M3
from helpers.attention.ladder.launches import C_NAMES
from helpers.attention.ladder.layout import Spec, dense
from helpers.attention.ladder.plan import CompiledPlan
from helpers.attention.ladder.score_mod import parse_score_mod
from helpers.attention.passes import join_sizes
from helpers.attention.scalars import check_flags, whole_number
from helpers.engine.cuda_source.signatures import dtype_of

Jobs = dict[tuple[Hashable, ...], Callable[[], object]]
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
    decoding: bool = False,
    paged: bool = False,
    page_size: int = TILE_ROWS,
    cache_dtype: str | None = None,
    v_head_dim: int | None = None,
    rotary_dim: int = 0,
    tree: bool = False,
    prefix: bool = False,
    score_mod: str | None = None,
    mask_mod: str | None = None,
    mod_args: Mapping[str, Any] | None = None,
    stage: str | int | None = None,
) -> int:
    """Compile what calls of this kind need, of any lengths, in parallel: for a server, before its first request.

    A first call would wait for the compiler, for seconds. CuPy keeps the kernels on disk, so that the next process
    loads them. Calls with a bias, slopes or sinks are not covered, nor, except in decoding, those with a rotary
    embedding or functions of scores.

    Args:
        heads, kv_heads, head_dim: heads of q, of k and v (by default as many), elements of a row.
        dtype: q's, by name, float8_e4m3fn too, whose results are bfloat16. gradients: also what
            flash_attention_backward needs. packed: calls of flash_attention_varlen.
        decoding: what flash_attention_with_kvcache needs, for any number of sequences and of new tokens, in place of
            what flash_attention needs. paged: its cache is in pages; all page_sizes that are powers of two have the
            same kernels, and all others have others. cache_dtype: the cache's, if it is not q's. v_head_dim: V's, if it
            is not K's. rotary_dim: of a rotary embedding by tables in float32, whose pairs are not interleaved. tree:
            calls with a tree, in place of those without. prefix: also what one that all sequences share needs.
            score_mod, mask_mod, mod_args: of the calls; of arrays the dtypes count. The others: as flash_attention and
            flash_attention_backward take them; stage is the forward's or the decoder's.

    Returns:
        How many kernel files, each with one set of sizes, were compiled, or existed already.

    Raises:
        TypeError, ValueError: as for flash_attention or flash_attention_with_kvcache; an option of the other one.
    """
    heads, head_dim = whole_number("heads", heads, least=1), whole_number("head_dim", head_dim, least=1)
    kv_heads = heads if kv_heads is None else whole_number("kv_heads", kv_heads, least=1)
    check_flags(gradients=gradients, packed=packed, deterministic=deterministic, decoding=decoding, paged=paged)
    check_flags(tree=tree, prefix=prefix)
    mask_window(window, causal)
    if dtype not in (*C_NAMES, E4M3):
        raise TypeError(f"dtype = {dtype!r:.40}; there are {', '.join((*C_NAMES, E4M3))}, by name")
    of_q = dtype_of("uint8" if dtype == E4M3 else dtype)
    of_attention = {"gradients": gradients, "packed": packed, "deterministic": deterministic}
    of_decoding = {"paged": paged, "cache_dtype": cache_dtype, "v_head_dim": v_head_dim, "rotary_dim": rotary_dim}
    functions = {"score_mod": score_mod, "mask_mod": mask_mod, "mod_args": mod_args}
    of_decoding |= {"tree": tree, "prefix": prefix, **functions}
    for name, value in (of_attention if decoding else of_decoding).items():
        if value:
            raise ValueError(f"{name}={value} needs decoding={not decoding}")
    if decoding:
        if cache_dtype not in (None, dtype, E4M3):
            raise TypeError(f"cache_dtype = {cache_dtype!r:.40}; {dtype} or {E4M3} is needed")
        page = whole_number("page_size", page_size, least=1) if paged else 0
        columns = head_dim, whole_number("v_head_dim", head_dim if v_head_dim is None else v_head_dim, least=1)
        of_cache = dtype_of("uint8") if cache_dtype == E4M3 else of_q
        pairs = whole_number("rotary_dim", rotary_dim, least=0) // 2
        mod, of_mod = parse_score_mod(score_mod, mask_mod, mod_args)
        options = DecodeOptions(window, causal, stage=stage, mod=mod and mod.with_mask_as_score())
        more = {name: Spec.of(a) for name, a in of_mod.items()}
        jobs = _decoder_jobs(options, heads, kv_heads, columns, (of_q, of_cache), page, pairs, more, tree=tree)
        if prefix:
            jobs |= _prefix_jobs(ForwardOptions(mod=mod, out="float32"), heads, kv_heads, columns, of_q, more)
    else:
        wanted = [ForwardOptions(window, causal, stage=stage)]
        wanted += [BackwardOptions(window, causal, deterministic=deterministic)] * gradients
        jobs = _attention_jobs(wanted, heads, kv_heads, head_dim, of_q, packed)
    kernel.side_by_side([*jobs.values()])
    return len(jobs)


def _add(jobs: Jobs, stage: Stage, call: Any) -> None:
    """Add the build of a call, which has rows and keys."""
    sizes = stage.sizes_for(call)
    jobs.setdefault((stage.name, *sizes.items()), functools.partial(CompiledPlan, stage, call, sizes))


def _attention_jobs(
    wanted: Sequence[AttentionOptions], heads: int, kv_heads: int, head_dim: int, dtype: np.dtype, packed: bool
) -> Jobs:
    """List the builds of calls with these options: which stage, with which sizes, depends on the lengths."""
    jobs: Jobs = {}
    columns = calls.whole_chunks(head_dim, dtype.itemsize)
    shares = (1, max(_SEQUENCES)) if packed else (1,)  # the longest sequence is this many times as long as the mean
    for sequences, rows, keys, share in itertools.product(_SEQUENCES, _LENGTHS, _LENGTHS, shares):
        lead = (sequences * rows,) if packed else (sequences, rows)
        kv_lead = (sequences * keys,) if packed else (sequences, keys)
        q = dense((*lead, heads, columns), dtype)
        k = dense((*kv_lead, kv_heads, columns), dtype)
        lse = dense((*lead[:-1], heads, lead[-1]), np.dtype(np.float32))
        cu_seqlens = dict.fromkeys(CU_SEQLENS, dense((sequences + 1,), np.dtype(np.int32))) if packed else {}
        for options in wanted:
            specs = {"q": q, "k": k, "v": k, **cu_seqlens}
            if isinstance(options, BackwardOptions):
                specs = {"do": q, **specs, "o": q, "lse": lse}
            calls.check(specs)
            longest = (share * rows, share * keys) if packed else (None, None)
            _, chosen, _, call = calls.of_shapes(specs, options, longest)
            _add(jobs, chosen, call)
    return jobs


def _decoder_jobs(
    options: DecodeOptions,
    heads: int,
    kv_heads: int,
    columns: tuple[int, int],
    dtypes: tuple[np.dtype, np.dtype],
    page: int,
    pairs: int,
    more: Mapping[str, Spec],
    *,
    tree: bool,
) -> Jobs:
    """List the builds of a decoder: its sizes depend on the new tokens, and on whether a block has many units.

    Args:
        columns: of K and of V. dtypes: of q and of the cache. page: keys of one, or 0. pairs: that are rotated, or 0.
            more: arrays of functions of scores.
    """
    jobs: Jobs = {}
    (of_q, of_cache), (of_k, _) = dtypes, columns
    many = -(-2 * limits.multiprocessors() // kv_heads)
    for sequences, tokens in itertools.product((1, many), range(1, TILE_ROWS + 2)):
        specs = {"q": Spec.dense((sequences, tokens, heads, of_k), of_q)}
        for name, n in zip("kv", columns, strict=True):
            specs[f"{name}_cache"] = Spec.dense((sequences, page or TILE_ROWS, kv_heads, n), of_cache)
            if pairs:
                specs[name] = Spec.dense((sequences, tokens, kv_heads, n), of_q)
        specs["cache_seqlens"] = Spec.dense((sequences,), np.int32)
        if page:
            specs["block_table"] = Spec.dense((sequences, -(-TILE_ROWS // page)), np.int32)
        specs |= {name: Spec.dense((1, pairs), np.float32) for name in ROTARY_TABLES if pairs}
        specs |= {**more, **({"tree": Spec.dense((tokens,), np.int32)} if tree else {})}
        decoder, call, _ = check_decoding(specs, options)
        _add(jobs, decoder, call)
    return jobs


def _prefix_jobs(
    options: ForwardOptions,
    heads: int,
    kv_heads: int,
    columns: tuple[int, int],
    dtype: np.dtype,
    more: Mapping[str, Spec],
) -> Jobs:
    """List the builds for a prefix beyond a decoder's: flash_attention's of rows as `packed` has them, and the join.

    Args:
        options: whose functions have a mask. columns: of K and of V. more: arrays of functions of scores.
    """
    o, (of_k, of_v) = C_NAMES[dtype.name], columns
    jobs: Jobs = {}
    for of_prefix in (o, "float"):
        name, sizes = f"join_prefix<{o}, {of_prefix}>", join_sizes(of_v)
        jobs["join", name] = functools.partial(kernel.load, shared_prefix.JOIN, name, defines=sizes)
    if of_k != of_v:  # 14 reads all of these
        return jobs
    width = calls.whole_chunks(of_k, dtype.itemsize)
    options = options._replace(stage=shared_prefix.stage_of(dtype, of_k, functions=options.mod is not None))
    for tokens, keys in itertools.product(_LENGTHS, _LENGTHS):
        rows = tokens * (heads // kv_heads)
        parts = shared_prefix.parts_of(keys, rows, kv_heads)
        q, k = (Spec.dense((parts, n, kv_heads, width), dtype) for n in (rows, keys // parts))
        specs = {"q": q, "k": k, "v": k, **more}
        calls.check(specs)
        _, chosen, _, call = calls.of_shapes(specs, options, (None, None))
        _add(jobs, chosen, call)
    return jobs
