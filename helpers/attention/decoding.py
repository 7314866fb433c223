"""Decoding: a few new tokens of each sequence attend to its cache of keys and values, which may be in pages.

    from helpers.attention import flash_attention_with_kvcache
    o = flash_attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, block_table=table, k=k, v=v)

A launch's number of blocks follows from shapes alone; the device computes from the lengths which keys each block gets.
The host reads lengths only to check them: see `checked`. The kernels and their launches are in decoders.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from helpers import device
from helpers.attention.cache_slots import check_slots
from helpers.attention.decoders import DECODERS, HEAD_DIMS, OTHER_DIMS, SMALLEST_TILE, SPLIT_KV, DecodeCall
from helpers.attention.ladder import Stage, limits
from helpers.attention.ladder.call import (
    MAX_ROWS,
    DecodeOptions,
    check_same_device,
    check_same_dtype,
    mask_window,
    softmax_scale_of,
)
from helpers.attention.ladder.extras import ROTARY_TABLES, check_one_form, check_sinks, check_slopes, check_table
from helpers.attention.ladder.kinds import kind_of
from helpers.attention.ladder.layout import Addresses, Spec, check_writable, dense, share_memory, titles
from helpers.attention.ladder.plan import CompiledPlan
from helpers.attention.ladder.score_mod import BlockMask, bind_to_call, parse_score_mod
from helpers.attention.run import Call, Change, Kind, Output, Plan, changed, compile_plan, copies, lay_out, run
from helpers.attention.scalars import check_flags, whole_number
from helpers.attention.shared_prefix import check_prefix, join_prefix


def flash_attention_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    cache_seqlens: Any,
    block_table: Any = None,
    k: Any = None,
    v: Any = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
    prefix_k: Any = None,
    prefix_v: Any = None,
    tree: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = False,
    score_mod: str | None = None,
    mask_mod: str | BlockMask | None = None,
    mod_args: Mapping[str, Any] | None = None,
    stage: str | None = None,
    checked: bool | None = None,
) -> Any:
    """Attend from the newest tokens of each sequence to all of its tokens, like FlashAttention's function of this name.

    Args:
        q: (batch, seq_q, heads, head_dim), float32, float16 or bfloat16; head_dim up to 256. Its seq_q tokens are the
            last of the sequence, so the last one is at the sequence's last key.
        k_cache, v_cache: (batch, seq_max, kv_heads, head_dim) of q's dtype, or with block_table (pages, page_size,
            kv_heads, head_dim). Read in place: rows contiguous, at multiples of 16 bytes. kv_heads divides heads.
            v_cache may have another head_dim than q and k_cache, such as 128 with 192: the output's and v's. Elements
            after a sequence's end may be anything, including NaN. Columns of a wider cache are not read; a head_dim
            whose rows are not a multiple of 16 bytes needs one that is 64, 128 or 256 wide, to which each call writes k
            and v followed by zeros, which all keys need. With q in 16 bits it may hold e4m3, as float8_e4m3fn of
            PyTorch or as uint8 bytes, for compute capability 8.9: half the bytes, and on an H200 1.5 to 1.9 times as
            fast where sequences have many keys of 128 numbers.
        k_descale, v_descale: float32 (batch, kv_heads), for a cache in e4m3: the factor of a sequence and head, by
            default 1. New tokens' k and v are divided by it and rounded to e4m3, saturating at 448.
        cache_seqlens: (batch,) int32: how many keys of each sequence are in the cache, without those of k: at least 0,
            and with those of k no more than fit into the cache. Unchecked, a kernel clamps it to that range: it never
            leaves the cache, and new tokens for a full cache replace its last keys. This, block_table and tree may be
            int64; then each call makes a copy.
        block_table: (batch, pages of a sequence) int32: in which page keys i * page_size to (i + 1) * page_size - 1
            are. Entries that no key needs are not read; all others must be existing pages. A page row that is written
            must belong to a single sequence. Unchecked, a page number out of range accesses memory outside the cache,
            and if two sequences write the same row, either may win.
        k, v: (batch, seq_q, kv_heads, head_dim): keys and values of the new tokens, written into the cache by this
            launch at cache_seqlens to cache_seqlens + seq_q - 1, and then attended to. None: they are in the cache
            already.
        causal: tokens do not see later ones.
        window: (left, right): how many keys before and after its own a token sees; -1 for no limit.
        softmax_scale: by default 1 / sqrt(head_dim).
        num_splits: how many parts each sequence is cut into, at most; 0: all of the work is cut into equal stretches,
            one for each multiprocessor, whatever the lengths (Stream-K). On an H200, 1 was 1.02 times as fast for 8
            sequences of 8192 or 65536 keys with 8 heads of K and V, which are 64 blocks.
        return_lse: also the natural log of the sum of exp(scaled scores), float32 (batch, heads, seq_q).
        prefix_k, prefix_v: (keys, kv_heads, head_dim): keys and values before those of every sequence, such as a prompt
            that all share; cache_seqlens does not count them. One call of flash_attention reads them once for the
            tokens of all sequences, and its result is merged with that of the cache, which is rounded to q's dtype
            before. Neither window nor slopes then, and no score_mod that uses head or positions. These are two or three
            more launches: on an H200, 3.5 times as fast for 16 sequences and 8192 keys of bfloat16 in common, 9.1 times
            for 64. A block table that names the same pages for all sequences needs no prefix, and has 2.1 and 2.3
            times.
        tree: (seq_q,) or (batch, seq_q) int32, for drafts that form a tree: the token, of the seq_q, that each one
            follows, which comes before it; -1 for the last token before all of them. A token sees its ancestors and no
            other drafts. Without it each follows the one before. Needs causal=True; neither window nor slopes. The
            caller rotates by the tree's positions, and moves accepted keys together in the cache. Unchecked, an entry
            that is not before its token counts as the token before.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), for a rotary embedding of q and k, which a launch before
            rotates into copies: token i of a sequence is at cache_seqlens + i, which the tables must have. Unchecked,
            one that they lack counts as their last. Needs k and v; neither a prefix nor a tree. The form of the tables,
            and rotary_interleaved: see `helpers.attention.flash_attention`.
        alibi_slopes, sinks, score_mod, mask_mod, mod_args: see `helpers.attention.flash_attention`; a mask_mod is asked
            for each score.
        stage: one of DECODERS; by default the last.
        checked: True: the host reads cache_seqlens, block_table and tree before the launch and refuses invalid ones. On
            a GPU this waits for the device, so it is for tests and debugging, and the call cannot be captured in a CUDA
            graph. None: True on the CPU engine only.

    Returns:
        The output, of q's shape, dtype and kind of array; with return_lse, (o, lse). A token that sees no key gets 0,
        and lse -inf.

    Raises:
        TypeError: an argument is not an array, or has a dtype or type that is not accepted.
        ValueError: shapes that do not match; a cache that cannot be read or written in place; if checked, a length or
            an entry of block_table that breaks the rules above.
        MemoryError: num_splits needs more scratch than there is memory.
    """
    mod, of_mod = parse_score_mod(score_mod, mask_mod, mod_args)
    mod = mod and mod.with_mask_as_score()
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": cache_seqlens, **of_mod}
    optional = {"block_table": block_table, "k": k, "v": v, "tree": tree, "alibi_slopes": alibi_slopes, "sinks": sinks}
    optional |= {"k_descale": k_descale, "v_descale": v_descale, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    arrays |= {name: a for name, a in optional.items() if a is not None}
    if checked is None:
        checked = not device.ON_GPU
    how = stage, mod, checked, rotary_interleaved
    options = DecodeOptions(window, causal, softmax_scale, num_splits, return_lse, *how)
    if (prefix_k is None and prefix_v is None) or not all(
        len(getattr(a, "shape", ())) == 4 for a in (q, k_cache, v_cache)
    ):
        return run(Decoding(arrays, options))
    unbounded = mask_window(window, causal)[0] < 0 and alibi_slopes is None
    masks = mask_mod.mask_mod if isinstance(mask_mod, BlockMask) else mask_mod
    check_prefix(q, k_cache, v_cache, prefix_k, prefix_v, unbounded=unbounded, score_mod=score_mod, mask_mod=masks)
    if rotary_cos is not None or rotary_sin is not None:
        raise ValueError("a prefix with rotary_cos: its keys come rotated, so rotate q and k before the call")
    check_flags(return_lse=return_lse)
    own = run(Decoding(arrays, options._replace(return_lse=True)))
    functions = {"score_mod": score_mod, "mask_mod": mask_mod, "mod_args": mod_args} if mod else {}
    by_parts = None if mod else partial(_attend_to_all, softmax_scale)
    o, lse = join_prefix(q, prefix_k, prefix_v, *own, softmax_scale=softmax_scale, by_parts=by_parts, **functions)
    return (o, lse) if return_lse else o


def _attend_to_all(softmax_scale: float | None, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Attend from each row of q (1, rows, kv_heads, d) to all keys of k and v (1, keys, kv_heads, d): o and lse."""
    lengths = device.cp.full(1, k.shape[1], dtype=np.int32)
    options = DecodeOptions(None, False, softmax_scale, return_lse=True)
    return run(Decoding({"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": lengths}, options))


# ---- a call


class Decoding(Call):
    """A call for the newest tokens of each sequence, with its cache."""

    __slots__ = ()
    options: DecodeOptions

    def plan(self, specs: Mapping[str, Spec]) -> Plan:
        """See `Call.plan`."""
        options, wide = self.options, (name for name in _INDICES if name in specs and specs[name].dtype == np.int64)
        narrowed = [Change(name, "int32") for name in wide]
        specs = _of_q_s_columns({**specs, **{each.name: each.spec(specs[each.name]) for each in narrowed}})
        widened = _widened(specs)
        columns = specs["q"].shape[3] if widened else 0
        if widened:
            options = options._replace(softmax_scale=softmax_scale_of(options.softmax_scale, columns))
            specs = changed(specs, widened)
        decoder, call, outputs = check(specs, options)
        before = partial(_check_contents, options) if options.is_checked else None
        if call is None:
            if columns:
                outputs["o"] = outputs["o"]._replace(shape=(*outputs["o"].shape[:3], columns))
            return Plan(None, tuple(specs), outputs, before=before)
        own = copies(decoder, call)
        scale = -call.softmax_scale if decoder.negates(call) else call.softmax_scale
        call = call._replace(arrays=changed(call.arrays, own), softmax_scale=scale)
        hint = f"num_splits = {call.num_splits}" if call.num_splits else ""
        rotary_dim = specs["rotary_cos"].shape[1] if "rotary_cos" in specs else 0
        compiled = compile_plan(decoder, call, options.key, rotary_dim)
        changes = [*narrowed, *widened, *own]
        how: dict[str, Any] = {"changes": changes, "columns": columns, "before": before, "memory_hint": hint}
        return Plan(compiled, tuple(specs), outputs, **how)

    def check_host_arrays(self) -> None:
        """Check that a cache that gets new tokens can be written."""
        for name in self.written:
            a = self.arrays[name]
            if not isinstance(a, (np.ndarray, device.cp.ndarray)) and kind_of(a) is None:
                got = type(a).__name__
                raise TypeError(f"{name} is written: an array of NumPy or the device, or a tensor on a GPU; got {got}")
            if getattr(a, "is_neg", bool)():  # a copy would get the new tokens
                raise ValueError(f"{name} is written, and its signs are not those in memory: {name}.resolve_neg()")
        if self.written:
            _check_written(self.arrays)

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the caches that the call appends to; () without new tokens."""
        return _CACHES if {"k", "v"} <= {*self.arrays} else ()


_INDICES = ("cache_seqlens", "block_table", "tree")


def _of_q_s_columns(specs: Mapping[str, Spec]) -> Mapping[str, Spec]:
    """Leave those columns of a wider cache that q has, where these are whole chunks of 16 bytes."""
    q, caches = specs["q"], {name: specs[name] for name in _CACHES}
    if not _is_narrower(specs) or not _in_chunks(q.shape[3], q, *caches.values()):
        return specs
    return {**specs, **{name: a._replace(shape=(*a.shape[:3], q.shape[3])) for name, a in caches.items()}}


def _is_narrower(specs: Mapping[str, Spec]) -> bool:
    """Return True if q's head_dim is not one of HEAD_DIMS, and the caches' a larger one of these."""
    q, k_cache, v_cache = specs["q"], specs["k_cache"], specs["v_cache"]
    if q.ndim != 4 or k_cache.ndim != 4 or k_cache.shape != v_cache.shape or k_cache.shape[3] not in HEAD_DIMS:
        return False
    return 0 < q.shape[3] < k_cache.shape[3] and q.shape[3] not in HEAD_DIMS


def _in_chunks(columns: int, *arrays: Spec) -> bool:
    """Return True if this many columns are whole chunks of 16 bytes in each array."""
    return not any(columns * a.dtype.itemsize % 16 for a in arrays)


def _widened(specs: Mapping[str, Spec]) -> list[Change]:
    """List the zero-padded copies that make q, k and v as wide as a wider cache, if their rows are not whole chunks."""
    if not _is_narrower(specs):
        return []
    columns = specs["q"].shape[3:]
    narrow = [name for name in "qkv" if name in specs and specs[name].shape[3:] == columns]
    return [Change(name, "padded", columns=specs["k_cache"].shape[3]) for name in narrow]


# ---- checks


def _check_contents(options: DecodeOptions, kind: Kind, arrays: Mapping[str, Any]) -> None:
    """Raise ValueError for invalid lengths or block-table entries, for which the host waits."""
    q, k_cache, table = arrays["q"], arrays["k_cache"], arrays.get("block_table")
    if device.ON_GPU and kind.is_captured(kind.stream(q)):
        raise ValueError("checked=True reads cache_seqlens on the host, which a CUDA graph cannot: checked=False")
    if "tree" in arrays:
        _check_tree(kind.to_numpy(arrays["tree"]))
    if "k" in arrays:
        _check_written({name: kind.device_array(a) for name, a in arrays.items() if name in _WRITTEN})
    check_slots(
        kind.to_numpy(arrays["cache_seqlens"]),
        None if table is None else kind.to_numpy(table),
        rows=k_cache.shape[1],
        pages=k_cache.shape[0],
        tokens=q.shape[1],
        appends="k" in arrays,
        window=mask_window(options.window, options.causal),
    )
    if "rotary_cos" in arrays:
        rows, last = arrays["rotary_cos"].shape[0], int(kind.to_numpy(arrays["cache_seqlens"]).max()) + q.shape[1] - 1
        if last >= rows:
            raise ValueError(f"rotary_cos has {rows} positions, and a new token is at {last}: longer tables are needed")


def _check_tree(tree: np.ndarray) -> None:
    """Raise ValueError for a token that follows one that does not precede it."""
    for at in np.argwhere((tree < -1) | (tree >= np.arange(tree.shape[-1])))[:1]:
        where, token = ", ".join(map(str, at)), at[-1]
        raise ValueError(f"tree[{where}] = {tree[tuple(at)]}; token {token} follows one of -1 to {token - 1}")


_CACHES = ("k_cache", "v_cache")
_WRITTEN = (*_CACHES, "k", "v")  # two of them, with what the two others have


def _check_written(arrays: Mapping[str, Any]) -> None:
    """Raise ValueError for caches that cannot get new tokens: read-only ones, and two that share memory."""
    for name in _CACHES:
        if isinstance(arrays[name], np.ndarray):
            check_writable(name, arrays[name], _USE)
    if not all(isinstance(arrays[name], (np.ndarray, device.cp.ndarray)) for name in _WRITTEN):
        return
    k_cache, v_cache, k, v = (Addresses(arrays[name]) for name in _WRITTEN)
    if k_cache == v_cache and k == v:  # each key is also its value
        return
    if share_memory(k_cache, v_cache):
        raise ValueError("k_cache and v_cache share memory: new keys and values would overwrite each other")


_USE = "k and v are written into it"


def check(specs: Mapping[str, Spec], options: DecodeOptions) -> tuple[Stage, DecodeCall | None, dict[str, Output]]:
    """Validate; return the decoder, the call (None if no token sees a key), and the outputs.

    Raises:
        TypeError, ValueError: as for `flash_attention_with_kvcache`.
    """
    q, k_cache, table = specs["q"], specs["k_cache"], specs.get("block_table")
    decoder = _decoder_of(specs, options)
    _check_shapes(specs)
    if "tree" in specs:
        _check_tree_s_shape(specs, options)
    check_same_device(specs)
    check_flags(
        return_lse=options.return_lse, checked=options.is_checked, rotary_interleaved=options.rotary_interleaved
    )
    if options.rotary_interleaved and "rotary_cos" not in specs:
        raise ValueError("rotary_interleaved is given without rotary_cos and rotary_sin")
    splits = whole_number("num_splits", options.num_splits, least=0)
    window = mask_window(options.window, options.causal)
    scale = softmax_scale_of(options.softmax_scale, q.shape[3])
    batch, tokens, heads, _ = q.shape
    outputs = {"o": Output((batch, tokens, heads, specs["v_cache"].shape[3]), q.dtype)}
    if options.return_lse:
        outputs["lse"] = Output((batch, heads, tokens), np.dtype(np.float32))
    room = k_cache.shape[1] * (table.shape[1] if table else 1)
    if not (batch and tokens and room):
        return decoder, None, outputs
    arrays = {**specs, **{name: dense(each.shape, each.dtype) for name, each in outputs.items()}}
    arrays |= {name: arrays[name].with_axes(2) for name in ("tree", "alibi_slopes") if name in arrays}
    # Parts beyond one per 16 keys, the smallest tile, would be empty.
    splits, mod = min(splits, -(-room // SMALLEST_TILE)), bind_to_call(options.mod, arrays)
    return decoder, DecodeCall(arrays, window, scale, splits, mod, options.rotary_interleaved), outputs


def _decoder_of(specs: Mapping[str, Spec], options: DecodeOptions) -> Stage:
    stage, q = options.stage, specs["q"]
    if stage is not None and (not isinstance(stage, str) or stage not in DECODERS):
        raise ValueError(f"stage={stage!r} does not decode; there are: {', '.join(DECODERS)}")
    decoder = SPLIT_KV if stage is None else DECODERS[stage]
    if q.dtype.name not in decoder.dtypes:
        raise TypeError(f"q is {titles(q.dtype.name)}; {decoder.name} takes {', '.join(decoder.dtypes)}")
    if limits.compute_capability() < decoder.min_cc:
        here = limits.compute_capability() / 10
        raise ValueError(f"{decoder.name} needs compute capability {decoder.min_cc / 10}; this GPU has {here}")
    asked = [name for name in ("block_table", "k", "tree", "alibi_slopes", "sinks", "rotary_cos") if name in specs]
    asked += ["score_mod"] * bool(options.mod)
    of_caches = {specs[name].shape[-1:] for name in _CACHES}
    asked += [OTHER_DIMS] * (len(of_caches) > 1 or of_caches.isdisjoint((d,) for d in HEAD_DIMS))
    if specs["k_cache"].dtype == np.uint8:
        asked.append("e4m3")
        if limits.compute_capability() < 89:
            raise ValueError("a cache in e4m3 needs compute capability 8.9")
    if missing := [name for name in asked if name not in decoder.features]:
        raise ValueError(f"{decoder.name} is a step to {SPLIT_KV.name}: it has no {missing[0]}")
    return decoder


def _check_shapes(specs: Mapping[str, Spec]) -> None:
    q, k_cache, v_cache = specs["q"], specs["k_cache"], specs["v_cache"]
    table, lengths = specs.get("block_table"), specs["cache_seqlens"]
    forms = {"q": "(batch, seq_q, heads, head_dim)", "k": "(batch, seq_q, kv_heads, head_dim)"}
    of_cache = "(pages, page_size, kv_heads, head_dim)" if table else "(batch, seq_max, kv_heads, head_dim)"
    forms |= {"k_cache": of_cache, "v_cache": of_cache, "v": forms["k"]}
    for name, a in specs.items():
        if name not in forms:
            continue
        if a.ndim != 4:
            raise ValueError(f"{name} has shape {a.shape}; 4 axes are needed: {forms[name]}")
        if name.endswith("_cache") and a.dtype == np.uint8:
            if q.dtype.itemsize != 2:
                raise TypeError(f"{name} is e4m3 (in uint8) and q is {q.dtype}: float16 or bfloat16 is needed")
        else:
            check_same_dtype(name, a, q)
        if a.shape[1] >= MAX_ROWS:
            raise ValueError(f"{name} has shape {a.shape}; fewer than {MAX_ROWS:,} rows are needed")
        if name in ("k_cache", "k") and a.shape[3] != q.shape[3]:
            raise ValueError(f"head_dim differs: q has shape {q.shape} and {name} {a.shape}")
    batch, tokens, heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    check_same_dtype("v_cache", v_cache, k_cache)
    for name, columns in (("q", head_dim), ("v_cache", v_cache.shape[3])):
        if not 0 < columns <= max(HEAD_DIMS) or not _in_chunks(columns, q, k_cache):
            step = 16 // min(q.dtype.itemsize, k_cache.dtype.itemsize)
            raise ValueError(
                f"{name} has head_dim = {columns}; a multiple of {step} up to {max(HEAD_DIMS)} is needed, or a wider "
                f"cache of {', '.join(map(str, HEAD_DIMS))}"
            )
    for name in ("k_descale", "v_descale"):
        if name not in specs:
            continue
        if k_cache.dtype != np.uint8:
            raise ValueError(f"{name} is for a cache in e4m3; k_cache is {k_cache.dtype}")
        if specs[name].dtype != np.float32 or specs[name].shape != (batch, kv_heads):
            got = f"{specs[name].dtype} {specs[name].shape}"
            raise ValueError(f"{name} is {got}; float32 {(batch, kv_heads)} is needed: batch, kv_heads")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(f"k_cache has shape {k_cache.shape} and v_cache {v_cache.shape}: each key needs its value")
    if not heads or not kv_heads or heads % kv_heads:
        raise ValueError(f"{heads} heads of q cannot share {kv_heads} heads of the cache: kv_heads must divide heads")
    for name in _INDICES:
        if name in specs and specs[name].dtype != np.int32:
            raise TypeError(f"{name} is {specs[name].dtype}; int32 or int64 is needed: {name}.astype('int32')")
    if lengths.shape != (batch,):
        raise ValueError(f"cache_seqlens has shape {lengths.shape}; ({batch},) is needed, a number for each sequence")
    room = k_cache.shape[1]
    if table is None:
        if k_cache.shape[0] != batch:
            raise ValueError(f"q has {batch} sequences and the cache {k_cache.shape[0]}: one number is needed")
    else:
        if table.ndim != 2 or table.shape[0] != batch:
            raise ValueError(f"block_table has shape {table.shape}; ({batch}, pages of a sequence) is needed")
        if room < 1:
            raise ValueError(f"pages of {room} keys; 1 or more is needed")
        room *= table.shape[1]
        if room >= MAX_ROWS:
            raise ValueError(f"block_table has shape {table.shape}: {room:,} keys; fewer than {MAX_ROWS:,} are needed")
    if ("k" in specs) != ("v" in specs):
        raise ValueError("k and v come together: each new key needs its value")
    if "k" in specs:
        for name, columns in (("k", head_dim), ("v", v_cache.shape[3])):
            wanted = batch, tokens, kv_heads, columns
            if specs[name].shape != wanted:
                raise ValueError(f"{name} has shape {specs[name].shape}; {wanted} is needed: as many tokens as q has")
        if tokens > room:
            raise ValueError(f"{tokens} new tokens, and the cache has room for {room}")
        for name in _CACHES:
            check_writable(name, specs[name], _USE)
    for name in _CACHES:
        if not (specs[name].in_rows and specs[name].aligned):
            raise ValueError(
                f"{name} is read where it is: the words of a row must be neighbours, and rows start at multiples of 16 "
                f"bytes; got strides {specs[name].strides}"
            )
        if specs[name].strides[1] >= 2**32 or (table is not None and specs[name].strides[0] >= 2**32):
            raise ValueError(f"{name} has strides {specs[name].strides}; a row or a page is less than 4 GB long")
    if any(name in specs for name in ROTARY_TABLES):
        _check_rotary(specs)
    if "sinks" in specs:
        check_sinks(specs["sinks"], heads)
    if "alibi_slopes" in specs:
        check_slopes(specs["alibi_slopes"], batch, heads)


def _check_rotary(specs: Mapping[str, Spec]) -> None:
    for name, other in (ROTARY_TABLES, ROTARY_TABLES[::-1]):
        if name not in specs:
            raise ValueError(f"{other} is given without {name}")
        check_table(name, specs[name], specs["q"].dtype, specs["q"].shape[3])
    check_one_form(*(specs[name] for name in ROTARY_TABLES))
    if "k" not in specs:
        raise ValueError("rotary_cos needs k and v: keys in the cache are rotated already, and so should q be")
    if "tree" in specs:
        raise ValueError("rotary_cos with a tree: drafts are not at positions in a row; rotate q and k before the call")


def _check_tree_s_shape(specs: Mapping[str, Spec], options: DecodeOptions) -> None:
    tree, (batch, tokens) = specs["tree"], specs["q"].shape[:2]
    if tree.shape not in ((tokens,), (batch, tokens)):
        raise ValueError(f"tree has shape {tree.shape}; ({tokens},) or ({batch}, {tokens}) is needed: q's tokens")
    if mask_window(options.window, options.causal) != (-1, 0) or "alibi_slopes" in specs:
        raise ValueError(
            "a tree needs causal=True, and neither a window nor alibi_slopes: distances are not the tree's"
        )


# ---- for X-rays and experiments


def plan(
    arrays: Mapping[str, Any],
    options: DecodeOptions,
    *,
    source: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> tuple[CompiledPlan, dict[str, Any]]:
    """Plan a call of device arrays, as `run.lay_out` does: return its launches, and all its arrays by name."""
    return lay_out(Decoding(arrays, options), source=source, sizes=sizes)[:2]
